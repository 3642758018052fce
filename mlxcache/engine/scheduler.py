"""The MLX thread's loop: admit, prefill a chunk, decode meanwhile, commit. No locks, no asyncio."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from mlxcache.cache.disk import Disk
from mlxcache.cache.kv_cache import Memory
from mlxcache.engine.admission import Admission, Turns
from mlxcache.engine.anticipate import Ahead
from mlxcache.engine.cost import Cost
from mlxcache.engine.keeping import give_up, keep
from mlxcache.engine.lanes import Lane, Lanes
from mlxcache.engine.prefill import ALONE_S, DECODING_S, WAITING_S, Limits, Pace, Prefill
from mlxcache.engine.scarce import again
from mlxcache.engine.task import Outcome, Task, failure, take
from mlxcache.errors import MlxcacheError, NotReady, StoreError
from mlxcache.mlx_thread import Pulse, take_in
from mlxcache.types import FinishReason

log = logging.getLogger("mlxcache.engine")

COMMIT_EVERY = 1000
"""Tokens of a reply after which it is committed while it goes on."""


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
        self.disk: Disk | None = None
        self.admission = Admission(memory, limits, cost, dress)
        self.ended = ended
        self.ticked = ticked
        self.pace = Pace(clock)
        self.pulse = Pulse()
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.waiting: list[Task] = []
        self.turns = Turns(limits.concurrency)
        self.prefilling: list[Task] = []
        self.prefill = Prefill(model, memory, cost, limits)
        self.lanes = Lanes(model, memory)
        self.ahead = Ahead(memory, self.prefill)
        self.admission.admitted = self.ahead.admitted
        self.stopping = self._moved = False

    def use(self, disk: Disk | None) -> None:
        """Have a disk tier from now on, or none."""
        self.disk = self.admission.disk = self.ahead.disk = disk

    def run(self) -> None:
        """Tick until `stop` was called; then end what is left."""
        while not self.stopping:
            self.tick()
            self.ticked()
        self._abort_all(NotReady("The server is stopping."))

    def tick(self) -> None:
        """Take what has arrived, then do one chunk of prefill and some steps of decoding."""
        take_in(self.inbox, self.pulse, block=self._nothing_to_do())
        self.ahead.step() if self.idle() else self.ahead.pause()
        if self.disk is not None:
            self.disk.pump(beside=len(self.lanes) > 0)
        if not self.prefilling:
            self.pace.begin(decoding=len(self.lanes) > 0)
        came = self._admit()
        computable = self._computable()
        self._moved = len(computable) + len(self.lanes) > 0
        if computable and (came or not len(self.lanes) or self._due() <= 0):
            self.pace.prefill(self._prefill_one, owing=len(self.lanes) > 0)
        due = self._due()
        if self._computable() and self.pace.holds(due):  # nobody waits for a disk's next piece
            self._decode_round([lane for lane in self.lanes.all if not lane.tasks[0].out])
            return
        if due > 0 or not self.prefilling:  # each join copies: not while more are to come
            self.lanes.gather()
        self.pace.decode(
            lambda: self._decode_round(self.lanes.all),
            due,
            lambda: bool(len(self.lanes)) and self.inbox.empty(),
        )

    def _due(self) -> float:
        return self.pace.due(self.prefill.left_s(self.prefilling))

    def _nothing_to_do(self) -> bool:
        """Whether only a message can bring work: a request, or news from the disk's threads."""
        if len(self.lanes) or self._computable() or (self.ahead.ready and self.idle()):
            return False
        if self.disk is None:
            return not self.waiting
        waits = all(t.look is not None and not t.look.found for t in self.waiting)
        stuck = not self._moved and (self.disk.busy or len(self.prefilling) > 0)
        return not self.disk.persist.ready and (waits or stuck)

    def stop(self) -> None:
        """End the loop after this tick. Call through the inbox."""
        self.stopping = True

    def submit(self, task: Task) -> None:
        """Queue a task. Call through the inbox."""
        self.waiting.append(task)

    def cancel(self, task: Task, why: MlxcacheError | None = None) -> None:
        """End a task early; what it computed is committed. Call through the inbox."""
        if why is not None and not task.over:
            self._fail(task, why, sound=True)
        elif not task.over:
            self._take_out(task)
            self._finish(task, "cancelled")

    # -- admission ---------------------------------------------------------------------------

    def _active(self) -> list[Task]:
        return [*self.prefilling, *(task for lane in self.lanes.all for task in lane.tasks)]

    def _admit(self) -> bool:
        """Start waiting tasks, session by session, while slots and memory last. True: some."""
        before = len(self.prefilling)
        for task in self.turns.order(self.waiting):
            room = self.turns.room(task, self._active())
            if not room or self.admission.waits(task, self.prefilling):
                continue
            if not self._guard(task, lambda t=task: self._start(t)):  # type: ignore[misc]
                break
        return len(self.prefilling) > before

    def _start(self, task: Task) -> bool:
        began = time.perf_counter()
        if not self.admission.lease(task, alone=not self._active()):
            return False
        self.waiting.remove(task)
        self.turns.started(task)
        self.prefilling.append(task)
        self.admission.begin(task, began)
        return True

    def idle(self) -> bool:
        """Whether there is nothing to compute and nobody waits."""
        return not (self.waiting or self.prefilling or len(self.lanes))

    # -- prefill -----------------------------------------------------------------------------

    def _computable(self) -> list[Task]:
        """Those in prefill that do not wait for the disk."""
        disk = self.disk
        return [t for t in self.prefilling if not t.restoring or (disk and disk.ready(t))]

    def _prefill_one(self) -> None:
        """One chunk of the request whose turn it is; into a lane with it if that was the last."""
        task = self.prefill.next(self._computable())
        try:
            self._prefill_chunk(task)
        except Exception as error:  # noqa: BLE001 - `failure` logs it
            if task not in self.prefilling or not again(self.memory, task, error):
                self._fail(task, failure(error))

    def _prefill_chunk(self, task: Task) -> None:
        if task.restoring:
            self._restore(task)
            return
        seconds = WAITING_S if len(self.prefilling) > 1 or self.waiting else ALONE_S
        self.prefill.chunk(task, DECODING_S if len(self.lanes) else seconds)
        if task.remaining == 0:
            self.prefilling.remove(task)
            self.lanes.enter(task)
            self.pace.entered(DECODING_S)
        self._progress(task)

    def _progress(self, task: Task) -> None:
        if self.disk is not None and task.lease is not None:
            self.disk.progress(task.lease, task.tokens())

    def _restore(self, task: Task) -> None:
        """Read one piece; where that fails, the task starts again from what RAM holds."""
        try:
            self.admission.restore(task)
        except (StoreError, OSError, RuntimeError, ValueError) as error:
            log.warning("a prefix could not be restored, what is lacking is computed: %s", error)
            self.admission.give_up(task)
            self.prefilling.remove(task)
            self.waiting.insert(0, task)

    # -- decoding ----------------------------------------------------------------------------

    def _decode_round(self, lanes: list[Lane]) -> None:
        """One step of each of `lanes`, in turn."""
        for lane in list(lanes):
            self.pulse.beat()
            try:
                self._step(lane)
            except Exception as error:  # noqa: BLE001 - `failure` logs it
                (task, *_) = lane.tasks
                if not lane.batched and lane.steady and again(self.memory, task, error):
                    continue
                reason = failure(error)
                if not lane.batched:
                    self._fail(task, reason)
                elif lane in self.lanes.all:  # whose fault it was, each row finds out alone
                    self.lanes.apart(lane)

    def _step(self, lane: Lane) -> None:
        for task in list(lane.tasks):
            if task.row is not None and task.row.error is not None:
                self._fail(task, failure(task.row.error), sound=True)
        if lane in self.lanes.all and not self.lanes.make_ready(lane):
            self._end(lane, {lane.tasks[0]: "length"})
        if lane not in self.lanes.all:
            return
        drawn = dict(zip(list(lane.tasks), self.lanes.step(lane), strict=True))
        taken = ((task, take(task, tokens)) for task, tokens in drawn.items())
        ends = {task: outcome for task, outcome in taken if outcome is not None}
        if ends:
            self._end(lane, ends)
        for task, tokens in drawn.items():
            if task not in ends and len(task.out) % COMMIT_EVERY < len(tokens):
                self.lanes.sync(task)
                self.memory.commit(task.held, task.tokens(), checkpoint=task.spaced)
                self._progress(task)

    def _end(self, lane: Lane, ends: dict[Task, Outcome]) -> None:
        """These tasks leave their lane, and are over."""
        self.lanes.leave(lane, list(ends))
        for task, outcome in ends.items():
            if isinstance(outcome, MlxcacheError):
                self._fail(task, outcome, sound=True)
            else:
                self._finish(task, outcome)

    def _finish(self, task: Task, reason: FinishReason) -> None:
        """Commit what a task computed, release what it held, and close its stream."""
        self._guard(task, lambda: self._close(task, reason))

    def _close(self, task: Task, reason: FinishReason) -> bool:
        if task.look is not None:
            task.look.dropped = True
        if task.lease is not None:
            keep(self.memory, self.disk, task)
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
        except Exception as error:  # noqa: BLE001 - `failure` logs it
            self._fail(task, failure(error))
        return True

    def _fail(self, task: Task, error: MlxcacheError, *, sound: bool = False) -> None:
        """End a task with an error. What was committed stays, and all that is `sound`."""
        self._take_out(task)
        task.fail(error)
        if task.look is not None:
            task.look.dropped = True
        if task.lease is not None:
            give_up(self.memory, self.disk, task, error, sound=sound)
        self.ended(task)
        task.push(error)

    def _take_out(self, task: Task) -> None:
        """Take a task from where it waits or is computed."""
        self.waiting = [each for each in self.waiting if each is not task]
        self.prefilling = [each for each in self.prefilling if each is not task]
        if (lane := self.lanes.find(task)) is not None:
            self.lanes.leave(lane, [task])

    def _abort_all(self, error: MlxcacheError) -> None:
        """At shutdown: commit and close everything."""
        self.ahead.clear()
        for task in [*self.waiting, *self._active()]:
            task.push(error)
            self.cancel(task)
