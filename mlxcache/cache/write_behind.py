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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from mlxcache.cache.retry import FIRST_RETRY_S, RETRY_S, RetryBackoff
from mlxcache.cache.staging import StagingBuffers
from mlxcache.errors import PrefixNotStored, StoreError
from mlxcache.model import device, serialise
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Span
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Found
from mlxcache.store.store import Store
from mlxcache.store.writer import Job, Writer
from mlxcache.tree.node import Node
from mlxcache.tree.prefix_tree import PrefixTree
from mlxcache.tree.thinning import FEWEST, allowed, checkpoints_to_drop
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.engine")

RUN_TOKENS, RUN_BYTES = 2048, 32 << 20
"""Most tokens and bytes of one file: bounds what a restore reads at once and how long a copy takes.
"""

BLOCKED_S = 2.0
"""Seconds that a request waits for a write without progress before writing is suspended."""

REST_S = 10.0
"""Seconds without a further turn after which the new checkpoints of a path are written.

With further turns most need not be: one takes as much as the KV of hundreds of tokens or more.
"""

UNWRITTEN = 4096
"""Tokens behind the newest checkpoint on disk from which new ones are written at once."""

TRIES = 2
"""Number of restarts of a path whose first blocks were evicted from disk while it was written."""

States = list[tuple[int, State]]
"""Checkpoints as (position in tokens, state), ascending."""


def run_tokens(layout: Layout, pending_limit: int) -> int:
    """Return the maximum number of tokens of a run file, a multiple of the block size.

    `pending_limit`: maximum bytes of copies that wait to be written; a file takes at most half of
    it, unless one block takes more.
    """
    most = min(RUN_BYTES, pending_limit // 2) // max(1, layout.bytes_per_token)
    return max(BLOCK, min(RUN_TOKENS, most) // BLOCK * BLOCK)


@dataclass(slots=True, eq=False)
class PathWrite:
    """The write of one path of the tree, from its queueing to its last durable file.

    `ids`: the tokens of the path. `node`: the node at the path's end or one that continues it,
    which is locked. `wanted`: the checkpoints on the path, which are to be on disk. `asked`: the
    store was searched for the path. After that, `at` is the position of the next token to hand to
    the writer, and `states` are the checkpoints to write after the runs. `in_flight`: number of
    jobs (files to write) that the writer has got and has not done. `lost`: files on disk that this
    path continues were evicted in the meantime. `reused`: number of leading tokens that the request
    reused, to be counted as a use of their files. `whole`: the path ends where a request ended.
    `tries`: number of restarts. `stopped`: the writer gets no further jobs of the path, so it may
    not be on disk as a whole. `rests`: its checkpoints may wait for a further turn.
    """

    node: Node
    ids: Tokens
    wanted: States
    reused: int = 0
    whole: bool = False
    asked: bool = False
    at: int = 0
    states: States = field(default_factory=list)
    in_flight: int = 0
    lost: bool = False
    tries: int = 0
    stopped: bool = False
    rests: bool = False

    @property
    def handed_over(self) -> bool:
        """True if the writer has got every job of this path."""
        return self.asked and self.at >= len(self.ids) and not self.states

    def plan(self, found: Found, layout: Layout, limit: int) -> None:
        """Choose the runs and checkpoints to write, given what the store already has.

        `found`: the part of the path on disk. `limit`: limit of the disk tier in bytes.
        """
        whole = found.length // BLOCK * BLOCK if found.length < len(self.ids) else len(self.ids)
        self.at = whole if layout.specs else len(self.ids)
        present = [one.position for one in found.checkpoints]
        lacking = lacking_checkpoints([at for at, _ in self.wanted if at <= len(self.ids)], present)
        size, kv_bytes = layout.checkpoint_bytes, len(self.ids) * layout.bytes_per_token
        most = allowed(kv_bytes, size, limit) // max(1, size)
        new = len(self.ids) - max(present, default=0)
        if layout.specs:  # of those of several turns, as many as the new KV has bytes for
            more = new * layout.bytes_per_token // max(1, size)
            most = min(most, max(FEWEST, len(present) + more))
        dropped = checkpoints_to_drop(
            sorted({*present, *lacking}), len(self.ids), most, kept=present
        )
        self.states = [one for one in self.wanted if one[0] in lacking and one[0] not in dropped]
        self.rests = new < UNWRITTEN and new * layout.bytes_per_token < len(self.states) * size
        self.asked = True

    @property
    def waits(self) -> bool:
        """True if only checkpoints are left to hand over, and a further turn may come."""
        return self.rests and self.at >= len(self.ids) and len(self.states) > 0

    def hurry(self) -> None:
        """Do not wait for a further turn."""
        self.rests = False

    def next_checkpoint(self, layout: Layout) -> Job | None:
        """Take the next checkpoint from `states`, and return a job that writes it.

        Returns None if the path is shorter than the checkpoint's position, so that it cannot be
        written. `states` must not be empty.
        """
        at, state = self.states.pop(0)
        ids = self.ids[:at]
        if len(ids) < at:
            return None
        layout.lockstep.write_state(ids, state)
        return Job(ids, None, serialise.state_tensors(state), layout.checkpoint_bytes, self)

    def stop(self, *, lost: bool = False) -> None:
        """Give no further jobs of this path to the writer; those that it has are still done.

        `lost`: files on disk that the path continues were evicted. The write of the path is then
        to be restarted once the writer has done those jobs; see `restart`.
        """
        self.asked, self.at, self.states, self.lost = True, len(self.ids), [], lost
        self.stopped = True

    def drop_checkpoint(self, state: State) -> None:
        """Drop the checkpoint `state` from those to write, unless the writer has it already."""
        self.wanted = [one for one in self.wanted if one[1] is not state]
        self.states = [one for one in self.states if one[1] is not state]

    def restart(self) -> None:
        """Start the write of the path again, with a new search of the store for it."""
        self.asked, self.at, self.lost, self.stopped = False, 0, False, False
        self.tries += 1


def lacking_checkpoints(positions: list[int], present: list[int]) -> set[int]:
    """Choose which checkpoints of a path to write to disk; return their positions in tokens.

    `positions`: those of its checkpoints in RAM, ascending. `present`: those of its checkpoints on
    disk. A checkpoint before the newest one on disk was on disk once and was dropped by thinning,
    so it is not written again, unless it is the first of the path and before all on disk.
    """
    newer = {at for at in positions if at > max(present, default=0)}
    head = {at for at in positions[:1] if at < min(present, default=0)}
    return newer | head


def _states_of(node: Node) -> States:
    """Return the checkpoints on the path that ends at `node`, lowest position first."""
    return [(n.end, n.checkpoint) for n in node.path() if n.checkpoint is not None]


class WriteBehind:
    """Queue of paths between the prefix tree and the store's writer thread.

    At most `pending_limit` bytes of copies wait to be written. `wake()` is called from other
    threads when the MLX thread is to call `pump`. `on_durable(ids)` is called on the MLX thread
    with each path that ends where a request ended, once it is on disk; it must not block. `label`:
    that of the model, for the log. The queue owns the writer, which `close` ends.
    """

    def __init__(
        self,
        layout: Layout,
        tree: PrefixTree,
        store: Store,
        pending_limit: int,
        wake: Callable[[], None],
        *,
        on_durable: Callable[[Tokens], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        label: str = "unnamed",
    ):
        self.layout = layout
        self._label = label
        self.pending_bytes = 0
        self._on_durable = on_durable
        self.run_tokens = run_tokens(layout, pending_limit)
        self.buffers = StagingBuffers(serialise.run_bytes(layout, self.run_tokens))
        self.backoff = RetryBackoff(self._retry_in, clock)
        self._tree = tree
        self._store = store
        self._pending_limit = pending_limit
        self._pending_tokens = 0
        self._wake = wake
        self._clock = clock
        self._timer = self._rest_timer = threading.Timer(0.0, wake)
        self._queue: deque[PathWrite] = deque()
        self._handed: set[PathWrite] = set()
        self._resting: dict[PathWrite, float] = {}
        self._asking: PathWrite | None = None
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # `pending_limit` is kept here; the writer still counts a job while it reports its end
        self.writer = Writer(store, 2 * pending_limit, self._on_written, self._on_idle, label=label)

    @property
    def busy(self) -> bool:
        """True if a path is being written, or waits for that; not while it rests."""
        return bool(self._queue or self._handed)

    @property
    def _held(self) -> list[PathWrite]:
        return [*self._queue, *self._handed, *self._resting]

    @property
    def pending_paths(self) -> int:
        """Number of paths that are locked in RAM because they are not on disk yet."""
        return len(self._held)

    @property
    def ready(self) -> bool:
        """True if `pump` has something to do besides collecting results.

        It can then have the store searched for the first queued path, or give the writer that
        path's next file to write. Or no path is queued or being written, and it can queue one whose
        write failed, because the pause after the error is over.
        """
        if any(at <= self._clock() for at in self._resting.values()):
            return True
        if not self._queue:
            return not self.busy and self.backoff.due
        if self._asking is self._queue[0]:
            return False
        return not self._queue[0].asked or not self.pending_bytes or self._fits(self._next_bytes())

    @property
    def works(self) -> bool:
        """False from a disk error until the next write that succeeds.

        While it is True, everything evicted from RAM is on disk.
        """
        return not self.backoff.failing

    def _next_bytes(self) -> int:
        path = self._queue[0]
        left = min(self.run_tokens, len(path.ids) - path.at)
        return max(0, left) * self.layout.bytes_per_token or self.layout.checkpoint_bytes

    def _fits(self, size: int) -> bool:
        return self.pending_bytes + size <= self._pending_limit

    # -- choosing what to write ------------------------------------------------------------------

    def add(self, node: Node, ids: Tokens, reused: int = 0, *, whole: bool = False) -> None:
        """Queue the path `ids` with its checkpoints for writing, and lock `node`.

        `node`: the node at which the path ends, or one that continues it. `reused`: number of
        leading tokens that the request reused, counted as a use of their files. `whole`: the path
        ends where a request ended. During a pause after a disk error nothing is locked, and the
        path is only put on the list of those to write afterwards (`RetryBackoff`).
        """
        if node is self._tree.root:
            return
        if self.backoff.paused:
            self.backoff.add(node)
            return
        wanted = _states_of(node)
        if self.layout.specs or wanted:
            above = set(node.path())
            self._drop([path for path in self._resting if path.node in above])
            path = PathWrite(node, ids, wanted, reused, whole)
            self._tree.lock(node)
            self._queue.append(path)

    def count_locks(self, node: Node) -> int:
        """Return how many locks on `node` are held by paths that are being written."""
        return sum(node in path.node.path() for path in self._held)

    def forget(self, nodes: Sequence[Node]) -> None:
        """Remove from the queue every path through one of `nodes`.

        Runs and checkpoints that the disk writer already has are still written.
        """
        held = self._held
        self._drop([path for path in held if any(node in nodes for node in path.node.path())])

    def drop_checkpoint(self, node: Node) -> None:
        """Do not write the checkpoint at `node`, because it is about to be dropped from RAM."""
        for path in self._held:
            path.drop_checkpoint(node.checkpoint)

    def delete_beyond(self, ids: Tokens, keep: int) -> None:
        """Delete from disk the KV of `ids` beyond `keep` tokens, because it is not finite.

        Files that continue it are deleted too; see `Store.forget_beyond`. Does not block: the
        writer's thread deletes the files after the jobs that it already has.
        """
        self.writer.call(
            lambda: self._store.forget_beyond(ids, keep),
            f"deleting KV that is not finite, of a path of {len(ids)} tokens beyond {keep},",
        )

    # -- handing over ------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Apply the results of the writer as `collect` does, and give it at most one new job.

        A job is one file to write. Returns True if the writer got one. Does not block, except for
        the copy. Raises RuntimeError if a command failed on the device.
        """
        self.collect()
        self._end_rests(self._clock())
        if not self.busy and self.backoff.due and (found := self.backoff.take()) is not None:
            self.add(*found)  # one path at a time, so that little is locked in RAM for it
        while self._queue:
            path = self._queue[0]
            if path.handed_over:
                self._queue.popleft()
                self._handed.add(path)
                self._unlock_if_done(path)
                continue
            if path.waits and self._on_durable is None:
                self._resting[self._queue.popleft()] = self._clock() + REST_S
                self._rest_timer = self._wake_in(REST_S, self._rest_timer)
                continue
            if not path.asked:
                self._ask_store(path)
                return False
            if self.pending_bytes and not self._fits(self._next_bytes()):
                return False
            try:
                job = self._next_job(path)
                if job is not None:
                    self._offer(path, job)
                    return True
            except Exception as error:
                if device.is_device_error(error):
                    raise
                log.exception("model %s: a copy for the disk failed", self._label)
                self._suspend(StoreError(f"a copy for the disk failed: {error}"))
        return False

    def hurry(self) -> None:
        """Write the checkpoints of all conversations now, whether further turns come or not.

        Then their paths are not locked in RAM any more.
        """
        self._end_rests(inf)

    def _end_rests(self, now: float) -> None:
        for path in [path for path, at in self._resting.items() if at <= now]:
            path.hurry()
            del self._resting[path]
            self._queue.append(path)

    def _ask_store(self, path: PathWrite) -> None:
        """Have the writer's thread search the store for a path; see `_look_up`.

        The search runs after the jobs that the thread already has. Does nothing if this search is
        requested already.
        """
        if self._asking is not path:
            self.writer.call(lambda: self._look_up(path), "a lookup before a write")
            self._asking = path

    def _look_up(self, path: PathWrite) -> None:
        """Search the store for the part of a path that is on disk. Runs on the writer's thread.

        The MLX thread gets the result, and chooses what to write of the path (`PathWrite.plan`), or
        suspends writing if the search failed.
        """
        found: Found | StoreError
        try:
            found = self._store.find(path.ids, touch=False)
            self._store.reused(found, path.reused)
            path.reused = 0
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
        elif not path.asked:
            path.plan(found, self.layout, self._store.limit or 0)

    def _offer(self, path: PathWrite, job: Job) -> None:
        size, tokens = job.nbytes, job.tokens  # after the offer nothing fails
        if not self.writer.offer(job):
            raise RuntimeError("the writer refused a job within its limit")
        self.pending_bytes += size
        self._pending_tokens += tokens
        path.in_flight += 1

    def _next_job(self, path: PathWrite) -> Job | None:
        """Return the next job of a path, with a copy of what to write, or None if there is none.

        Raises what the copy raises: if a command failed on the device, the KV may be damaged.
        """
        if path.at < len(path.ids):
            return self._next_run(path)
        return path.next_checkpoint(self.layout)

    def _next_run(self, path: PathWrite) -> Job | None:
        """Return a job that writes a copy of the path's next run.

        Returns None, and stops the writing of the path, if RAM no longer holds all of the run's KV.
        """
        start, end = path.at, min(path.at + self.run_tokens, len(path.ids))
        match = self._tree.match(path.ids[:end], touch=False)
        spans: list[Span] = match.spans(end) if match.length >= end else []
        within = [(owner, max(start, a), b) for owner, a, b in spans if b > start]
        if not within or any(owner.lost or owner.window_valid_from > a for owner, a, _ in within):
            path.stop()
            return None
        size = serialise.run_bytes(self.layout, end - start)
        out = self.buffers.take(size)
        try:
            tensors = serialise.copied_run(self.layout, within, out)
            self.layout.lockstep.write_run(path.ids[:end], start, within)
            if any(owner.passes for owner, _, _ in within):
                device.confirm()  # a pass that failed may have left another buffer there
        except BaseException:
            self.buffers.put_back(out)
            raise
        path.at = end
        return Job(path.ids[:end], start, tensors, size, path, serialise.late_names(self.layout))

    # -- answers of the writer's thread ------------------------------------------------------------

    def _on_written(self, job: Job, error: StoreError | None) -> None:
        """Queue the result of a job for the MLX thread. Runs on the writer's thread."""
        self._answer(lambda: self._written(job, error))

    def _on_idle(self) -> None:
        """Have the MLX thread release unused staging buffers. Runs on the writer's thread."""
        self._answer(self.buffers.release_free)

    def _answer(self, action: Callable[[], None]) -> None:
        self._answers.put(action)
        self._wake()

    def collect(self) -> None:
        """Apply all results of the writer's thread that have arrived. Does not block.

        Paths whose files are all on disk are unlocked. After an error, writing is paused.
        """
        while self._apply_next(0.0):
            pass
        for path in list(self._handed):
            self._unlock_if_done(path)

    def _apply_next(self, seconds: float) -> bool:
        """Apply one result of the writer's thread; False if none comes within `seconds`.

        One that raises is applied again by a later call.
        """
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
        if job.start is not None:
            self.buffers.give_back(job.tensors)
        # from here on nothing fails: what raises above is applied again
        path.in_flight -= 1
        self.pending_bytes -= size
        self._pending_tokens -= tokens

    def _suspend(self, error: StoreError, *, least: float = FIRST_RETRY_S) -> None:
        """Pause writing after a disk error; requests are served from RAM in the meantime.

        `least`: minimum length of the pause in seconds.
        """
        if not self.backoff.failing:
            log.warning("model %s: disk tier suspended, serving from RAM: %s", self._label, error)
        self.backoff.note_failure(least)
        for path in self._held:
            path.stop()
            self.backoff.add(path.node)
        self._end_rests(inf)

    def _unlock_if_done(self, path: PathWrite) -> None:
        """Unlock a path if its last job is done, or restart it if it is `lost`.

        Does nothing while the writer has jobs of it. A path is restarted at most `TRIES` times.
        """
        if not path.handed_over or path.in_flight:
            return
        if path.lost and path.tries < TRIES and not path.node.detached:
            path.restart()
            self._queue.append(path)
        else:
            if path.whole and not path.stopped and self._on_durable is not None:
                self._on_durable(path.ids)
            if not path.node.detached:
                self._tree.unlock(path.node)
        self._handed.discard(path)

    # -- waiting -----------------------------------------------------------------------------------

    def wait_for_one(self, seconds: float = BLOCKED_S) -> bool:
        """Block until one more path is on disk, and so may be evicted from RAM.

        Returns False at once if no path waits to be written, else True. After `seconds` without any
        progress, pauses writing and unlocks every path, so that replies do not wait for the disk.
        """
        before, deadline = self.pending_paths, self._clock() + seconds
        while before and self.pending_paths >= before:
            self.hurry()
            self.pump()
            if self._clock() >= deadline:
                self._give_up()
            elif self.busy and self._wait(deadline - self._clock()):
                deadline = self._clock() + seconds
        return before > 0

    def _give_up(self) -> None:
        """Suspend the disk tier, and unlock every path that is not on disk yet.

        Writes that have begun go on, from their copies.
        """
        self._suspend(StoreError("writes are slower than eviction needs"), least=RETRY_S)
        self._drop(self._held)

    def _drop(self, paths: Sequence[PathWrite]) -> None:
        for path in paths:
            path.stop()
            if not path.node.detached:
                self._tree.unlock(path.node)
        self._queue = deque(path for path in self._queue if path not in paths)
        self._handed -= set(paths)
        self._resting = {path: at for path, at in self._resting.items() if path not in paths}
        self._asking = None if self._asking in paths else self._asking

    def drain(self, seconds: float) -> int:
        """Write all queued paths, blocking for at most `seconds`. Ends early if the disk fails.

        Also writes paths whose write failed before. Returns the number of tokens that were not
        written, or more than that.
        """
        deadline = self._clock() + seconds
        self.backoff.end_pause()
        while (self.pending_paths or self.backoff.due) and self._clock() < deadline:
            self.hurry()
            if not self.pump():
                self._wait(deadline - self._clock())
        queued = sum(len(path.ids) - path.at for path in self._queue)
        return self._pending_tokens + queued + self.backoff.tokens

    def _wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for one result of the writer's thread, and apply it.

        See `collect`. Returns True if a result was applied, False if none is expected or none came
        in time.
        """
        if not self.pending_bytes and self._asking is None:
            return False
        return self._apply_next(max(0.0, seconds))

    def _retry_in(self, seconds: float) -> None:
        self._timer = self._wake_in(seconds, self._timer)

    def _wake_in(self, seconds: float, before: threading.Timer) -> threading.Timer:
        """Start a timer that wakes the MLX thread, in place of the timer `before`."""
        before.cancel()
        timer = threading.Timer(seconds, self._wake)
        timer.daemon = True
        timer.start()
        return timer

    def close(self, seconds: float) -> None:
        """End the writer after its current job, waiting for at most `seconds`.

        Its other jobs are dropped: call `drain` before to have them written.
        """
        self._timer.cancel()
        self._rest_timer.cancel()
        self.writer.close(seconds)
