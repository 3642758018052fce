"""Prefix loss: analysis, in a thread of its own, of why a request could not reuse a prefix."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mlxcache.prompt.advice import COMPARE, advice_for
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.explain import (
    LEAST_LOSS,
    EarlierPrompt,
    EarlierPrompts,
    Explainer,
    Side,
    first_related,
)
from mlxcache.prompt.shared_runs import Runs, count_within
from mlxcache.scheduling.task import Task
from mlxcache.types import WARMING, Admitted, Job, RequestRecord, Tokens

log = logging.getLogger("mlxcache.engine")

Cause = tuple[str, str]
"""Reason and cause of a loss; see docs/explain.md."""
Texts = tuple[str, str]

_AROUND = (12, 40)
"""Number of tokens shown before and after the position where reuse ended."""


@dataclass(frozen=True, slots=True)
class Found:
    """Reuse of a prompt in tokens: `cached` were reused, `matched` are in RAM, reusable or not.

    `damaged`: files that hold parts of the prefix failed verification.
    """

    cached: int
    matched: int
    damaged: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """A prefix loss, before its tokens are counted.

    `described`: the value of `RequestRecord.lost`, as in `GET /v1/requests/{id}`, but with
    `lost_tokens` and `lost_s` 0. `runs`: half-open ranges of tokens that an earlier prompt had
    computed and that this one has to compute again.
    """

    described: dict[str, Any]
    runs: Runs = ()


class PrefixLossReporter:
    """Fills in `RequestRecord.lost`: the reason why a prefix was not reused. Use on the event loop.

    The cost of a loss, in seconds, is an estimate until the prompt is computed, and then its share
    of the measured time of the prefill. When a request has ended, only those lost tokens count that
    it was fed.

    `rate()` returns the prefill tokens per second last measured. `shared_with_sessions` is
    `SessionBook.shared_with_sessions`, called on this reporter's thread.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        rate: Callable[[], float],
        shared_with_sessions: Callable[[str, Tokens], list[tuple[bool, int]]],
    ):
        self._explainer = Explainer(builder.message_position, builder.decode)
        self._rate, self._shared_with_sessions = rate, shared_with_sessions
        self._held = EarlierPrompts()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-explain")
        self._open: dict[str, asyncio.Future[Loss | None]] = {}
        self._losses: dict[str, Loss] = {}

    def note_admission(self, task: Task, event: Admitted) -> None:
        """Start to explain the prefix loss of a request that was just admitted.

        Does nothing if at most `LEAST_LOSS` tokens must be computed, or if prefix losses of the
        request are not analysed; see `is_explained`.
        """
        if event.prompt_tokens - event.cached_tokens <= LEAST_LOSS or not is_explained(task.job):
            return
        damaged = task.lookup is not None and task.lookup.failed
        self._begin(task, Found(event.cached_tokens, task.matched, damaged))

    def note_reply(self, task: Task) -> None:
        """Set the cost of a request's loss to its share of the seconds that its prompt took.

        To be called when the first piece of the reply has arrived: the prompt is computed then. If
        the loss is still being analysed, nothing is set here, but at the end of the analysis.
        """
        _set_cost(task.record, task.record.timing.get("prefill_s"))

    def _begin(self, task: Task, found: Found) -> None:
        job, record = task.job, task.record
        held = [one for one in self._held.all() if one.owner == job.owner]
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._pool, self._find, job, held, found)
        self._open[job.id] = answer
        answer.add_done_callback(lambda done: self._explained(record, done))

    def _explained(self, record: RequestRecord, done: asyncio.Future[Loss | None]) -> None:
        self._open.pop(record.id, None)
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            log.error("%s: prefix-loss analysis failed", record.id, exc_info=error)
        elif (loss := done.result()) is not None:
            self._losses[record.id] = loss
            tokens = count_within(loss.runs, 0, record.prompt_tokens)
            cost = {"lost_tokens": tokens, "lost_s": round(tokens / self._rate(), 3)}
            record.lost = loss.described | cost
            _set_cost(record, record.timing.get("prefill_s"))

    def note_end(self, task: Task, then: Callable[[], None]) -> None:
        """Store an ended request's prompt for comparison with later ones, then call `then()`.

        If the request's own prefix loss is still being analysed, `then()` is called after that.
        """
        record, source = task.record, task.job.prompt.source
        if is_explained(task.job) and task.lease is not None:
            ids = task.tokens()
            computed = record.cached_tokens + record.fed_tokens + max(0, len(task.out) - 1)
            side = Side(source, ids)
            self._held.add(EarlierPrompt(task.job.session, side, computed, task.job.owner))
        spent = record.timing.get("prefill_s", time.perf_counter() - task.phase_began)

        def explained(_: object = None) -> None:
            if (loss := self._losses.pop(record.id, None)) is not None:
                _count_fed(record, loss)
            _set_cost(record, spent)
            then()

        answer = self._open.get(record.id)
        if answer is None:
            explained()
        else:
            answer.add_done_callback(explained)

    async def wait_for(self, id: str) -> None:
        """Wait until the analysis of request `id` has ended; return at once if none is running."""
        if (answer := self._open.get(id)) is not None:
            await asyncio.wait({answer})

    def close(self) -> None:
        """Cancel the queued analyses and stop the thread without waiting for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- on the reporter's thread ------------------------------------------------------------------

    def _find(self, job: Job, held: list[EarlierPrompt], reuse: Found) -> Loss | None:
        side = Side(job.prompt.source, job.prompt.ids)
        found = EarlierPrompts.ranked(held, job.session, side.ids)
        if any(
            shared >= len(one.side.ids) <= reuse.cached + LEAST_LOSS for one, shared in found[:1]
        ):
            return None  # it continues its session's last prompt, which was reused
        kept = max((min(shared, one.computed) for one, shared in found), default=0)
        candidate = first_related(found, side)
        if candidate is None and kept - reuse.cached <= LEAST_LOSS:
            return self._unknown(job, side, reuse)
        changed = self._changed(candidate, side, reuse) if candidate is not None else None
        parted = count_within(changed.runs, 0, len(side.ids)) if changed is not None else 0
        if max(kept - reuse.cached, parted) <= LEAST_LOSS:
            return None
        return self._gone(reuse, kept, side) if kept - reuse.cached >= parted else changed

    def _changed(self, earlier: EarlierPrompt, side: Side, reuse: Found) -> Loss | None:
        """Return the loss caused by a difference from an earlier prompt; None if there is none.

        `side`: the request's own prompt. `reuse`: how much of it was reused.
        """
        found = self._explainer.explain(earlier.side, side, earlier.computed)
        if (first := found.first) is None:
            return None
        # tokens that the earlier prompt never had are not lost, wherever they are
        before = (reuse.cached, min(found.at_token, earlier.computed))
        again = ((max(start, reuse.cached), end) for start, end in (before, *found.again))
        runs = tuple((start, end) for start, end in again if end > start)
        texts = first.before, first.after
        loss = _loss((first.reason, first.cause), found.at_token, runs, texts)
        advice = f"{found.advice} {COMPARE}" if first.cause == "text" else found.advice
        more = {"where": first.where, "advice": advice}
        return Loss(loss.described | more, loss.runs)

    def _unknown(self, job: Job, side: Side, reuse: Found) -> Loss:
        """Return the loss of a prompt that resembles none of the earlier prompts in memory.

        `side`: the prompt, which is compared with the sessions on disk. `reuse`: how much of it was
        reused.
        """
        cached, label = reuse.cached, job.session
        known = self._shared_with_sessions(label, side.ids) if label else []
        own, most = max(known, key=lambda found: (found[1], found[0]), default=(True, 0))
        if most - cached <= LEAST_LOSS:
            return _loss(("first_seen", "new_conversation"), cached)
        if own:
            return self._gone(reuse, most, side)
        around = self._around(side, cached)
        return _loss(("namespace", "other_model"), cached, ((cached, most),), around)

    def _gone(self, reuse: Found, kept: int, side: Side) -> Loss:
        """Return the loss of a prefix whose tokens are unchanged but whose KV is not usable now.

        `kept`: leading tokens of the prompt that were computed earlier. `side`: the request's
        prompt, for an excerpt of its text. `reuse`: how much of it was reused.
        """
        around = self._around(side, reuse.cached)
        return _loss(_missing(reuse, kept), reuse.cached, ((reuse.cached, kept),), around)

    def _around(self, side: Side, at: int) -> Texts:
        shown = side.ids[max(0, at - _AROUND[0]) : at + _AROUND[1]]
        text = self._explainer.decode([int(i) for i in shown if i >= 0])
        return text, text


def _loss(what: Cause, at: int, runs: Runs = (), texts: Texts = ("", "")) -> Loss:
    """Return a loss that begins at token `at`, with its reason and cause `what`.

    Reasons and causes are those of docs/explain.md. `runs`: half-open ranges of the lost tokens.
    `texts`: excerpts of the earlier and the later text.
    """
    reason, cause = what
    described = {
        "at_token": at,
        "reason": reason,
        "cause": cause,
        "where": "",
        "lost_tokens": 0,
        "lost_s": 0.0,
        "before": texts[0],
        "after": texts[1],
        "advice": advice_for(cause),
    }
    return Loss(described, runs)


def is_explained(job: Job) -> bool:
    """Return whether prefix losses of a request are analysed.

    That is the case for requests rendered from a conversation, except those that only warm the
    cache.
    """
    return job.prompt.source is not None and job.api != WARMING


def _set_cost(record: RequestRecord, spent: float | None) -> None:
    """Set the seconds that a loss cost: its share of `spent`, the seconds of the prefill.

    Does nothing if there is no loss or `spent` is None. `record.lost` becomes a new dictionary,
    because readers compare it with the earlier one.
    """
    if record.lost is not None and spent is not None:
        share = min(1.0, record.lost["lost_tokens"] / max(1, record.fed_tokens))
        record.lost = record.lost | {"lost_s": round(share * spent, 6)}


def _count_fed(record: RequestRecord, loss: Loss) -> None:
    """Set `lost_tokens` of an ended request to the number of lost tokens that it was fed.

    The loss is removed from the record if at most `LEAST_LOSS` tokens are left.
    """
    start, fed = record.cached_tokens, record.fed_tokens
    tokens = count_within(loss.runs, start, start + fed)
    small = bool(loss.runs) and tokens <= LEAST_LOSS
    record.lost = None if small or record.lost is None else record.lost | {"lost_tokens": tokens}


def _missing(reuse: Found, kept: int) -> Cause:
    """Return why the KV of a prefix with unchanged tokens is not usable now: reason and cause.

    Reasons and causes are those of docs/explain.md. `kept`: leading tokens of the prompt that were
    computed earlier.
    """
    if reuse.damaged:
        return "corrupt", "checksum"
    if reuse.matched > reuse.cached + LEAST_LOSS and reuse.matched + LEAST_LOSS >= kept:
        return "checkpoint_gap", "no_checkpoint"
    return "evicted", "memory"
