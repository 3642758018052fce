"""The scheduler of one model: each step admits requests, prefills one chunk, decodes a little.

MLX thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import GenerationFailed, MlxcacheError, StoreError
from mlxcache.guess.drafts import DraftRule
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import device
from mlxcache.scheduling.admission import Admission, FairQueue
from mlxcache.scheduling.anticipate import IdlePrefill
from mlxcache.scheduling.cost import Cost
from mlxcache.scheduling.decoder import NonFiniteOutput
from mlxcache.scheduling.images import Images
from mlxcache.scheduling.lanes import DRAFTS, Lane, Lanes
from mlxcache.scheduling.prefill import (
    ALONE_S,
    DECODING_S,
    WAITING_S,
    Limits,
    Prefill,
    PrefillDecodeBalance,
)
from mlxcache.scheduling.speculation import Speculation
from mlxcache.scheduling.task import Outcome, Output, Task, as_failure
from mlxcache.types import FinishReason

log = logging.getLogger("mlxcache.engine")

SHARED_S = 0.05
"""Most seconds of decoding in one step while other models wait for the thread."""

COMMIT_EVERY = 1000
"""Number of tokens of a running reply between two commits."""

MOST_DEVICE_ERRORS = 3
"""Device errors in a row, with nothing computed between them, that end the scheduler."""

MOST_RESTARTS = 3
"""Most restarts of one request after device errors."""

OUT_OF_MEMORY = ("allocate", "out of memory", "insufficient memory", "malloc", "resource limit")
"""Words in MLX's error messages, on any device, that indicate a failed allocation."""


class Scheduler:
    """Owner of all requests in progress of one model, which advance with each `step`.

    `prepare(task)` makes the parser and sampler of an admitted task. `on_end(task)` is called once
    for each task that is over, after its memory is released and before its last event. `on_tick()`
    is called by `publish`, after each step. `drafts`: most tokens that a draft model proposes at
    once. `draft_rule`: chooses their number; None always proposes `drafts`. `speculation`: makes
    guesses from the conversations, or None.
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
        drafts: int = DRAFTS,
        speculation: Speculation | None = None,
        draft_rule: DraftRule | None = None,
        balance: PrefillDecodeBalance | None = None,
        queue: FairQueue | None = None,
    ):
        self.model = model
        self._lockstep = kv.layout.lockstep
        self.kv = kv
        self.limits = limits
        self.thread = thread or MlxThread()
        self.balance = balance or PrefillDecodeBalance(time.perf_counter)
        self.queue = queue or FairQueue(limits.concurrency)
        self.waiting: list[Task] = []
        self.prefilling: list[Task] = []
        self.prefill = Prefill(model, kv, cost, limits, images)
        self.lanes = Lanes(
            model, kv, cost.decoding, drafts=drafts, speculation=speculation, rule=draft_rule
        )
        self.idle_prefill = IdlePrefill(kv, self.prefill)
        self.admission = Admission(kv, limits, cost, prepare, self.idle_prefill.note_use)
        self._on_end = on_end
        self._on_tick = on_tick
        self._moved = False
        self._device_errors = 0
        self._interrupted: dict[Task, Outcome | None] = {}

    def end_all(self) -> None:
        """End all remaining requests as cancelled, and commit what they have computed."""
        self._attempt(self._cancel_all)
        while not self.idle:  # the device failed
            self._attempt(self._cancel_all)

    def _cancel_all(self) -> None:
        self.idle_prefill.clear()
        for task in [*self.waiting, *self.active]:
            self.cancel(task)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run `action`; after a device error in it, let all active tasks begin again.

        Other errors are raised.
        """
        try:
            action()
        except RuntimeError as error:
            if not device.is_device_error(error):
                raise
            self.recover(error)

    def step(self, *, sharing: bool = False, admitting: bool = True) -> None:
        """Admit waiting tasks, then feed one chunk of prefill and run some steps of decoding.

        `sharing`: other models wait for the thread, so the step is short. `admitting`: waiting
        tasks may start, because the model's weights are in memory and stay there for now. Raises
        the device's error if the device failed; `recover` must be called with it then.
        """
        self.idle_prefill.step() if self.idle and admitting else self.idle_prefill.pause()
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

    def _due(self) -> float:
        return self.balance.due(self.prefill.left_s(self.prefilling))

    def has_work(self, *, admitting: bool = True) -> bool:
        """Return whether `step` would compute something, or collect results of disk operations.

        False becomes True only after an action was posted to the MLX thread, such as a request or
        the result of a disk operation, or after another model gave up memory. `admitting`: see
        `step`.
        """
        if len(self.lanes) or self._computable():
            return True
        if not admitting:
            return self.kv.can_pump
        if self.idle_prefill.ready and self.idle:
            return True
        looking = all(t.lookup is not None and not t.lookup.found for t in self.waiting)
        blocked = not self._moved and (self.kv.writing or len(self.prefilling) > 0)
        return self.kv.can_pump or not (looking or blocked or self.kv.waits.short)

    def publish(self) -> None:
        """Call `on_tick` after a step, so that figures which other threads read are updated."""
        self._on_tick()

    def submit(self, task: Task) -> None:
        """Queue a task. Call through `MlxThread.post`."""
        self.kv.waits.retry()  # it may fit where another does not
        self.waiting.append(task)

    def cancel(self, task: Task, why: MlxcacheError | None = None) -> None:
        """End a task early and commit what it has computed; nothing is done if it is over.

        It ends with the error `why`, or as cancelled if that is None. Call through
        `MlxThread.post`.
        """
        if why is not None and not task.over:
            self._fail(task, why, pass_failed=False)
        elif not task.over:
            self._interrupted[task] = "cancelled"
            self._take_out(task)
            self._finish(task, "cancelled")

    @property
    def active(self) -> list[Task]:
        """All tasks that have a lease, in prefill or decoding."""
        return [*self.prefilling, *(task for lane in self.lanes.all for task in lane.tasks)]

    @property
    def idle(self) -> bool:
        """True if no task is waiting, in prefill or decoding."""
        return not (self.waiting or self.prefilling or len(self.lanes))

    # -- admission ---------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Start waiting tasks in fair order, as the limit of concurrent tasks and memory allow.

        While another model waits for memory, a task starts only if no task of this model is active,
        so that the other model gets its turn.
        Returns whether a task started.
        """
        before = len(self.prefilling)
        self.kv.waits.retry()
        for task in self.queue.order(self.waiting):
            if self.active and self.kv.waits.others_wait:
                break
            place = self.queue.has_place(task, self.active)
            if not place or self.admission.should_wait(task, self.prefilling):
                continue
            if not self._guard(task, lambda t=task: self._start(t)):  # type: ignore[misc]
                break
        if not self.kv.waits.short:  # none had to wait again
            self.kv.waits.end()
        return len(self.prefilling) > before

    def _start(self, task: Task) -> bool:
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
        return [t for t in self.prefilling if not t.restoring or self.admission.can_restore(t)]

    def _prefill_one(self, *, sharing: bool) -> None:
        """Feed one chunk of one prompt; after its last chunk, start decoding its reply.

        While a prompt's prefix is being read from disk, read a part of it instead. An error fails
        the task, unless it is the device's, which is raised, or the chunk can be tried again
        because memory was freed. `sharing`: other models wait for the thread.
        """
        task = self.prefill.choose(self._computable())
        self.lanes.interrupt()
        try:
            self._prefill_chunk(task, sharing=sharing)
        except Exception as error:
            if device.is_device_error(error):
                raise
            self._lockstep.check(error)
            if task not in self.prefilling or not retry_after_oom(self.kv, task, error):
                self._fail(task, _confirmed_failure(error, task))

    def _prefill_chunk(self, task: Task, *, sharing: bool) -> None:
        if task.restoring:
            self._restore(task)
            return
        seconds = WAITING_S if len(self.prefilling) > 1 or self.waiting else ALONE_S
        self.prefill.feed_chunk(task, DECODING_S if len(self.lanes) or sharing else seconds)
        if self.prefill.confirmed:
            self._device_errors = 0
        if task.remaining == 0:
            self.lanes.enter(task)
            self.prefilling.remove(task)
            self.balance.note_reply(DECODING_S)
        self._persist(task)

    def _persist(self, task: Task) -> None:
        if task.lease is not None:
            self.kv.persist(task.lease, task.tokens())

    def _restore(self, task: Task) -> None:
        """Load one part of a task's prefix from disk.

        If that fails, the task is queued again and reuses only what is in RAM.
        """
        try:
            self.admission.restore(task)
        except (StoreError, OSError, RuntimeError, ValueError) as error:
            if device.is_device_error(error):
                raise
            self._lockstep.check(error)
            log.warning(
                "%s: restore failed, computing the rest of the prefix: %s", task.record.id, error
            )
            self.admission.cancel_restore(task)
            self.prefilling.remove(task)
            self.waiting.insert(0, task)

    # -- decoding ----------------------------------------------------------------------------------

    def _decode_round(self, lanes: list[Lane]) -> None:
        """Run one decoding step of each of `lanes`.

        If a step fails, its task fails; the rows of a batch are first split into lanes of their
        own.
        """
        for lane in list(lanes):
            self.thread.heartbeat.beat()
            try:
                self._step(lane)
            except Exception as error:
                if device.is_device_error(error):
                    raise
                self._lockstep.check(error)
                (task, *_) = lane.tasks
                if not lane.batched and lane.steady and retry_after_oom(self.kv, task, error):
                    continue
                if not lane.batched:
                    self._fail(task, _confirmed_failure(error, task))
                    continue
                device.confirm()  # raises if the device is the cause
                if lane in self.lanes.all:  # alone, each row shows whether the fault is its own
                    ids = ", ".join(task.record.id for task in lane.tasks)
                    log.exception("a step of a batch failed, its requests go on alone: %s", ids)
                    self.lanes.split(lane)

    def _step(self, lane: Lane) -> None:
        for task in list(lane.tasks):
            if task.row_error is not None:
                self._fail(task, _confirmed_failure(task.row_error, task), pass_failed=False)
        if lane in self.lanes.all and not self.lanes.make_ready(lane):
            self._end(lane, {lane.tasks[0]: "length"})
        if lane not in self.lanes.all:
            return
        confirmed = self._confirm_prompts(lane)
        drawn = dict(zip(list(lane.tasks), self.lanes.step(lane), strict=True))
        self._device_errors = 0
        for task in drawn:
            task.deliver()  # this step has evaluated more since their tokens were drawn
        taken = ((task, task.take(tokens)) for task, tokens in drawn.items())
        ends = {task: outcome for task, outcome in taken if outcome is not None}
        failed = any(isinstance(outcome, MlxcacheError) for outcome in ends.values())
        if failed or (confirmed and any(task.job.top_logprobs is not None for task in drawn)):
            device.confirm()  # of tokens that no pass drew; of log-probabilities read just now
        if confirmed:
            for task in drawn:
                task.deliver()
        if ends:
            self._end(lane, ends)
        for task, tokens in drawn.items():
            if task not in ends and len(task.out) % COMMIT_EVERY < len(tokens):
                self.lanes.sync(task)
                self.kv.commit(task.held, task.tokens(), checkpoint=task.spaced)
                self._persist(task)

    def _confirm_prompts(self, lane: Lane) -> bool:
        """Wait for the passes that drew the first tokens of replies, and commit their prompts.

        Does so only on a GPU, which reports errors late, and only for replies without a token yet.
        Prompts are not committed here if the model has opaque slots.
        Returns True if the tokens of the next step will be confirmed when they are handed out.
        Later tokens on a GPU are confirmed one step later, because waiting for each pass would be
        slow.
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

        It is not known which pass failed. So no pending token is used again, and no lineage that
        was written to since its last confirmation. A device error during recovery begins it again.
        Raises the third error in a row, and GroupLost if other ranks have made different passes.
        """
        self._lockstep.check(error)
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
        """Let all active tasks begin again; return the device error that prevented it, or None.

        Raises that error instead if it is the last one allowed in a row.
        """
        self._interrupted = dict.fromkeys(self.active) | self._interrupted
        self.prefilling = []
        self.lanes.drop_all()
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
        except RuntimeError as another:
            if not device.is_device_error(another) or self._device_errors >= MOST_DEVICE_ERRORS:
                raise
            return another
        return None

    def _begin_again(self, task: Task, outcome: Outcome | None) -> None:
        """Release the lease of a task and put the task at the front of the queue.

        The task fails after `MOST_RESTARTS` restarts. `outcome`: how the task was about to end, or
        None if it was not. It ends so instead of beginning again if that is an error or
        `cancelled`, or if no token of its reply was lost.
        """
        if task.over and not isinstance(outcome, MlxcacheError):
            return
        if task.lookup is not None:
            task.lookup.drop()
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
        """Remove tasks that are over from their lane, and end each with its outcome.

        `ends`: the tasks with their outcomes.
        """
        self._interrupted |= ends
        self.lanes.leave(lane, list(ends))
        for task, outcome in ends.items():
            if isinstance(outcome, MlxcacheError):
                self._fail(task, outcome, pass_failed=False)
            else:
                self._finish(task, outcome)

    def _finish(self, task: Task, reason: FinishReason) -> None:
        """End a task without an error: commit its KV, release its memory, and send its last event.

        An exception in that fails the task instead; see `_guard`.
        """
        self._interrupted[task] = reason
        self._guard(task, lambda: self._close(task, reason))
        self._interrupted.pop(task, None)

    def _close(self, task: Task, reason: FinishReason) -> bool:
        """Commit a task's KV, release its memory, and send its last event: the work of `_finish`.

        The record is complete before the lease is released, and `on_end` is called before the last
        event. Returns True, as `_guard` requires.
        """
        if task.lookup is not None:
            task.lookup.drop()
        if task.lease is not None:
            self.kv.finish(task.lease, task.tokens())
        task.flush(reason)
        try:
            if task.lease is not None:
                self.kv.release(task.lease)
        finally:  # all of the reply is confirmed, even if the device fails as buffers are compacted
            self._on_end(task)
            task.end()
        return True

    def _guard(self, task: Task, action: Callable[[], bool]) -> bool:
        """Run `action` and return its result; an exception in it fails `task` alone.

        Returns True after an exception, because the task is over then. Device errors are raised.
        """
        try:
            return action()
        except Exception as error:
            if device.is_device_error(error):
                raise
            self._lockstep.check(error)
            self._fail(task, _confirmed_failure(error, task))
        return True

    def _fail(self, task: Task, error: MlxcacheError, *, pass_failed: bool = True) -> None:
        """End a task with an error; KV that it has committed stays in the cache.

        `pass_failed`: a pass of the model failed, so the rest of the task's KV is dropped;
        otherwise the rest is committed too. If `error` is NonFiniteOutput, all KV that the task has
        computed is removed from RAM and disk instead.
        """
        self._interrupted[task] = error
        self._take_out(task)
        task.fail(error)
        if task.lookup is not None:
            task.lookup.drop()
        if task.lease is not None:
            if isinstance(error, NonFiniteOutput):
                self.kv.purge(task.lease, task.tokens())
            elif not pass_failed:
                self.kv.finish(task.lease, task.tokens())
        try:
            if task.lease is not None:
                (self.kv.abandon if pass_failed else self.kv.release)(task.lease)
        finally:
            self._on_end(task)
            task.push(error)
            self._interrupted.pop(task, None)

    def _take_out(self, task: Task) -> None:
        """Remove a task from the queue, from prefill and from its lane."""
        self.waiting = [each for each in self.waiting if each is not task]
        self.kv.waits.retry() if self.waiting else self.kv.waits.end()
        self.prefilling = [each for each in self.prefilling if each is not task]
        if (lane := self.lanes.find(task)) is not None:
            self.lanes.leave(lane, [task])

    def persist_all(self) -> None:
        """Queue the committed KV of running requests for writing to disk.

        Called after the MLX thread failed.
        """
        for task in dict.fromkeys(self.active) | self._interrupted:
            if task.lease is not None and not task.restoring:
                self.kv.persist(task.lease, task.tokens(), whole=True)


def _confirmed_failure(error: Exception, task: Task) -> MlxcacheError:
    """Return the error for the client of `task`; raise the device's error if the device failed.

    A failed pass may be the cause of `error`: it can leave NaN or invalid tokens behind.
    """
    device.confirm()
    return as_failure(error, task.record.id)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether MLX raised `error` because an allocation failed."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def retry_after_oom(kv: KVCache, task: Task, error: Exception) -> bool:
    """Free memory and undo the pass that raised `error`; return whether it may be tried again.

    Returns False if `error` is not a failed allocation, if it is the task's second one in a row at
    the same position, if the task's prefix is being read from disk, if the pass has damaged the
    task's KV, or if the model has opaque slots, whose state the pass has changed.
    """
    if kv.layout.opaque or task.lease is None or not is_out_of_memory(error):
        return False
    if task.restoring or not task.note_oom():
        return False
    log.warning(
        "%s: out of memory at token %d, evicting and retrying: %s",
        *(task.record.id, task.held.length, error),
    )
    return kv.free_after_oom(task.lease)
