"""The scheduler of one model: each step admits requests, prefills one chunk, decodes a little.

MLX thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache, Lease
from mlxcache.errors import GenerationFailed, Inconsistent, MlxcacheError, StoreError
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import device
from mlxcache.scheduling.admission import Admission, FairQueue
from mlxcache.scheduling.anticipate import IdlePrefill
from mlxcache.scheduling.cost import Cost
from mlxcache.scheduling.decoder import Drawn, NonFiniteOutput
from mlxcache.scheduling.images import Images
from mlxcache.scheduling.lanes import Lane, Lanes
from mlxcache.scheduling.parts import WHOLE, Parts
from mlxcache.scheduling.prefill import Limits, Prefill, PrefillDecodeBalance, chunk_seconds
from mlxcache.scheduling.speculation import Speculation
from mlxcache.scheduling.task import Outcome, Output, Task
from mlxcache.types import FinishReason

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

SHARED_S = 0.05  # most seconds of decoding in one step while other models wait for the thread
COMMIT_EVERY = 1000  # number of tokens of a running reply between two commits

PUBLISH_S = 0.1
"""Least seconds between two updates of the figures while a reply is decoded; one takes 0.1 ms."""

MOST_DEVICE_ERRORS = 3
"""Device errors in a row, with nothing computed between them, that end the scheduler."""

MOST_FAILURES = 3
"""Steps in a row that fail for no request's own reason, after which all requests fail."""

MOST_RESTARTS = 3  # most restarts of one request after device errors


class Scheduler:
    """Owner of all requests in progress of one model, which advance with each `step`.

    `prepare(task)` makes the parser and sampler of an admitted task. `on_end(task)` is called once
    for each task that is over, after its memory is released and before its last event.
    """

    def __init__(
        self,
        model: Any,
        kv: KVCache,
        cost: Cost,
        limits: Limits,
        *,
        prepare: Callable[[Task], Output],
        on_end: Callable[[Task], None],
        thread: MlxThread | None = None,
        on_tick: Callable[[], None] = lambda: None,
        images: Images | None = None,
        speculation: Speculation | None = None,
        balance: PrefillDecodeBalance | None = None,
        queue: FairQueue | None = None,
        parts: Parts = WHOLE,
    ):
        self.model = model
        self.kv = kv
        self.limits = limits
        self.wall = parts.wall()
        self.thread = thread or MlxThread()
        self.balance = balance or PrefillDecodeBalance(time.perf_counter)
        self.queue = queue or FairQueue(limits.concurrency)
        self.waiting: list[Task] = []
        self.prefilling: list[Task] = []
        self.prefill = Prefill(model, kv, cost, limits, images)
        self.lanes = Lanes(
            model,
            kv,
            self.wall,
            shared_bytes=cost.shared_bytes,
            speculation=speculation,
            decode=parts.decode,
        )
        self.idle_prefill = IdlePrefill(kv, self.prefill, self.wall)
        self.admission = Admission(kv, limits, cost, prepare, self.idle_prefill.note_use)
        self._on_end = on_end
        self._on_tick = on_tick
        self._moved = False
        self._device_errors = self._failures = self._checked = 0
        self._publish_at = 0.0
        self._interrupted: dict[Task, Outcome | None] = {}

    def end_all(self) -> None:
        self._cancel_all()
        while not self.idle:  # the device failed
            self._cancel_all()

    def _cancel_all(self) -> None:
        """Cancel all requests; after a device error, those that are left begin again."""
        try:
            self.idle_prefill.clear()
            for task in [*self.waiting, *self.active]:
                self.cancel(task)
        except RuntimeError as error:
            if not device.is_device_error(error):
                raise
            self.recover(error)

    def step(self, *, sharing: bool = False, admitting: bool = True) -> None:
        """Admit waiting tasks, then feed one chunk of prefill and run some steps of decoding.

        `sharing`: other models wait for the thread, so the step is short. `admitting`: the weights
        stay in memory for now, so waiting tasks may start. Raises the device's error; call
        `recover` then. An exception of one request's own code fails that request; others fail all
        after three such steps.
        """
        try:
            self._advance(sharing=sharing, admitting=admitting)
            self._failures = 0
        except Exception as error:  # noqa: BLE001 - logged by the wall
            self._note_failure(error)
        if self._checked != self.wall.contained:
            self._checked = self.wall.contained
            self.check_integrity()

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        every = self._failures >= MOST_FAILURES
        what = "all its requests fail" if every else "it is tried again"
        self.wall.contain(error, f"model {self.kv.label}: a step failed, {what}")
        tasks = [*self.waiting, *self.active] if every else []
        if every and not tasks:
            raise Inconsistent(f"The scheduler fails without any request: {error!r}") from error
        for task in tasks:
            self._fail(task, GenerationFailed(f"The server failed: {error!r}"))
        self.thread.wake()

    def check_integrity(self) -> None:
        self.kv.check_integrity(batch=sum(lane.bytes for lane in self.lanes.all))

    def _advance(self, *, sharing: bool, admitting: bool) -> None:
        self._use_idle_time() if self.idle and admitting else self.idle_prefill.pause()
        self.kv.pump(decoding=len(self.lanes) > 0)
        if sharing:
            self.lanes.interrupt()
        if not self.prefilling:
            self.balance.begin(decoding=len(self.lanes) > 0)
        started = admitting and self._admit()
        computable = self._computable()
        self._moved = len(computable) + len(self.lanes) > 0
        if computable and (started or not len(self.lanes) or self._due() <= 0):
            one = partial(self._prefill_one, sharing=sharing)
            self.balance.prefill(one, owing=len(self.lanes) > 0)
        due = self._due()
        if self._computable() and self.balance.may_wait(due):
            # replies wait, except for the first token of each
            self._decode_round([lane for lane in self.lanes.all if not lane.tasks[0].out])
            return
        if due > 0 or not self.prefilling:  # each join copies, so not while more will join
            self.lanes.gather()
        self.balance.decode(
            lambda: self._decode_round(self.lanes.all),
            min(due, SHARED_S) if sharing else due,
            lambda: bool(len(self.lanes)) and not self.thread.has_posted,
        )

    def _use_idle_time(self) -> None:
        if self.idle_prefill.ready:
            self.idle_prefill.step()
        else:
            self.kv.grow_ahead()

    def _due(self) -> float:
        return self.balance.due(self.prefill.left_s(self.prefilling))

    def has_work(self, *, admitting: bool = True) -> bool:
        """Return whether `step` would compute something, or collect results of disk operations.

        False becomes True only after an action was posted, or another model gave up memory.
        """
        if len(self.lanes) or self._computable():
            return True
        if not admitting:
            return self.kv.can_pump
        if self.idle and (self.idle_prefill.ready or self.kv.may_grow_ahead):
            return True
        looking = all(t.lookup is not None and not t.lookup.found for t in self.waiting)
        blocked = not self._moved and (self.kv.writing or len(self.prefilling) > 0)
        return self.kv.can_pump or not (looking or blocked or self.kv.waits.short)

    def publish(self) -> None:
        """Call `on_tick`, between the steps of a reply every `PUBLISH_S` seconds at most."""
        now = time.perf_counter()
        if len(self.lanes) and now < self._publish_at:
            return
        self._publish_at = now + PUBLISH_S
        try:
            self._on_tick()
        except Exception as error:  # noqa: BLE001 - logged by the wall
            self.wall.contain(error, f"model {self.kv.label}: figures not updated")

    def submit(self, task: Task) -> None:
        self.waiting.append(task)
        self._guard(task, self.kv.waits.retry, None)  # it may fit where another does not

    def cancel(self, task: Task, why: MlxcacheError | None = None) -> None:
        """End a task early, with the error `why` or as cancelled; commit what it has computed."""
        if why is not None and not task.over:
            self._fail(task, why, pass_failed=False)
        elif not task.over:
            self._interrupted[task] = "cancelled"
            self._attempt(task, lambda: self._take_out(task))
            self._finish(task, "cancelled")

    @property
    def active(self) -> list[Task]:
        return [*self.prefilling, *(task for lane in self.lanes.all for task in lane.tasks)]

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or len(self.lanes))

    # -- admission ---------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Start waiting tasks in fair order; return whether one started.

        While another model waits for memory, only if no task of this model is active.
        """
        before = len(self.prefilling)
        self.kv.waits.retry()
        for task in self.queue.order(self.waiting):
            if self.active and self.kv.waits.others_wait:
                break
            if not self._guard(task, partial(self._start, task), True):
                break
        if not self.kv.waits.short:  # none had to wait again
            self.kv.waits.end()
        return len(self.prefilling) > before

    def _start(self, task: Task) -> bool:
        place = self.queue.has_place(task, self.active)
        if not place or self.admission.should_wait(task, self.prefilling):
            return True
        began = time.perf_counter()
        if not self.admission.start(task, began, alone=not self.active):
            return False
        self.waiting.remove(task)
        self.queue.note_start(task)
        self.prefilling.append(task)
        if not task.restoring:
            self.admission.admit(task)
        return True

    # -- prefill -----------------------------------------------------------------------------------

    def _computable(self) -> list[Task]:
        """Return the tasks in prefill that are not waiting for data from disk."""
        can_restore = self.admission.can_restore
        return [
            task
            for task in list(self.prefilling)
            if not task.restoring or self._guard(task, partial(can_restore, task), False)
        ]

    def _prefill_one(self, *, sharing: bool) -> None:
        task = self.prefill.choose(self._computable())
        self.lanes.interrupt()
        try:
            self._prefill_chunk(task, sharing=sharing)
        except Exception as error:  # noqa: BLE001 - logged by the wall
            self.wall.pass_on(error)
            if task not in self.prefilling or not self._may_repeat(task, error):
                self._fail(task, self.wall.failure(error, task.record.id))

    def _prefill_chunk(self, task: Task, *, sharing: bool) -> None:
        if task.restoring:
            self._restore(task)
            return
        waiting = len(self.prefilling) > 1 or bool(self.waiting)
        decoding = bool(len(self.lanes)) or sharing
        self.prefill.feed_chunk(task, chunk_seconds(waiting=waiting, decoding=decoding))
        if self.prefill.confirmed:
            self._device_errors = 0
        if task.remaining == 0 and task.job.max_tokens == 0:
            self.prefilling.remove(task)
            self._finish(task, "length")
        elif task.remaining == 0:
            self.lanes.enter(task)
            self.prefilling.remove(task)
            self.balance.note_reply()
        self._persist(task)

    def _may_repeat(self, task: Task, error: Exception) -> bool:
        """Free memory and undo the pass that raised `error`; return if it may be tried again."""
        if self.kv.layout.recurrent or task.lease is None or not device.is_out_of_memory(error):
            return False
        if task.restoring or not task.note_oom():
            return False
        log.warning(
            "%s: out of memory at token %d, evicting and retrying: %s",
            *(task.record.id, task.held.length, error),
        )
        try:
            return self.kv.free_after_oom(task.lease)
        except Exception as another:  # noqa: BLE001 - logged by the wall
            self.wall.contain(another, f"{task.record.id}: a pass cannot be repeated")
            return False

    def _persist(self, task: Task) -> None:
        if task.lease is not None:
            self.kv.persist(task.lease, task.tokens())

    def _restore(self, task: Task) -> None:
        try:
            self.admission.restore(task)
        except (StoreError, OSError, RuntimeError, ValueError) as error:
            self.wall.pass_on(error)
            log.warning(
                "%s: restore failed, computing the rest of the prefix: %s", task.record.id, error
            )
            self.admission.cancel_restore(task)
            self.prefilling.remove(task)
            self.waiting.insert(0, task)

    # -- decoding ----------------------------------------------------------------------------------

    def _decode_round(self, lanes: list[Lane]) -> None:
        """Run one decoding step of each of `lanes`; if one of a batch fails, it is split first."""
        for lane in list(lanes):
            self.thread.heartbeat.beat()
            try:
                self._step(lane)
            except Exception as error:  # noqa: BLE001 - logged by the wall
                self.wall.pass_on(error)
                (task, *_) = lane.tasks
                if lane.batched:
                    self._split(lane, error)
                elif not (lane.steady and self._may_repeat(task, error)):
                    self._fail(task, self.wall.failure(error, task.record.id))

    def _split(self, lane: Lane, error: Exception) -> None:
        """Let the rows of a batch go on alone after `error`: each shows if the fault is its own."""
        device.confirm()  # raises if the device is the cause
        ids = ", ".join(task.record.id for task in lane.tasks)
        self.wall.contain(error, f"a step of a batch failed, its requests go on alone: {ids}")
        if lane in self.lanes.all:
            self._change(lane, (), partial(self.lanes.split, lane))

    def _change(self, lane: Lane, gone: Collection[Task], action: Callable[[], None]) -> None:
        """Run `action`, by which rows leave a lane; if it fails, all but `gone` begin again."""
        tasks = list(lane.tasks)
        try:
            action()
        except Exception as error:  # noqa: BLE001 - logged by the wall
            ids = ", ".join(task.record.id for task in tasks)
            self.wall.contain(error, f"a lane failed, its requests begin again: {ids}")
            self.lanes.drop(tasks)
            for task in tasks:
                if task not in gone:
                    self._guard(task, partial(self._begin_again, task, None), None)

    def _step(self, lane: Lane) -> None:
        if not self._make_ready(lane):
            return
        confirmed = self._confirm_prompts(lane)
        ends: dict[Task, Outcome] = {}
        early = self._take_first(lane, ends) if confirmed else 0
        drawn = self._draw(lane, early, ends)
        for task, tokens in drawn.items():
            if task not in ends:
                self._note_end(ends, task, partial(self._take, task, tokens))
        if confirmed:
            if any(task.job.top_logprobs is not None for task in drawn):
                device.confirm()  # of log-probabilities read just now
            for task in drawn:
                self._note_end(ends, task, task.deliver)
        if ends:
            self._end(lane, ends)
        for task, tokens in drawn.items():
            if task not in ends and len(task.out) % COMMIT_EVERY < len(tokens):
                self._guard(task, partial(self._commit, task), None)

    def _make_ready(self, lane: Lane) -> bool:
        """End tasks of a lane that cannot go on; return whether the lane may be stepped."""
        for task in list(lane.tasks):
            if (error := task.row_error) is not None:
                self._fail(task, self.wall.failure(error, task.record.id), pass_failed=False)
        if lane in self.lanes.all and not self.lanes.make_ready(lane):
            self._end(lane, {lane.tasks[0]: "length"})
        return lane in self.lanes.all

    def _draw(
        self, lane: Lane, early: int, ends: dict[Task, Outcome]
    ) -> dict[Task, Sequence[Drawn]]:
        """Run the step of a lane; return the tokens that it hands out, less the `early` ones.

        If a step that may be repeated would hand those out again, the task begins again or ends.
        """
        (task, *_) = tasks = list(lane.tasks)
        try:
            drawn = self.lanes.step(lane)
        except Exception as error:
            self.wall.pass_on(error)
            if not early or not self._may_repeat(task, error):
                raise
            self.lanes.drop(tasks)
            self._guard(task, partial(self._begin_again, task, ends.pop(task, None)), None)
            return {}
        self._device_errors = 0
        return {task: tokens[early:] for task, tokens in zip(tasks, drawn, strict=True)}

    def _take_first(self, lane: Lane, ends: dict[Task, Outcome]) -> int:
        """Hand out the first token of a reply before the pass that feeds it is built.

        Not where the token, or its delivery, takes part in the next draw. Returns their number.
        """
        (task, *others) = lane.tasks
        if others or task.out or not (lane.steady and task.draws_freely):
            return 0
        (first,) = lane.decoder.peek()
        self._note_end(ends, task, partial(task.take, first))
        task.deliver()
        return len(first)

    def _take(self, task: Task, tokens: Sequence[Drawn]) -> Outcome | None:
        task.deliver()  # this step has evaluated more since these pieces were drawn
        return task.take(tokens)

    def _note_end(
        self, ends: dict[Task, Outcome], task: Task, action: Callable[[], Outcome | None]
    ) -> None:
        """Run `action`; add to `ends` the outcome that it returns, or the error for the client."""
        try:
            outcome = action()
        except Exception as error:  # noqa: BLE001 - logged by the wall
            outcome = self.wall.failure(error, task.record.id)
        if outcome is not None:
            ends[task] = outcome

    def _commit(self, task: Task) -> None:
        self.lanes.sync(task)
        self.kv.commit(task.held, task.tokens(), checkpoint=task.spaced)
        self._persist(task)

    def _confirm_prompts(self, lane: Lane) -> bool:
        """On a GPU, wait for the passes that drew first tokens, and commit their prompts.

        Returns whether the next step's tokens are confirmed when they are handed out. Later ones on
        a GPU are confirmed one step later, because waiting for each pass would be slow.
        """
        if not device.defers_errors():
            return True
        first = [task for task in lane.tasks if task.length == len(task.ids)]
        if not first:
            return False
        device.confirm()
        for task in first:
            if not self.kv.layout.opaque:
                self.kv.commit(task.held, task.tokens(), checkpoint=False)
                self._persist(task)
        self.prefill.note_confirmed()
        return True

    # -- errors of the device ----------------------------------------------------------------------

    def recover(self, error: RuntimeError) -> None:
        """Let all active tasks begin again from what was confirmed before a device error.

        It is not known which pass failed: no pending token is used again, and no lineage written to
        since. Raises the third error in a row, GroupLost if other ranks have made different passes,
        and Inconsistent if anything else fails meanwhile.
        """
        self.wall.check_recovery(error)
        another: RuntimeError | None = error
        while another is not None:
            error = another
            self._device_errors += 1
            ends = self._device_errors >= MOST_DEVICE_ERRORS
            what = "the MLX thread ends" if ends else "its active requests begin again"
            log.error(
                "model %s: device error (%d in a row), %s: %s",
                *(self.kv.label, self._device_errors, what, error),
            )
            another = self._begin_all_again()
        if self._device_errors >= MOST_DEVICE_ERRORS:
            raise error

    def _begin_all_again(self) -> RuntimeError | None:
        """Let all active tasks begin again; return the device error that prevented it, or None."""
        self._interrupted = dict.fromkeys(self.active) | self._interrupted
        self.prefilling = []
        self.lanes.drop(self.active)
        self.prefill.note_device_error()
        try:
            try:
                device.settle()
            finally:  # on a device that is of no use any more, too: the rest goes to disk
                self.kv.drop_damaged()
            self.idle_prefill.drop_failed()
            for task, outcome in list(self._interrupted.items()):
                self._begin_again(task, outcome)
                self._interrupted.pop(task, None)
            mx.clear_cache()
        except Exception as another:
            if not isinstance(another, RuntimeError) or not device.is_device_error(another):
                raise Inconsistent(f"Requests could not begin again: {another!r}") from another
            if self._device_errors >= MOST_DEVICE_ERRORS:
                raise
            return another
        return None

    def _begin_again(self, task: Task, outcome: Outcome | None) -> None:
        """Put a task at the front of the queue without its lease, or end it as `outcome` says.

        So it ends if that is an error or `cancelled`, or if no token of its reply was lost.
        """
        if task.over and not isinstance(outcome, MlxcacheError):
            return
        task.drop_lookup()
        if task.lease is not None:
            lease, ids = task.give_up_lease(), task.tokens()
            self.kv.persist(lease, ids, whole=True)
            self.kv.abandon(lease)
        if isinstance(outcome, MlxcacheError):
            self._fail(task, outcome)
            return
        complete = outcome is not None and task.all_delivered
        if not complete:
            task.begin_again(self.kv.match(task.ids))
        if outcome is not None and (complete or outcome == "cancelled"):
            self._finish(task, outcome)
        elif task.restarts > MOST_RESTARTS:
            self._fail(
                task, GenerationFailed("The device failed again and again: see the server's log.")
            )
        else:
            self.waiting.insert(0, task)

    # -- ends --------------------------------------------------------------------------------------

    def _end(self, lane: Lane, ends: dict[Task, Outcome]) -> None:
        self._interrupted |= ends
        self._change(lane, ends, lambda: self.lanes.leave(lane, list(ends)))
        for task, outcome in ends.items():
            if isinstance(outcome, MlxcacheError):
                self._fail(task, outcome, pass_failed=False)
            else:
                self._finish(task, outcome)

    def _finish(self, task: Task, reason: FinishReason) -> None:
        """End a task without an error; an exception before the last event fails it instead."""
        self._interrupted[task] = reason
        if self._guard(task, partial(self._close, task, reason), False, pass_failed=False):
            self._leave(task, self.kv.release, task.end)

    def _close(self, task: Task, reason: FinishReason) -> bool:
        task.drop_lookup()
        if task.lease is not None:
            self.kv.finish(task.lease, task.tokens())
        task.flush(reason)
        return True

    def _guard(
        self, task: Task, action: Callable[[], T], otherwise: T, *, pass_failed: bool = True
    ) -> T:
        """Run `action`, the task's own; an exception fails that task alone."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - logged by the wall
            self._fail(task, self.wall.failure(error, task.record.id), pass_failed=pass_failed)
        return otherwise

    def _attempt(self, task: Task, *actions: Callable[[], object]) -> None:
        """Run all of `actions`, by which a task ends, whichever of them fail."""
        for action in actions:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - logged by the wall
                self.wall.contain(error, f"{task.record.id}: a part of its end failed")

    def _fail(self, task: Task, error: MlxcacheError, *, pass_failed: bool = True) -> None:
        """End a task with an error; KV that it has committed stays in the cache.

        `pass_failed`: a pass of the model failed, so KV that is not committed is dropped. With
        NonFiniteOutput, all KV that the task has computed is removed.
        """
        self._interrupted[task] = error
        self._attempt(
            task,
            lambda: self._take_out(task),
            lambda: task.fail(error),
            task.drop_lookup,
            lambda: self._keep(task, error, pass_failed=pass_failed),
        )
        self._leave(task, self.kv.abandon, lambda: task.push(error))

    def _keep(self, task: Task, error: MlxcacheError, *, pass_failed: bool) -> None:
        lease = task.lease
        if lease is None:
            return
        if isinstance(error, NonFiniteOutput):
            self.kv.purge(lease, task.tokens())
        elif not pass_failed and lease.length <= task.length:  # else a token was not handed out
            self.kv.finish(lease, task.tokens())

    def _leave(
        self, task: Task, release: Callable[[Lease], None], last: Callable[[], None]
    ) -> None:
        """Release the memory of a task by `release`, call `on_end`, and send `last`."""
        try:
            if task.lease is not None:
                self._release(task, task.lease, release)
        finally:  # all of a reply is confirmed, even if the device fails as buffers are compacted
            try:
                self._attempt(task, partial(self._on_end, task))
                last()
            except Exception as error:  # noqa: BLE001 - logged by the wall
                task.push(self.wall.failure(error, task.record.id))
            self._interrupted.pop(task, None)

    def _release(self, task: Task, lease: Lease, release: Callable[[Lease], None]) -> None:
        try:
            release(lease)
        except Exception as error:  # noqa: BLE001 - logged by the wall
            self.wall.contain(error, f"{task.record.id}: its memory was not released at once")
            try:
                self.kv.abandon(lease)
            except Exception as again:
                self.wall.pass_on(again)
                raise Inconsistent(f"A request's memory cannot be released: {again!r}") from again

    def _take_out(self, task: Task) -> None:
        self.waiting = [each for each in self.waiting if each is not task]
        self.prefilling = [each for each in self.prefilling if each is not task]
        if (lane := self.lanes.find(task)) is not None:
            self._change(lane, [task], lambda: self.lanes.leave(lane, [task]))
        self.kv.waits.retry() if self.waiting else self.kv.waits.end()

    def persist_all(self) -> None:
        """Queue the committed KV of running requests for the disk, after the MLX thread failed."""
        for task in dict.fromkeys(self.active) | self._interrupted:
            if task.lease is not None and not task.restoring:
                self.kv.persist(task.lease, task.tokens(), whole=True)
