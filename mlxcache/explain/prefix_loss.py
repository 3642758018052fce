"""Prefix loss: analysis, in a thread of its own, of why a request could not reuse a prefix."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mlxcache.common_prefix import common_length
from mlxcache.explain.causes import COMPARE, advice_for
from mlxcache.explain.compare import LEAST_LOSS, Runs, compare_prompts, count_within, text_of
from mlxcache.explain.differences import related
from mlxcache.lru import LatestByGroup
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.chat_prompt import ChatPrompt
from mlxcache.scheduling.task import Task
from mlxcache.types import WARMING, Admitted, Job, RequestRecord, Tokens

log = logging.getLogger("mlxcache.engine")


@dataclass(frozen=True, slots=True, eq=False)
class EarlierPrompt:
    """A prompt that was served.

    `ids`: its tokens and those of its reply. `computed`: number of the leading ones whose KV
    existed when the request ended.
    """

    session: str | None
    prompt: ChatPrompt
    ids: Tokens
    computed: int
    owner: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory used; the conversation is assumed to be as large as its text."""
        text = self.prompt.tokenised
        return text.nbytes + 4 * len(text.text) + self.ids.nbytes


class EarlierPrompts:
    """The latest prompts of each session and owner; within the limits, the oldest are dropped."""

    def __init__(self, *, count: int = 64, each: int = 4, limit: int = 64 << 20):
        self._held: LatestByGroup[tuple[str | None, str | None], EarlierPrompt] = LatestByGroup(
            each=each, count=count, limit=limit, size=lambda one: one.nbytes
        )

    def add(self, new: EarlierPrompt) -> None:
        """Add a prompt, and drop the prompts of its session and owner that it continues.

        It continues a prompt if it begins with at least three quarters of that prompt's tokens.
        """
        group = new.session, new.owner
        continued = [
            one
            for one in self._held.of(group)
            if common_length(one.ids, new.ids) >= 0.75 * len(one.ids)
        ]
        self._held.add(group, new, replaced=continued)

    def all(self) -> list[EarlierPrompt]:
        return [one for _, one in self._held.items()]

    @staticmethod
    def ranked(
        held: list[EarlierPrompt], session: str | None, ids: Tokens
    ) -> list[tuple[EarlierPrompt, int]]:
        """Return earlier prompts, oldest first, each with the leading tokens shared with `ids`.

        Those of the session come first, then those that share more, then newer ones.
        """
        found = [(one, common_length(one.ids, ids)) for one in reversed(held)]
        return sorted(found, key=lambda pair: (pair[0].session != session, -pair[1]))


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse of a prompt in tokens: `cached` were reused, `matched` are in RAM, reusable or not.

    `damaged`: files that hold parts of the prefix failed verification.
    """

    cached: int
    matched: int
    damaged: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """A prefix loss: `RequestRecord.lost` without its counts, and the ranges of the tokens."""

    described: dict[str, Any]
    runs: Runs = ()


class PrefixLossReporter:
    """Fills in `RequestRecord.lost`: the reason why a prefix was not reused. Use on the event loop.

    The cost of a loss, in seconds, is an estimate until the prompt is computed, and then its share
    of the measured time of the prefill. When a request has ended, only those lost tokens count that
    it was fed.

    `rate()` returns the prefill tokens per second last measured.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        rate: Callable[[], float],
        shared_with_sessions: Callable[[str, Tokens], list[tuple[bool, int]]],
    ):
        self._builder = builder
        self._rate, self._shared_with_sessions = rate, shared_with_sessions
        self._held = EarlierPrompts()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-explain")
        self._open: dict[str, asyncio.Future[Loss | None]] = {}
        self._losses: dict[str, Loss] = {}

    def note_admission(self, task: Task, event: Admitted) -> None:
        """Start to explain the prefix loss of a request that was just admitted, if it has one."""
        job, record, prompt = task.job, task.record, _explained_prompt(task.job)
        if prompt is None or event.prompt_tokens - event.cached_tokens <= LEAST_LOSS:
            return
        damaged = task.lookup is not None and task.lookup.failed
        reuse = Reuse(event.cached_tokens, task.matched, damaged)
        held = [one for one in self._held.all() if one.owner == job.owner]
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._pool, self._find, job, prompt, held, reuse)
        self._open[job.id] = answer
        answer.add_done_callback(lambda done: self._explained(record, done))

    def note_reply(self, task: Task) -> None:
        """Set the cost of a loss at the first piece of a reply: the prompt is computed then."""
        _set_cost(task.record, task.record.timing.get("prefill_s"))

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
        job, record, prompt = task.job, task.record, _explained_prompt(task.job)
        if prompt is not None and task.lease is not None:
            computed = record.cached_tokens + record.fed_tokens + max(0, len(task.out) - 1)
            self._held.add(EarlierPrompt(job.session, prompt, task.tokens(), computed, job.owner))
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
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- on the reporter's thread ------------------------------------------------------------------

    def _find(
        self, job: Job, prompt: ChatPrompt, held: list[EarlierPrompt], reuse: Reuse
    ) -> Loss | None:
        found = EarlierPrompts.ranked(held, job.session, prompt.ids)
        if any(shared >= len(one.ids) <= reuse.cached + LEAST_LOSS for one, shared in found[:1]):
            return None  # it continues its session's last prompt, which was reused
        kept = max((min(shared, one.computed) for one, shared in found), default=0)
        candidate = next((one for one, _ in found if related(one.prompt.chat, prompt.chat)), None)
        if candidate is None and kept - reuse.cached <= LEAST_LOSS:
            return self._unknown(job, prompt, reuse)
        changed = self._changed(candidate, prompt, reuse) if candidate is not None else None
        parted = count_within(changed.runs, 0, len(prompt.ids)) if changed is not None else 0
        if max(kept - reuse.cached, parted) <= LEAST_LOSS:
            return None
        return self._gone(reuse, kept, prompt) if kept - reuse.cached >= parted else changed

    def _changed(self, earlier: EarlierPrompt, prompt: ChatPrompt, reuse: Reuse) -> Loss | None:
        ids, computed = earlier.ids, earlier.computed
        found = compare_prompts(self._builder, earlier.prompt, prompt, ids, computed)
        if (first := found.first) is None:
            return None
        # tokens that the earlier prompt never had are not lost, wherever they are
        before = (reuse.cached, min(found.at_token, computed))
        again = ((max(start, reuse.cached), end) for start, end in (before, *found.again))
        runs = tuple((start, end) for start, end in again if end > start)
        loss = _loss(first.reason, first.cause, found.at_token, runs, (first.before, first.after))
        advice = f"{found.advice} {COMPARE}" if first.cause == "text" else found.advice
        return Loss(loss.described | {"where": first.where, "advice": advice}, loss.runs)

    def _unknown(self, job: Job, prompt: ChatPrompt, reuse: Reuse) -> Loss:
        cached, label = reuse.cached, job.session
        known = self._shared_with_sessions(label, prompt.ids) if label else []
        own, most = max(known, key=lambda found: (found[1], found[0]), default=(True, 0))
        if most - cached <= LEAST_LOSS:
            return _loss("first_seen", "new_conversation", cached)
        if own:
            return self._gone(reuse, most, prompt)
        around = text_of(self._builder, prompt.ids, cached)
        return _loss("namespace", "other_model", cached, ((cached, most),), (around, around))

    def _gone(self, reuse: Reuse, kept: int, prompt: ChatPrompt) -> Loss:
        if reuse.damaged:
            what = "corrupt", "checksum"
        elif reuse.matched > reuse.cached + LEAST_LOSS and reuse.matched + LEAST_LOSS >= kept:
            what = "checkpoint_gap", "no_checkpoint"
        else:
            what = "evicted", "memory"
        around = text_of(self._builder, prompt.ids, reuse.cached)
        return _loss(*what, reuse.cached, ((reuse.cached, kept),), (around, around))


def _loss(
    reason: str, cause: str, at: int, runs: Runs = (), texts: tuple[str, str] = ("", "")
) -> Loss:
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


def _explained_prompt(job: Job) -> ChatPrompt | None:
    prompt = job.prompt
    return prompt if isinstance(prompt, ChatPrompt) and job.api != WARMING else None


def _set_cost(record: RequestRecord, spent: float | None) -> None:
    """Set the seconds that a loss cost: its share of `spent`, the seconds of the prefill.

    `record.lost` becomes a new dictionary, because readers compare it with the earlier one.
    """
    if record.lost is not None and spent is not None:
        share = min(1.0, record.lost["lost_tokens"] / max(1, record.fed_tokens))
        record.lost = record.lost | {"lost_s": round(share * spent, 6)}


def _count_fed(record: RequestRecord, loss: Loss) -> None:
    """Set `lost_tokens` of an ended request to those it was fed; drop a small loss."""
    start, fed = record.cached_tokens, record.fed_tokens
    tokens = count_within(loss.runs, start, start + fed)
    small = bool(loss.runs) and tokens <= LEAST_LOSS
    record.lost = None if small or record.lost is None else record.lost | {"lost_tokens": tokens}
