"""Writing behind: what the prefix tree holds goes to the disk tier, in order. MLX thread only.

A path whose tokens are not on disk yet is locked in the tree until they are, so nothing leaves RAM
before it is in a file. What the disk has of it already is asked on the writer's thread, path by
path: others may have put it there, or taken it away. Slices are copied out of lineages a run at a
time, and only while the writer has room for them; its thread never touches an array that anybody
writes to.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlxcache.errors import PrefixNotStored, StoreError
from mlxcache.model import serialise as wire
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Span
from mlxcache.safetensors import Tensor
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Found
from mlxcache.store.writer import Job, Writer
from mlxcache.tree.prefix_tree import Node, PrefixTree
from mlxcache.tree.thinning import allowed, checkpoints_to_drop
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.engine")

RUN_TOKENS, RUN_BYTES = 2048, 32 << 20
"""The most that one file holds: what a restore reads at once, and a copy takes beside a reply."""


def run_tokens(layout: Layout, room: int) -> int:
    """How many tokens one file holds where `room` bytes may be on their way to disk."""
    most = min(RUN_BYTES, room // 2) // max(1, layout.bytes_per_token)
    return max(BLOCK, min(RUN_TOKENS, most) // BLOCK * BLOCK)


class Buffers:
    """Buffers of `size` bytes each; a copy of less than half of that gets memory of its own."""

    def __init__(self, size: int):
        self.size = size
        self._free: list[memoryview] = []
        self._taken: dict[int, memoryview] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        return self.size * (len(self._free) + len(self._taken))

    def rest(self) -> None:
        """Give back to the system what is not in use."""
        self._free.clear()

    def take(self, size: int) -> memoryview:
        """Room for `size` bytes, with anything in it."""
        if not self.size // 2 < size <= self.size:
            return np.empty(size, np.uint8).data
        whole = self._free.pop() if self._free else np.empty(self.size, np.uint8).data
        part = whole[:size]
        self._taken[_address(part)] = whole
        return part

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Take back what `take` gave for `tensors`, which nobody reads any more."""
        if tensors and (whole := self._taken.pop(_address(tensors[0].bytes), None)) is not None:
            self._free.append(whole)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


FIRST_S, RETRY_S = 1.0, 30.0
"""Seconds for which a disk that failed is left alone: at first, and at most; each time twice as
long, for what is wrong may be over at once or last for hours."""


class Refused:
    """Paths of the prefix tree that are to be written once the disk works again.

    Nothing is kept in RAM for them: what is evicted meanwhile, or was merged into a longer path, is
    no longer waited for. `wake_in` has the MLX thread look again in so many seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.failing = False
        self.wake_in: Callable[[float], None] = lambda seconds: None
        self._clock = clock
        self._nodes: dict[Node, None] = {}
        self._pause = 0.0
        self._retry_at = self._failed_at = float("-inf")

    def failed(self, least: float = FIRST_S) -> None:
        """The disk has failed: leave it alone for a while, `least` seconds or longer."""
        now = self._clock()
        self.failing = True
        if now < self._retry_at:
            return
        lately = now - self._failed_at < 2 * RETRY_S
        self._pause = max(least, min(2 * self._pause, RETRY_S) if lately else FIRST_S)
        self._failed_at, self._retry_at = now, now + self._pause
        self.wake_in(self._pause)

    def worked(self) -> None:
        """Something was written."""
        self.failing = False
        self.hurry()

    def hurry(self) -> None:
        """Try again now."""
        self._retry_at = float("-inf")

    @property
    def leaves_alone(self) -> bool:
        """Whether the disk is to be left alone now."""
        return self._clock() < self._retry_at

    @property
    def due(self) -> bool:
        """Whether there is something to try again with, and it may be now."""
        return bool(self._nodes) and not self.leaves_alone

    def add(self, node: Node) -> None:
        """The path to `node` is to be written later."""
        if not node.detached:
            self._nodes[node] = None

    def take(self) -> tuple[Node, Tokens] | None:
        """The path that waits longest, with its tokens; None if none is left in the tree."""
        while self._nodes:
            node = next(iter(self._nodes))
            del self._nodes[node]
            if not node.detached:
                return node, np.concatenate([each.tokens for each in node.path()])
        return None


States = list[tuple[int, State]]
"""Checkpoints by their position, ascending."""


@dataclass(slots=True, eq=False)
class Spill:
    """Tokens on their way to disk, and the checkpoints `wanted` there.

    Once the disk was `looked` at, `at` is the next token to hand over, and `states` follow the
    runs. `flying` jobs are with the writer. `lost`: what they build on was not there any more.
    `reused`: tokens that a request went on from, which is yet to be counted on disk.
    """

    node: Node
    ids: Tokens
    wanted: States
    reused: int = 0
    looked: bool = False
    at: int = 0
    states: States = field(default_factory=list)
    flying: int = 0
    lost: bool = False
    tries: int = 0

    @property
    def handed(self) -> bool:
        """Whether the writer has got all that it is to get."""
        return self.looked and self.at >= len(self.ids) and not self.states

    def begin(self, found: Found, layout: Layout, limit: int) -> None:
        """Hand over what `found` on disk lacks, of which the tier takes `limit` bytes."""
        whole = found.length // BLOCK * BLOCK if found.length < len(self.ids) else len(self.ids)
        self.at = whole if layout.specs else len(self.ids)
        there = [one.position for one in found.checkpoints]
        lacking = _lacking([at for at, _ in self.wanted if at <= len(self.ids)], there)
        size, kv_bytes = layout.checkpoint_bytes, len(self.ids) * layout.bytes_per_token
        most = allowed(kv_bytes, size, limit) // max(1, size)
        gone = checkpoints_to_drop(sorted({*there, *lacking}), len(self.ids), most)
        self.states = [one for one in self.wanted if one[0] in lacking and one[0] not in gone]
        self.looked = True

    def checkpoint(self, layout: Layout) -> Job | None:
        """The next checkpoint as a job; None where its path has become shorter."""
        at, state = self.states.pop(0)
        ids = self.ids[:at]
        if len(ids) < at:
            return None
        return Job(ids, None, wire.state_tensors(state), layout.checkpoint_bytes, self)

    def stop(self, *, lost: bool = False) -> None:
        """Hand over nothing more; all over again once the writer is through if it is `lost`."""
        self.looked, self.at, self.states, self.lost = True, len(self.ids), [], lost

    def waive(self, state: State) -> None:
        """Have one checkpoint less written, and let go of it."""
        self.wanted = [one for one in self.wanted if one[1] is not state]
        self.states = [one for one in self.states if one[1] is not state]

    def again(self) -> None:
        """Begin again with a look at the disk."""
        self.looked, self.at, self.lost = False, 0, False
        self.tries += 1


def _lacking(positions: list[int], there: list[int]) -> set[int]:
    """Which of `positions` the disk, which has checkpoints at `there`, has never had.

    What is older than its newest was there, and was thinned; but the first stays for ever.
    """
    newer = {at for at in positions if at > max(there, default=0)}
    head = {at for at in positions[:1] if at < min(there, default=0)}
    return newer | head


def states_of(node: Node) -> States:
    """The checkpoints on the path to `node`."""
    return [(n.end, n.checkpoint) for n in node.path() if n.checkpoint is not None]


WORTH_WRITING = 1024
"""New tokens of a running request after which they are written while it goes on."""

RELIEF_S = 2.0
"""Seconds that a request which needs room waits for a disk that ends no write."""

TRIES = 2
"""How often a path is begun again whose beginning was evicted from disk meanwhile."""


class Persist:
    """The queue between the prefix tree and the writer, bounded by `room` bytes of copies.

    `limit`: bytes that the disk tier may take, as far as it decides which checkpoints are written.
    """

    def __init__(
        self,
        layout: Layout,
        tree: PrefixTree,
        room: int,
        *,
        limit: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.layout = layout
        self.tree = tree
        self.room = room
        self.limit = limit
        self.done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.pending_bytes = self._pending_tokens = 0
        self.refused = Refused(clock)
        self._clock = clock
        self._queue: deque[Spill] = deque()
        self._handed: set[Spill] = set()
        self._asked: Spill | None = None
        self._writer: Writer | None = None
        self._look: Callable[[Spill], None] | None = None
        self.run_tokens = run_tokens(layout, room)
        self.buffers = Buffers(wire.run_bytes(layout, self.run_tokens))

    def attach(self, writer: Writer, look: Callable[[Spill], None]) -> None:
        """Write through `writer`, and have `look` ask what the disk has.

        Their answers are put into `done`, as calls of `finished` and `seen`.
        """
        self._writer, self._look = writer, look

    @property
    def busy(self) -> bool:
        """Whether something is not on disk yet, and so is kept in RAM."""
        return bool(self._queue or self._handed)

    @property
    def ready(self) -> bool:
        """Whether `pump` has something to do."""
        if not self._queue:
            return not self.busy and self.refused.due
        if self._asked is self._queue[0]:
            return False
        return not self._queue[0].looked or not self.pending_bytes or self._fits(self._next_bytes())

    def _next_bytes(self) -> int:
        path = self._queue[0]
        left = min(self.run_tokens, len(path.ids) - path.at)
        return max(0, left) * self.layout.bytes_per_token or self.layout.checkpoint_bytes

    def _fits(self, size: int) -> bool:
        return self.pending_bytes + size <= self.room

    # -- what is to be written -----------------------------------------------------------------

    def mark(self, node: Node, ids: Tokens, reused: int = 0) -> None:
        """Have `ids`, which end at `node` or above, written, with the checkpoints among them."""
        if node is self.tree.root:
            return
        if self.refused.leaves_alone:
            self.refused.add(node)
            return
        wanted = states_of(node)
        if self.layout.specs or wanted:
            self.tree.lock(node)
            self._queue.append(Spill(node, ids, wanted, reused))

    def locks(self, node: Node) -> int:
        """How many locks of `node` are of paths on their way to disk."""
        return sum(node in path.node.path() for path in [*self._queue, *self._handed])

    def forget(self, nodes: Sequence[Node]) -> None:
        """Write no path that any of `nodes` is on; what the writer has of it, it writes."""
        held = [*self._queue, *self._handed]
        self._drop([path for path in held if any(node in nodes for node in path.node.path())])

    def waive(self, node: Node) -> None:
        """Hand the checkpoint at `node` over no more: it is worth too little to stay in RAM."""
        for path in [*self._queue, *self._handed]:
            path.waive(node.checkpoint)

    # -- handing over --------------------------------------------------------------------------

    def pump(self) -> bool:
        """Take in what is done, and hand one more job to the writer if it has room."""
        self.collect()
        if not self.busy and self.refused.due and (found := self.refused.take()) is not None:
            self.mark(*found)  # one at a time: little is locked in RAM for it
        while self._queue:
            path = self._queue[0]
            if path.handed:
                self._queue.popleft()
                self._handed.add(path)
                self._settle(path)
                continue
            if not path.looked:
                self._ask(path)
                return False
            if self.pending_bytes and not self._fits(self._next_bytes()):
                return False
            job = self._next(path)
            if job is not None:
                self._offer(path, job)
                return True
        return False

    def _ask(self, path: Spill) -> None:
        """Have the disk looked at, after all that the writer has got so far."""
        if self._asked is not path:
            assert self._look is not None
            self._asked = path
            self._look(path)

    def seen(self, path: Spill, found: Found | StoreError) -> None:
        """The disk was asked for `path`, and this is what it has."""
        if self._asked is path:
            self._asked = None
        if isinstance(found, StoreError):
            self._suspend(found)
        elif not path.looked:
            path.begin(found, self.layout, self.limit)

    def _offer(self, path: Spill, job: Job) -> None:
        self.pending_bytes += job.nbytes
        self._pending_tokens += job.tokens
        path.flying += 1
        if self._writer is None or not self._writer.offer(job):
            raise RuntimeError("the writer has less room than is kept for it")

    def _next(self, path: Spill) -> Job | None:
        """The next job of a path; what cannot be copied now, for lack of memory, is later."""
        try:
            return self._run(path) if path.at < len(path.ids) else path.checkpoint(self.layout)
        except RuntimeError as error:
            self._suspend(StoreError(f"it cannot be copied: {error}"))
            return None

    def _run(self, path: Spill) -> Job | None:
        """The next run of a path, its slices copied; None where RAM does not hold it any more."""
        start, end = path.at, min(path.at + self.run_tokens, len(path.ids))
        match = self.tree.match(path.ids[:end], touch=False)
        spans: list[Span] = match.spans(end) if match.length >= end else []
        within = [(owner, max(start, a), b) for owner, a, b in spans if b > start]
        if not within or any(owner.lost or owner.window_valid_from > a for owner, a, _ in within):
            path.stop()
            return None
        size = wire.run_bytes(self.layout, end - start)
        tensors = wire.copied_run(self.layout, within, self.buffers.take(size))
        path.at = end
        return Job(path.ids[:end], start, tensors, size, path, wire.late_names(self.layout))

    # -- what became of it ---------------------------------------------------------------------

    def collect(self) -> None:
        """Take in what the writer has done, and let go of what is on disk."""
        while True:
            try:
                answer = self.done.get_nowait()
            except queue.Empty:
                return
            answer()

    def finished(self, job: Job, error: StoreError | None) -> None:
        """The writer is through with `job`."""
        path: Spill = job.tag
        path.flying -= 1
        self.pending_bytes -= job.nbytes
        self._pending_tokens -= job.tokens
        if job.start is not None:
            self.buffers.give(job.tensors)
        if error is None:
            if self.refused.failing:
                log.warning("the disk tier works again")
            self.refused.worked()
        elif isinstance(error, PrefixNotStored):
            path.stop(lost=True)
        else:
            self._suspend(error)
        self._settle(path)

    def _suspend(self, error: StoreError, **least: float) -> None:
        """Leave the disk alone for a while: everything is served from RAM, and written later."""
        if not self.refused.failing:
            log.warning("the disk tier is suspended, all is served from RAM: %s", error)
        self.refused.failed(**least)
        for path in [*self._queue, *self._handed]:
            path.stop()
            self.refused.add(path.node)

    def _settle(self, path: Spill) -> None:
        """Let a path go whose last job is done; one that is lost begins again, if not too often."""
        if not path.handed or path.flying or path not in self._handed:
            return
        self._handed.discard(path)
        if path.lost and path.tries < TRIES and not path.node.detached:
            path.again()
            self._queue.append(path)
        elif not path.node.detached:
            self.tree.unlock(path.node)

    # -- waiting -------------------------------------------------------------------------------

    def relieve(self, seconds: float = RELIEF_S) -> bool:
        """Wait for some path to be on disk, so that it may be evicted; False if there is none.

        Where nothing at all is written for so long, all are let go: replies come first.
        """
        before, deadline = len(self._queue) + len(self._handed), self._clock() + seconds
        while before and len(self._queue) + len(self._handed) >= before:
            self.pump()
            if self._clock() >= deadline:
                self._let_go()
            elif self.busy and self._wait(deadline - self._clock()):
                deadline = self._clock() + seconds
        return before > 0

    def _let_go(self) -> None:
        """Give up what is not on disk yet; what the writer has, it writes from copies."""
        self._suspend(StoreError("it is too slow for what has to leave RAM"), least=RETRY_S)
        self._drop([*self._queue, *self._handed])

    def _drop(self, paths: Sequence[Spill]) -> None:
        for path in paths:
            path.stop()
            if not path.node.detached:
                self.tree.unlock(path.node)
        self._queue = deque(path for path in self._queue if path not in paths)
        self._handed -= set(paths)
        self._asked = None if self._asked in paths else self._asked

    def drain(self, seconds: float) -> int:
        """Write all that is left, for at most so long; the most tokens that were not written."""
        deadline = self._clock() + seconds
        self.refused.hurry()
        while (self.busy or self.refused.due) and self._clock() < deadline:
            if not self.pump():
                self._wait(deadline - self._clock())
        return self._pending_tokens + sum(len(path.ids) - path.at for path in self._queue)

    def _wait(self, seconds: float) -> bool:
        """Wait for an answer of the writer's thread; False if none is due, or none came."""
        if not self.pending_bytes and self._asked is None:
            return False
        try:
            answer = self.done.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return False
        answer()
        return True
