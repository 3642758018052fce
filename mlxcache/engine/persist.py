"""Writing behind: what the prefix tree holds goes to the disk tier, in order. MLX thread only.

A path whose tokens are not on disk yet is locked in the tree until they are, so nothing leaves RAM
before it is in a file. Slices are copied out of lineages a run at a time, and only while the writer
has room for them; the writer's thread never touches an array that anybody writes to.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable

from mlxcache.cache.tree import Node, PrefixTree
from mlxcache.engine.buffers import Buffers
from mlxcache.engine.spill import Spill, states_worth_writing
from mlxcache.errors import NotAnchored, StoreError
from mlxcache.model import wire
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Span
from mlxcache.store.digests import BLOCK, Chain, Chains
from mlxcache.store.writer import Job, Writer
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.engine")

RUN_TOKENS, RUN_BYTES = 2048, 32 << 20
"""The most that one file holds: what a restore reads at once, and a copy takes beside a reply."""

WORTH_WRITING = 1024
"""New tokens of a running request after which they are written while it goes on."""

RETRY_S = 30.0
"""Seconds for which a disk that failed is left alone."""

RELIEF_S = 2.0
"""Seconds that a request which needs room waits for a disk that ends no write."""

STATE = b"state"  # what the digests of checkpoints begin with among those that are known


class Persist:
    """The queue between the prefix tree and the writer, bounded by `room` bytes of copies."""

    def __init__(
        self,
        layout: Layout,
        tree: PrefixTree,
        namespace: str,
        room: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.layout = layout
        self.tree = tree
        self.chains = Chains(namespace)
        self.room = room
        self.known: set[bytes] = set()
        self.done: queue.SimpleQueue[tuple[Job, StoreError | None]] = queue.SimpleQueue()
        self.pending_bytes = self._pending_tokens = 0
        self.failing = False
        self._retry_at = 0.0
        self._clock = clock
        self._queue: deque[Spill] = deque()
        self._handed: set[Spill] = set()
        self._writer: Writer | None = None
        most = min(RUN_BYTES, room // 2) // max(1, layout.bytes_per_token)
        self.run_tokens = max(BLOCK, min(RUN_TOKENS, most) // BLOCK * BLOCK)
        self.buffers = Buffers(wire.run_bytes(layout, self.run_tokens))

    def attach(self, writer: Writer) -> None:
        """Write through `writer`, which puts what is done into `done`."""
        self._writer = writer

    @property
    def busy(self) -> bool:
        """Whether something is not on disk yet, and so is kept in RAM."""
        return bool(self._queue or self._handed)

    @property
    def ready(self) -> bool:
        """Whether `pump` would hand something over now."""
        return bool(self._queue) and (not self.pending_bytes or self._fits(self._next_bytes()))

    def _next_bytes(self) -> int:
        path = self._queue[0]
        left = min(self.run_tokens, len(path.ids) - path.at)
        return max(0, left) * self.layout.bytes_per_token or self.layout.checkpoint_bytes

    def _fits(self, size: int) -> bool:
        return self.pending_bytes + size <= self.room

    # -- what is to be written -----------------------------------------------------------------

    def learn(self, ids: Tokens) -> None:
        """Take note that whole blocks of `ids` are on disk already."""
        self.known.update(self.chains.of(ids).whole)

    def unlearn(self, chain: Chain) -> None:
        """Take note that what `chain` has may be on disk no more, nor any checkpoint."""
        self.known.difference_update(chain.whole)
        self.known = {key for key in self.known if not key.startswith(STATE)}

    def mark(self, node: Node, ids: Tokens, *, states: bool) -> None:
        """Have `ids`, which end at `node` or above, written; with `states`, checkpoints too."""
        if node is self.tree.root or (self.failing and self._clock() < self._retry_at):
            return
        chain = self.chains.of(ids)
        blocks = enumerate(chain.whole[1:])
        first = next((i for i, one in blocks if one not in self.known), len(ids) // BLOCK)
        at = first * BLOCK if self.layout.specs else len(ids)
        path = Spill(node, ids, chain, at, states_worth_writing(node) if states else [])
        if path.handed:
            return
        self.tree.lock(node)
        self._queue.append(path)

    # -- handing over --------------------------------------------------------------------------

    def pump(self) -> bool:
        """Take in what is done, and hand one more job to the writer if it has room."""
        self.collect()
        while self._queue:
            path = self._queue[0]
            if path.handed:
                self._queue.popleft()
                self._handed.add(path)
                self._settle(path)
                continue
            if self.pending_bytes and not self._fits(self._next_bytes()):
                return False
            job = self._next(path)
            if job is None:
                continue
            self.pending_bytes += job.nbytes
            self._pending_tokens += job.tokens
            path.flying += 1
            if self._writer is None or not self._writer.offer(job):
                raise RuntimeError("the writer has less room than is kept for it")
            return True
        return False

    def _next(self, path: Spill) -> Job | None:
        if path.at < len(path.ids):
            return self._run(path)
        at, state = path.states.pop(0)
        ids, key = path.ids[:at], STATE + path.chain.at(at)
        if len(ids) < at or key in self.known:
            return None
        self.known.add(key)
        return Job(ids, None, wire.state_tensors(state), self.layout.checkpoint_bytes, path)

    def _run(self, path: Spill) -> Job | None:
        """The next run of a path, its slices copied; None where RAM does not hold it any more."""
        start, end = path.at, min(path.at + self.run_tokens, len(path.ids))
        match = self.tree.match(path.ids[:end], touch=False)
        spans: list[Span] = match.spans(end) if match.length >= end else []
        within = [(owner, max(start, a), b) for owner, a, b in spans if b > start]
        if not within or any(owner.lost or owner.hollow > a for owner, a, _ in within):
            path.at, path.states = len(path.ids), []
            return None
        size = wire.run_bytes(self.layout, end - start)
        tensors = wire.copied_run(self.layout, within, self.buffers.take(size))
        path.at = end
        self.known.update(path.chain.whole[start // BLOCK + 1 : end // BLOCK + 1])
        return Job(path.ids[:end], start, tensors, size, path, wire.late_names(self.layout))

    # -- what became of it ---------------------------------------------------------------------

    def collect(self) -> None:
        """Take in what the writer has done, and let go of what is on disk."""
        while True:
            try:
                job, error = self.done.get_nowait()
            except queue.Empty:
                return
            self._finished(job, error)

    def _finished(self, job: Job, error: StoreError | None) -> None:
        path: Spill = job.tag
        path.flying -= 1
        self.pending_bytes -= job.nbytes
        self._pending_tokens -= job.tokens
        if job.start is not None:
            self.buffers.give(job.tensors)
        if error is None:
            if self.failing:
                self.failing = False
                log.warning("the disk tier works again")
        else:
            self._failed(path, job, error)
        self._settle(path)

    def _failed(self, path: Spill, job: Job, error: StoreError) -> None:
        self.unlearn(path.chain)
        if isinstance(error, NotAnchored) and path.tries < 2:
            # what it builds on was evicted from disk meanwhile: once more, from its beginning
            path.tries += 1
            path.at = 0 if self.layout.specs else len(path.ids)
            if path in self._handed:
                self._handed.discard(path)
                self._queue.append(path)
            return
        if not isinstance(error, NotAnchored):
            self._suspend(error)
        path.at, path.states = len(path.ids), []

    def _suspend(self, error: StoreError) -> None:
        """Leave the disk alone for a while: everything is served from RAM."""
        if not self.failing:
            log.warning("the disk tier is suspended, all is served from RAM: %s", error)
        self.failing = True
        self._retry_at = self._clock() + RETRY_S
        for path in [*self._queue, *self._handed]:
            self.known.difference_update(path.chain.whole)
            path.at, path.states = len(path.ids), []

    def _settle(self, path: Spill) -> None:
        """Let a path go whose last job is done."""
        if path.handed and not path.flying and path in self._handed:
            self._handed.discard(path)
            if not path.node.detached:
                self.tree.unlock(path.node)

    # -- waiting -------------------------------------------------------------------------------

    def relieve(self, seconds: float = RELIEF_S) -> bool:
        """Wait for some path to be on disk, so that it may be evicted; False if there is none.

        Where nothing at all is written for so long, all are let go: replies come first.
        """
        before = len(self._queue) + len(self._handed)
        deadline = self._clock() + seconds
        while before and len(self._queue) + len(self._handed) >= before:
            self.pump()
            if self._clock() >= deadline:
                self._let_go()
            elif self.busy and self._wait(deadline - self._clock()):
                deadline = self._clock() + seconds
        return before > 0

    def _let_go(self) -> None:
        """Give up what is not on disk yet; what the writer has, it writes from copies."""
        self._suspend(StoreError("it is too slow for what has to leave RAM"))
        for path in [*self._queue, *self._handed]:
            if not path.node.detached:
                self.tree.unlock(path.node)
        self._queue.clear()
        self._handed.clear()

    def drain(self, seconds: float) -> int:
        """Write all that is left, for at most so long; the tokens that could not be written."""
        deadline = self._clock() + seconds
        while self.busy and self._clock() < deadline:
            if not self.pump():
                self._wait(deadline - self._clock())
        return self._pending_tokens + sum(len(path.ids) - path.at for path in self._queue)

    def _wait(self, seconds: float) -> bool:
        """Wait for the writer to end a job; False if it has none, or did not."""
        if not self.pending_bytes:
            return False
        try:
            job, error = self.done.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return False
        self._finished(job, error)
        return True
