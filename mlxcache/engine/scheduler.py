"""The MLX thread's loop: admit, prefill a chunk, decode meanwhile, commit. No locks, no asyncio."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from mlxcache.cache.node import common_length
from mlxcache.engine.cost import Cost
from mlxcache.engine.decoder import Drawn
from mlxcache.engine.lanes import Lane, Lanes
from mlxcache.engine.memory import Memory
from mlxcache.engine.pace import Pace
from mlxcache.engine.prefill import ALONE_S, DECODING_S, WAITING_S, Limits, Prefill
from mlxcache.engine.task import Task, checkpoint_stops
from mlxcache.errors import ContextLengthExceeded, GenerationFailed, MlxcacheError, NotReady
from mlxcache.types import Admitted, FinishReason

log = logging.getLogger("mlxcache.engine")

Outcome = FinishReason | MlxcacheError
"""How a reply ends."""

COMMIT_EVERY = 1000
"""Tokens of a reply after which it is committed while it goes on."""

WORTH_WAITING = 256
"""Tokens that a running prefill must be about to share for a new request to wait for them."""


class Scheduler:
    """Everything that happens on the MLX thread, one `tick` after another."""

    def __init__(
        self,
        model: Any,
        memory: Memory,
        cost: Cost,
        limits: Limits,
        *,
        dress: Callable[[Task], None],
        ended: Callable[[Task], None],
        ticked: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model = model
        self.memory = memory
        self.limits = limits
        self.dress = dress
        self.ended = ended
        self.ticked = ticked
        self.pace = Pace(clock)
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.waiting: list[Task] = []
        self.prefilling: list[Task] = []
        self.prefill = Prefill(model, memory, cost, limits)
        self.lanes = Lanes(model, memory)
        self.stopping = False

    def run(self) -> None:
        """Tick until `stop` was called; then end what is left."""
        while not self.stopping:
            self.tick()
            self.ticked()
        self._abort_all(NotReady("The server is stopping."))

    def tick(self) -> None:
        """Take what has arrived, then do one chunk of prefill and some steps of decoding."""
        self._receive(block=not (self.prefilling or len(self.lanes) or self.waiting))
        if not self.prefilling:
            self.pace.begin(decoding=len(self.lanes) > 0)
        self._admit()
        if self.prefilling:
            self.pace.prefill(self._prefill_one)
        due = self.pace.due(sum(t.remaining for t in self.prefilling) / self.prefill.cost.rate)
        if self.prefilling and self.pace.holds(due):
            self._decode_round([lane for lane in self.lanes.all if not lane.tasks[0].out])
            return
        if due > 0 or not self.prefilling:  # each join copies: not while more are to come
            self.lanes.gather()
        self.pace.decode(
            lambda: self._decode_round(self.lanes.all),
            due,
            lambda: bool(len(self.lanes)) and self.inbox.empty(),
        )

    def _receive(self, *, block: bool) -> None:
        try:
            action = self.inbox.get(block)
            while True:
                action()
                action = self.inbox.get_nowait()
        except queue.Empty:
            return

    def stop(self) -> None:
        """End the loop after this tick. Call through the inbox."""
        self.stopping = True

    def submit(self, task: Task) -> None:
        """Queue a task. Call through the inbox."""
        self.waiting.append(task)

    def cancel(self, task: Task) -> None:
        """End a task early; what it computed is committed. Call through the inbox."""
        if task in self.waiting:
            self.waiting.remove(task)
            self._finish(task, "cancelled")
        elif task in self.prefilling:
            self.prefilling.remove(task)
            self._finish(task, "cancelled")
        elif (lane := self.lanes.find(task)) is not None:
            self.lanes.leave(lane, [task])
            self._finish(task, "cancelled")

    # -- admission ---------------------------------------------------------------------------

    def _active(self) -> int:
        return len(self.prefilling) + len(self.lanes)

    def _admit(self) -> None:
        """Start waiting tasks in order, while slots and memory last."""
        for task in list(self.waiting):
            if self._active() >= self.limits.concurrency:
                return
            if self._should_wait(task):
                continue
            if not self._guard(task, lambda t=task: self._start(t)):  # type: ignore[misc]
                return

    def _should_wait(self, task: Task) -> bool:
        """Whether a running prefill is about to compute much of what `task` needs."""
        known = self.memory.usable(self.memory.tree.match(task.ids, touch=False), len(task.ids))[0]
        for other in self.prefilling:
            shared = min(common_length(other.ids, task.ids), task.target)
            if self.memory.layout.opaque:
                shared = max((at for at in other.stops if at <= shared), default=0)
            enough = 1 if task.deferred else WORTH_WAITING
            if shared - known >= enough and other.held.lineage.length < shared:
                task.deferred = self.memory.layout.cacheable
                return task.deferred
        return False

    def _start(self, task: Task) -> bool:
        began = time.perf_counter()
        task.limit = min(task.limit or self.limits.context, self.limits.context - len(task.ids))
        lease = self.memory.acquire(task.ids, task.limit)
        if lease is None and not self._active():
            self.memory.room.clear()
            lease = self.memory.acquire(task.ids, task.limit) or self.memory.acquire(task.ids, 1)
            if lease is None:
                self.waiting.remove(task)
                raise ContextLengthExceeded(
                    f"The prompt of {len(task.ids)} tokens does not fit the memory budget (--ram)."
                )
        if lease is None:
            return False
        self.waiting.remove(task)
        task.lease = lease
        self.prefilling.append(task)
        record = task.record
        record.cached_tokens, record.status = lease.cached, "prefill"
        task.phase("queue_s", began)
        task.phase("match_s")
        record.timing["restore_s"] = 0.0
        if self.memory.layout.opaque:
            task.stops = checkpoint_stops(task.job.prompt.marks, lease.cached, len(task.ids))
        self.dress(task)
        task.push(Admitted(len(task.ids), lease.cached))
        return True

    def idle(self) -> bool:
        """Whether there is nothing to compute and nobody waits."""
        return not (self.waiting or self.prefilling or len(self.lanes))

    # -- prefill -----------------------------------------------------------------------------

    def _prefill_one(self) -> None:
        """One chunk of the request whose turn it is; into a lane with it if that was the last."""
        task = self.prefill.next(self.prefilling)
        self._guard(task, lambda: self._prefill_chunk(task))

    def _prefill_chunk(self, task: Task) -> bool:
        seconds = WAITING_S if len(self.prefilling) > 1 or self.waiting else ALONE_S
        self.prefill.chunk(task, DECODING_S if len(self.lanes) else seconds)
        if task.remaining == 0:
            self.prefilling.remove(task)
            self.lanes.enter(task)
        return True

    # -- decoding ----------------------------------------------------------------------------

    def _decode_round(self, lanes: list[Lane]) -> None:
        """One step of each of `lanes`, in turn."""
        for lane in list(lanes):
            try:
                self._step(lane)
            except Exception as error:  # noqa: BLE001 - `_failure` logs it
                failure = _failure(error)
                if not lane.batched:
                    self._fail(lane.tasks[0], failure)
                elif lane in self.lanes.all:  # whose fault it was, each row finds out alone
                    self.lanes.apart(lane)

    def _step(self, lane: Lane) -> None:
        for task in list(lane.tasks):
            if task.row is not None and task.row.error is not None:
                self._fail(task, _failure(task.row.error), keep=True)
        if lane in self.lanes.all and not self.lanes.make_ready(lane):
            self._end(lane, {lane.tasks[0]: "length"})
        if lane not in self.lanes.all:
            return
        ends: dict[Task, Outcome] = {}
        for task, drawn in zip(lane.tasks, self.lanes.step(lane), strict=True):
            outcome = _take(task, drawn)
            if outcome is not None:
                ends[task] = outcome
        if ends:
            self._end(lane, ends)
        for task in lane.tasks if lane in self.lanes.all else []:
            if len(task.out) % COMMIT_EVERY == 0:
                self.lanes.sync(task)
                self.memory.commit(task.held, task.tokens(), checkpoint=True)

    def _end(self, lane: Lane, ends: dict[Task, Outcome]) -> None:
        """These tasks leave their lane, and are over."""
        self.lanes.leave(lane, list(ends))
        for task, outcome in ends.items():
            if isinstance(outcome, MlxcacheError):
                self._fail(task, outcome, keep=True)
            else:
                self._finish(task, outcome)

    def _finish(self, task: Task, reason: FinishReason) -> None:
        """Commit what a task computed, release what it held, and close its stream."""
        self._guard(task, lambda: self._close(task, reason))

    def _close(self, task: Task, reason: FinishReason) -> bool:
        if task.lease is not None:
            self.memory.commit(task.lease, task.tokens(), checkpoint=True)
        task.flush(reason)
        if task.lease is not None:
            self.memory.release(task.lease)
        self.ended(task)
        task.end()
        return True

    def _guard(self, task: Task, action: Callable[[], bool]) -> bool:
        """Run `action`; if it raises, fail `task` and nothing else."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - `_failure` logs it
            self._fail(task, _failure(error))
        return True

    def _fail(self, task: Task, error: MlxcacheError, *, keep: bool = False) -> None:
        """End a task with an error. What was committed stays, and with `keep` all it computed."""
        for group in (self.waiting, self.prefilling):
            if task in group:
                group.remove(task)
        lane = self.lanes.find(task)
        if lane is not None:
            self.lanes.leave(lane, [task])
        task.fail(error)
        if task.lease is not None:
            if keep:
                self.memory.commit(task.lease, task.tokens(), checkpoint=True)
                self.memory.release(task.lease)
            else:
                self.memory.abandon(task.lease)
        self.ended(task)
        task.push(error)

    def _abort_all(self, error: MlxcacheError) -> None:
        """At shutdown: commit and close everything."""
        decoding = [task for lane in self.lanes.all for task in lane.tasks]
        for task in [*self.waiting, *self.prefilling, *decoding]:
            task.push(error)
            self.cancel(task)


def _take(task: Task, drawn: Drawn) -> Outcome | None:
    """Hand a token out; why the task is over, if it is."""
    try:
        return task.take(drawn)
    except Exception as error:  # noqa: BLE001 - `_failure` logs it
        return _failure(error)


def _failure(error: Exception) -> MlxcacheError:
    """What the client is told of `error`, which the log gets whole."""
    if isinstance(error, MlxcacheError):
        return error
    log.error("a request failed", exc_info=error)
    return GenerationFailed(f"The model failed: {error}")
