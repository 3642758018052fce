"""The MLX thread's loop: admit, prefill a chunk, decode meanwhile, commit. No locks, no asyncio."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from mlxcache.cache.node import common_length
from mlxcache.engine.cost import Cost
from mlxcache.engine.lanes import Lane, Lanes
from mlxcache.engine.memory import Memory
from mlxcache.engine.prefill import ALONE_S, DECODING_S, WAITING_S, Limits, Prefill
from mlxcache.engine.task import Task, checkpoint_stops
from mlxcache.errors import ContextLengthExceeded, GenerationFailed, MlxcacheError, NotReady
from mlxcache.types import Admitted, FinishReason

log = logging.getLogger("mlxcache.engine")

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
    ):
        self.model = model
        self.memory = memory
        self.limits = limits
        self.dress = dress
        self.ended = ended
        self.ticked = ticked
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.waiting: list[Task] = []
        self.prefilling: list[Task] = []
        self.prefill = Prefill(model, memory, cost, limits)
        self.lanes = Lanes(model, memory)
        self.stopping = False

    # -- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        """Tick until `stop` was called; then end what is left."""
        while not self.stopping:
            self.tick()
            self.ticked()
        self._abort_all(NotReady("The server is stopping."))

    def tick(self) -> None:
        """Take what has arrived, then do one chunk of prefill and some steps of decoding."""
        self._receive(block=not (self.prefilling or len(self.lanes) or self.waiting))
        self._admit()
        began = time.perf_counter()
        if self.prefilling:
            self._prefill_one()
        busy_until = 2 * time.perf_counter() - began
        self._decode_round()
        while len(self.lanes) and time.perf_counter() < busy_until and self.inbox.empty():
            self._decode_round()

    def _receive(self, *, block: bool) -> None:
        idle_wait = 0.05 if self.waiting and not (self.prefilling or len(self.lanes)) else None
        try:
            action = self.inbox.get(block or idle_wait is not None, idle_wait)
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
            self._close(task, "cancelled")
        elif task in self.prefilling:
            self.prefilling.remove(task)
            self._finish(task, "cancelled")
        elif (lane := self.lanes.find(task)) is not None:
            self._guard([task], lambda: self._leave(lane, task, "cancelled"))

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
            if not self._guard([task], lambda t=task: self._start(t)):  # type: ignore[misc]
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
        task.phase("queue_s")
        task.limit = min(task.limit or self.limits.context, self.limits.context - len(task.ids))
        lease = self.memory.acquire(task.ids, task.limit)
        if lease is None and not self._active():
            self.memory.room.clear()
            lease = self.memory.acquire(task.ids, task.limit)
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
        self._guard([task], lambda: self._prefill_chunk(task))

    def _prefill_chunk(self, task: Task) -> bool:
        seconds = WAITING_S if len(self.prefilling) > 1 or self.waiting else ALONE_S
        self.prefill.chunk(task, DECODING_S if len(self.lanes) else seconds)
        if task.remaining == 0:
            self.prefilling.remove(task)
            self.lanes.enter(task)
        return True

    # -- decoding ----------------------------------------------------------------------------

    def _decode_round(self) -> None:
        """One step of every lane, in turn."""
        for lane in list(self.lanes.all):
            self._guard(list(lane.tasks), lambda ln=lane: self._step(ln))  # type: ignore[misc]

    def _step(self, lane: Lane) -> bool:
        for task in self.lanes.make_ready(lane):
            self._leave(lane, task, "length")
        if not lane.tasks or lane not in self.lanes.all:
            return True
        owners = list(lane.tasks)
        over: list[tuple[Task, FinishReason]] = []
        for task, drawn in zip(owners, self.lanes.step(lane), strict=True):
            reason = task.take(drawn)
            if reason is not None:
                over.append((task, reason))
            elif len(task.out) % COMMIT_EVERY == 0:
                self._commit_running(lane, task)
        if over:
            self.lanes.leave(lane, [task for task, _ in over])
            for task, reason in over:
                self._finish(task, reason)
        return True

    def _commit_running(self, lane: Lane, task: Task) -> None:
        if lane.batched:
            self.lanes.sync(lane)
        self.memory.commit(task.held, task.tokens(), checkpoint=True)

    def _leave(self, lane: Lane, task: Task, reason: FinishReason) -> bool:
        self.lanes.leave(lane, [task])
        self._finish(task, reason)
        return True

    # -- ends --------------------------------------------------------------------------------

    def _finish(self, task: Task, reason: FinishReason) -> None:
        """Commit what a task computed, release what it held, and close its stream."""
        self.memory.commit(task.held, task.tokens(), checkpoint=True)
        self._close(task, reason)

    def _close(self, task: Task, reason: FinishReason) -> None:
        task.flush(reason)
        if task.lease is not None:
            self.memory.release(task.lease)
        self.ended(task)
        task.end()

    def _guard(self, tasks: list[Task], action: Callable[[], bool]) -> bool:
        """Run `action`; if it raises, fail `tasks` and nothing else."""
        try:
            return action()
        except MlxcacheError as error:
            failure: MlxcacheError = error
        except Exception as error:
            log.exception("a forward pass failed")
            failure = GenerationFailed(f"The model failed: {error}")
        for task in tasks:
            self._fail(task, failure)
        return True

    def _fail(self, task: Task, error: MlxcacheError) -> None:
        """End a task with an error; only what was committed before is kept."""
        for group in (self.waiting, self.prefilling):
            if task in group:
                group.remove(task)
        lane = self.lanes.find(task)
        if lane is not None:
            self.lanes.discard(lane)
        task.record.error = str(error)
        task.close_record("error")
        if task.lease is not None:
            self.memory.abandon(task.lease)
        self.ended(task)
        task.push(error)

    def _abort_all(self, error: MlxcacheError) -> None:
        """At shutdown: commit and close everything."""
        for task in [
            *self.waiting,
            *self.prefilling,
            *(t for ln in self.lanes.all for t in ln.tasks),
        ]:
            self._guard([task], lambda t=task: self._abort(t, error))  # type: ignore[misc]

    def _abort(self, task: Task, error: MlxcacheError) -> bool:
        task.push(error)
        self.cancel(task)
        return True
