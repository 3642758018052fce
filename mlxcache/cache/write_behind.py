"""Write-behind: paths of the prefix tree are written to disk in order, after their requests.

A path stays locked in the tree until it is on disk, so nothing leaves RAM before it is in a file.
The writer's thread first looks up what the store already has of the path, because other processes
may have added or removed files. Then KV is copied out of lineages, one run at a time, while the
copies that wait to be written stay within their limit. The writer's thread reads only these copies,
never an array that the model still writes to. All functions here run on the MLX thread unless their
docstrings name another one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from mlxcache.cache.kv_io import KVFiles
from mlxcache.cache.path_write import PathWrite, run_tokens
from mlxcache.errors import PrefixNotStored, StoreError
from mlxcache.model import device, serialise
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Span
from mlxcache.store.found import Found
from mlxcache.store.store import Store
from mlxcache.store.writer import Job, Writer
from mlxcache.tree.node import Node
from mlxcache.tree.prefix_tree import PrefixTree
from mlxcache.types import Tokens, join_ids

log = logging.getLogger("mlxcache.engine")

BLOCKED_S = 2.0
"""Seconds that a request waits for a write without progress before writing is suspended."""

REST_S = 10.0
"""Seconds without a further turn after which the new checkpoints of a path are written.

With further turns most need not be: one takes as much as the KV of hundreds of tokens or more.
"""

FIRST_RETRY_S, RETRY_S = 1.0, 30.0
"""Pause after a disk error, in seconds: the first one, and the longest. Each pause doubles."""


class RetryBackoff:
    """Pauses in writing after disk errors, and the paths to write afterwards.

    The paths are not locked in RAM: one that is evicted or merged into a longer one is forgotten.
    `failing` is True from an error until the next write that succeeds.
    """

    def __init__(
        self, wake_in: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ):
        self.failing = False
        self._wake_in = wake_in
        self._clock = clock
        self._nodes: dict[Node, None] = {}
        self._pause = 0.0
        self._retry_at = self._failed_at = -inf

    def note_failure(self, least: float = FIRST_RETRY_S) -> None:
        """Record a disk error; begin a pause of at least `least` seconds, unless there is one."""
        now = self._clock()
        self.failing = True
        if now < self._retry_at:
            return
        recent = now - self._failed_at < 2 * RETRY_S
        self._pause = max(least, min(2 * self._pause, RETRY_S) if recent else FIRST_RETRY_S)
        self._failed_at, self._retry_at = now, now + self._pause
        self._wake_in(self._pause)

    def note_success(self) -> None:
        self.failing = False
        self.end_pause()

    def end_pause(self) -> None:
        self._retry_at = -inf

    @property
    def paused(self) -> bool:
        return self._clock() < self._retry_at

    @property
    def due(self) -> bool:
        return bool(self._nodes) and not self.paused

    @property
    def tokens(self) -> int:
        """Number of tokens of all paths to write, shared ones once; some may be on disk."""
        parts = {part for node in self._nodes if not node.detached for part in node.path()}
        return sum(len(part.tokens) for part in parts)

    def add(self, node: Node) -> None:
        if not node.detached:
            self._nodes[node] = None

    def take(self) -> tuple[Node, Tokens] | None:
        while self._nodes:
            node = next(iter(self._nodes))
            del self._nodes[node]
            if not node.detached:
                return node, join_ids(*(each.tokens for each in node.path()))
        return None


class StagingBuffers:
    """Reusable buffers of `size` bytes each, for copies of KV that wait to be written to disk.

    A copy that takes at most half of `size`, or more than `size`, gets memory of its own.
    """

    def __init__(self, size: int):
        self._size = size
        self._free: list[memoryview] = []
        self._taken: dict[int, memoryview] = {}

    @property
    def nbytes(self) -> int:
        return self._size * (len(self._free) + len(self._taken))

    def release_free(self) -> None:
        self._free.clear()

    def take(self, size: int) -> memoryview:
        if not self._size // 2 < size <= self._size:
            return np.empty(size, np.uint8).data
        whole = self._free.pop() if self._free else np.empty(self._size, np.uint8).data
        part = whole[:size]
        self._taken[_address(part)] = whole
        return part

    def give_back(self, part: memoryview) -> None:
        if (whole := self._taken.pop(_address(part), None)) is not None:
            self._free.append(whole)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


class WriteBehind:
    """Queue of paths between the prefix tree and the store's writer thread, which it owns.

    At most `pending_limit` bytes of copies wait to be written. `wake()` is called from other
    threads when the MLX thread is to call `pump`. `on_durable(ids)` is called on the MLX thread
    with each path that ends where a request ended, once it is on disk; it must not block.
    """

    def __init__(
        self,
        files: KVFiles,
        tree: PrefixTree,
        store: Store,
        pending_limit: int,
        wake: Callable[[], None],
        *,
        on_durable: Callable[[Tokens], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        label: str = "unnamed",
    ):
        self.layout: Layout = files.layout
        self._files = files
        self._label = label
        self.pending_bytes = 0
        self._on_durable = on_durable
        self.run_tokens = run_tokens(self.layout, pending_limit)
        self.buffers = StagingBuffers(serialise.run_bytes(self.layout, self.run_tokens))
        self.backoff = RetryBackoff(self._retry_in, clock)
        self._tree = tree
        self._store = store
        self._pending_limit = pending_limit
        self._pending_tokens = 0
        self._wake = wake
        self._clock = clock
        self._timer = self._rest_timer = threading.Timer(0.0, wake)
        self._paths: list[PathWrite] = []
        self._asking: PathWrite | None = None
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.writer = Writer(
            store,
            2 * pending_limit,  # the limit is kept here; the writer still counts a job it reports
            lambda job, error: self._answer(lambda: self._written(job, error)),
            lambda: self._answer(self.buffers.release_free),
            label=label,
        )

    @property
    def busy(self) -> bool:
        """True if a path is being written, or waits for that; not while it rests."""
        return any(path.stage != "resting" for path in self._paths)

    @property
    def pending_paths(self) -> int:
        return len(self._paths)

    @property
    def ready(self) -> bool:
        """True if `pump` has something to do besides collecting results."""
        now = self._clock()
        if any(path.over or path.rested(now) for path in self._paths):
            return True
        path = self._next()
        if path is None:
            return not self.busy and self.backoff.due
        if self._asking is path:
            return False
        return path.stage == "new" or self._fits(path)

    @property
    def works(self) -> bool:
        """False from a disk error until a write succeeds; else all that is evicted is on disk."""
        return not self.backoff.failing

    def _next(self) -> PathWrite | None:
        return next((path for path in self._paths if path.queued), None)

    def _fits(self, path: PathWrite) -> bool:
        left = min(self.run_tokens, len(path.ids) - path.at)
        size = max(0, left) * self.layout.bytes_per_token or self.layout.checkpoint_bytes
        return not self.pending_bytes or self.pending_bytes + size <= self._pending_limit

    # -- choosing what to write ------------------------------------------------------------------

    def add(
        self,
        node: Node,
        ids: Tokens,
        reused: int = 0,
        *,
        whole: bool = False,
        parting: Sequence[int] = (),
    ) -> None:
        """Queue a path with its checkpoints for writing, and lock `node`.

        `node`: where the path ends, or a node that continues it. The rest: see `PathWrite`. During
        a pause after a disk error nothing is locked, and the path is only remembered for later.
        """
        if node is self._tree.root:
            return
        if self.backoff.paused:
            self.backoff.add(node)
            return
        above = node.path()
        wanted = [(each.end, each.checkpoint) for each in above if each.checkpoint is not None]
        if self.layout.specs or wanted:
            self._drop([p for p in self._paths if p.stage == "resting" and p.node in above])
            path = PathWrite(node, ids, wanted, reused, whole, parting)
            self._tree.lock(node)
            self._paths.append(path)

    def count_locks(self, node: Node) -> int:
        return sum(node in path.node.path() for path in self._paths)

    def forget(self, nodes: Sequence[Node]) -> None:
        self._drop([p for p in self._paths if any(node in nodes for node in p.node.path())])

    def drop_checkpoint(self, node: Node) -> None:
        """Do not write the checkpoint at `node`, because it is about to be dropped from RAM."""
        for path in self._paths:
            path.drop_checkpoint(node.checkpoint)

    def delete_beyond(self, ids: Tokens, keep: int) -> None:
        """Delete from disk the KV of `ids` beyond `keep` tokens, because it is not finite.

        Does not block: the writer's thread deletes the files after the jobs that it already has.
        """
        self.writer.call(
            lambda: self._store.forget_beyond(ids, keep),
            f"deleting KV that is not finite, of a path of {len(ids)} tokens beyond {keep},",
        )

    # -- handing over ------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Apply the results of the writer, and give it at most one file; return whether it got one.

        Raises RuntimeError if a command failed on the device.
        """
        self.collect()
        self._end_rests(self._clock())
        if not self.busy and self.backoff.due and (found := self.backoff.take()) is not None:
            self.add(*found)  # one path at a time, so that little is locked in RAM for it
        while (path := self._next()) is not None:
            if path.waits and self._on_durable is None:
                path.rest(self._clock() + REST_S)
                self._rest_timer = self._wake_in(REST_S, self._rest_timer)
                continue
            if path.stage == "new":
                self._ask_store(path)
                return False
            if not self._fits(path):
                return False
            try:
                if self._offer_next(path):
                    return True
            except Exception as error:
                if device.is_device_error(error):
                    raise
                log.exception("model %s: a copy for the disk failed", self._label)
                self._suspend(StoreError(f"a copy for the disk failed: {error}"))
        self._unlock_written()
        return False

    def hurry(self) -> None:
        """Write the checkpoints of all conversations now, so that their paths are unlocked."""
        self._end_rests(inf)

    def _end_rests(self, now: float) -> None:
        for path in [path for path in self._paths if path.rested(now)]:
            path.end_rest()
            self._requeue(path)

    def _requeue(self, path: PathWrite) -> None:
        self._paths.remove(path)
        self._paths.append(path)

    def _ask_store(self, path: PathWrite) -> None:
        if self._asking is not path:
            self.writer.call(lambda: self._look_up(path), "a lookup before a write")
            self._asking = path

    def _look_up(self, path: PathWrite) -> None:
        """Search the store for the part of a path that is on disk. Runs on the writer's thread."""
        found: Found | StoreError
        try:
            found = self._store.find(path.ids, touch=False)
            self._store.reused(found, path.reused)
            path.forget_reuse()
        except StoreError as error:
            found = error
        except Exception as error:  # logged; the path in RAM must not stay locked
            log.exception(
                "model %s: disk lookup before a write failed for a path of %d tokens; "
                "it is not written now, but tried again after a pause",
                *(self._label, len(path.ids)),
            )
            found = StoreError(f"A prefix could not be looked up: {error!r}.")
        self._answer(lambda: self._looked_up(path, found))

    def _looked_up(self, path: PathWrite, found: Found | StoreError) -> None:
        if self._asking is path:
            self._asking = None
        if isinstance(found, StoreError):
            self._suspend(found)
        elif path.stage == "new":
            path.plan(found, self.layout, self._store.limit or 0)

    def _offer_next(self, path: PathWrite) -> bool:
        runs = path.at < len(path.ids)
        job = self._next_run(path) if runs else path.next_checkpoint(self._files)
        if job is None:
            return False
        size, tokens = job.nbytes, job.tokens  # after the offer nothing fails
        if not self.writer.offer(job):
            raise RuntimeError("the writer refused a job within its limit")
        self.pending_bytes += size
        self._pending_tokens += tokens
        path.count_file(1)
        return True

    def _next_run(self, path: PathWrite) -> Job | None:
        """Return a job that writes a copy of the next run; None if RAM holds it no longer."""
        start, end = path.at, min(path.at + self.run_tokens, len(path.ids))
        match = self._tree.match(path.ids[:end], touch=False)
        spans: list[Span] = match.spans(end) if match.length >= end else []
        within = [(owner, max(start, a), b) for owner, a, b in spans if b > start]
        if not within or any(owner.lost for owner, _, _ in within):
            path.stop()
            return None
        size = serialise.run_bytes(self.layout, end - start)
        out = self.buffers.take(size)
        try:
            tensors = self._files.copy_run(path.ids[:end], start, within, out)
            if any(owner.passes for owner, _, _ in within):
                device.confirm()  # a pass that failed may have left another buffer there
        except BaseException:
            self.buffers.give_back(out)
            raise
        path.advance(end)
        return Job(path.ids[:end], start, tensors, size, path)

    # -- answers of the writer's thread ------------------------------------------------------------

    def _answer(self, action: Callable[[], None]) -> None:
        """Have the MLX thread run `action`. Runs on the writer's thread."""
        self._answers.put(action)
        self._wake()

    def collect(self) -> None:
        while self._apply_next(0.0):
            pass
        self._unlock_written()

    def _apply_next(self, seconds: float) -> bool:
        """Apply one result; False if none comes in time. One that raises is applied again later."""
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            return False
        try:
            answer()
        except Exception:
            self._answer(answer)
            raise
        return True

    def _written(self, job: Job, error: StoreError | None) -> None:
        path: PathWrite = job.tag
        size, tokens = job.nbytes, job.tokens
        if error is None:
            if self.backoff.failing:
                log.warning("model %s: disk tier resumed: a write succeeded", self._label)
            self.backoff.note_success()
        elif isinstance(error, PrefixNotStored):
            path.stop(lost=True)
        else:
            self._suspend(error)
        if job.start is not None and job.tensors:
            self.buffers.give_back(job.tensors[0].bytes)
        # from here on nothing fails: what raises above is applied again
        path.count_file(-1)
        self.pending_bytes -= size
        self._pending_tokens -= tokens

    def _suspend(self, error: StoreError, *, least: float = FIRST_RETRY_S) -> None:
        if not self.backoff.failing:
            log.warning("model %s: disk tier suspended, serving from RAM: %s", self._label, error)
        self.backoff.note_failure(least)
        for path in self._paths:
            path.stop()
            self.backoff.add(path.node)

    def _unlock_written(self) -> None:
        for path in [path for path in self._paths if path.over]:
            if path.restarts:
                path.restart()
                self._requeue(path)
                continue
            if path.whole and not path.stopped and self._on_durable is not None:
                self._on_durable(path.ids)
            if not path.node.detached:
                self._tree.unlock(path.node)
            self._paths.remove(path)

    # -- waiting -----------------------------------------------------------------------------------

    def wait_for_one(self, seconds: float = BLOCKED_S) -> bool:
        """Block until one more path is on disk, and so may be evicted from RAM.

        Returns False at once if no path waits to be written, else True. After `seconds` without any
        progress, pauses writing and unlocks every path, so that replies do not wait for the disk;
        writes that have begun go on, from their copies.
        """
        before, deadline = self.pending_paths, self._clock() + seconds
        while before and self.pending_paths >= before:
            self.hurry()
            self.pump()
            if self._clock() >= deadline:
                error = StoreError("writes are slower than eviction needs")
                self._suspend(error, least=RETRY_S)
                self._drop(self._paths)
            elif self.busy and self._wait(deadline - self._clock()):
                deadline = self._clock() + seconds
        return before > 0

    def _drop(self, paths: Sequence[PathWrite]) -> None:
        for path in paths:
            path.stop()
            if not path.node.detached:
                self._tree.unlock(path.node)
        self._asking = None if self._asking in paths else self._asking
        self._paths = [path for path in self._paths if path not in paths]

    def drain(self, seconds: float) -> int:
        """Write all queued paths, also those that failed before, for at most `seconds`.

        Returns an upper bound of the number of tokens that were not written.
        """
        deadline = self._clock() + seconds
        self.backoff.end_pause()
        while (self._paths or self.backoff.due) and self._clock() < deadline:
            self.hurry()
            if not self.pump():
                self._wait(deadline - self._clock())
        queued = sum(len(path.ids) - path.at for path in self._paths)
        return self._pending_tokens + queued + self.backoff.tokens

    def _wait(self, seconds: float) -> bool:
        if not self.pending_bytes and self._asking is None:
            return False
        return self._apply_next(max(0.0, seconds))

    def _retry_in(self, seconds: float) -> None:
        self._timer = self._wake_in(seconds, self._timer)

    def _wake_in(self, seconds: float, before: threading.Timer) -> threading.Timer:
        before.cancel()
        timer = threading.Timer(seconds, self._wake)
        timer.daemon = True
        timer.start()
        return timer

    def close(self, seconds: float) -> None:
        self._timer.cancel()
        self._rest_timer.cancel()
        self.writer.close(seconds)
