"""Why a prefix was lost: found out beside the reply, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxcache.cache.kv_cache import Memory
from mlxcache.engine.task import Task
from mlxcache.prompt.advice import advice_for
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.explain import (
    LEAST_LOSS,
    EarlierPrompt,
    EarlierPrompts,
    Explainer,
    Explanation,
    Side,
    first_related,
)
from mlxcache.types import WARMING, Admitted, Event, Job, Piece, RequestRecord, Tokens

log = logging.getLogger("mlxcache.engine")

_AROUND = (12, 40)
"""Tokens shown before and from where reuse ended."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a request found: `cached` tokens were reused; `matched` are in the tree, with or without
    a checkpoint; `damaged`: what the disk has of it could not be used."""

    cached: int
    matched: int
    damaged: bool


class Losses:
    """Fills in `RequestRecord.lost`. Call from the event loop.

    What a loss cost is an estimate at first, and what it really took once the prompt is computed.
    `rate`: prefill tokens per second as measured last. `booked`: see `SessionBook.booked`.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        rate: Callable[[], float],
        booked: Callable[[str, Tokens], list[tuple[bool, int]]],
    ):
        self._explainer = Explainer(builder.message_position, builder.decode)
        self._rate, self._booked = rate, booked
        self._held = EarlierPrompts()
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-explain")
        self._open: dict[str, asyncio.Future[dict[str, Any] | None]] = {}

    def watch(self, task: Task, memory: Memory) -> None:
        """Have the loss of a request found out once it is admitted, after its client is told."""
        push, ids = task.push, task.ids
        computed = False

        def watching(event: Event | BaseException) -> None:
            """On the MLX thread."""
            nonlocal computed
            push(event)
            if isinstance(event, Piece) and not computed:
                computed = True
                if not self._loop.is_closed():
                    spent = task.record.timing.get("prefill_s")
                    self._loop.call_soon_threadsafe(_settle, task.record, spent)
            if not isinstance(event, Admitted) or self._loop.is_closed():
                return
            cached = event.cached_tokens
            if event.prompt_tokens - cached <= LEAST_LOSS or not explained(task.job):
                return
            opaque = memory.layout.opaque
            matched = memory.tree.match(ids, touch=False).length if opaque else cached
            damaged = task.look is not None and task.look.failed
            reuse = Reuse(cached, matched, damaged)
            self._loop.call_soon_threadsafe(self._begin, task, reuse)

        task.push = watching

    def _begin(self, task: Task, reuse: Reuse) -> None:
        job, record = task.job, task.record
        held = [one for one in self._held.all() if one.owner == job.owner]
        found = self._loop.run_in_executor(self._pool, self._find, job, held, reuse)
        self._open[job.id] = found
        found.add_done_callback(lambda done: self._told(record, done))

    def _told(self, record: RequestRecord, done: asyncio.Future[dict[str, Any] | None]) -> None:
        self._open.pop(record.id, None)
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            log.error("why a prefix was lost could not be found out", exc_info=error)
        else:
            record.lost = done.result()
            _settle(record, record.timing.get("prefill_s"))

    def ended(self, task: Task, then: Callable[[], None]) -> None:
        """Keep what a request computed, for the next one; call `then` once its loss is told."""
        record, source = task.record, task.job.prompt.source
        if explained(task.job) and task.lease is not None:
            ids = np.concatenate([task.ids, np.asarray(task.out, np.int32)])
            computed = record.cached_tokens + record.fed_tokens + max(0, len(task.out) - 1)
            side = Side(source, ids)
            self._held.add(EarlierPrompt(task.job.session, side, computed, task.job.owner))
        spent = record.timing.get("prefill_s", time.perf_counter() - task.phase_began)

        def told(_: object = None) -> None:
            _settle(record, spent)
            then()

        found = self._open.get(record.id)
        if found is None:
            told()
        else:
            found.add_done_callback(told)

    async def told(self, id: str) -> None:
        """Wait until the loss of a request is told, if it is being found out."""
        if (found := self._open.get(id)) is not None:
            await asyncio.wait({found})

    def close(self) -> None:
        """Find out nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- in the thread ---------------------------------------------------------------------------

    def _find(self, job: Job, held: list[EarlierPrompt], reuse: Reuse) -> dict[str, Any] | None:
        side = Side(job.prompt.source, job.prompt.ids)
        found = EarlierPrompts.ranked(held, job.session, side.ids)
        enough = reuse.cached + LEAST_LOSS
        if any(shared >= len(one.side.ids) <= enough for one, shared in found[:1]):
            return None  # it goes on with its session's last prompt, which was there
        candidate = first_related(found, side)
        if candidate is None:
            return self._unknown(job, side, reuse)
        explanation = self._explainer.explain(candidate.side, side)
        kept = min(explanation.at_token, candidate.computed)
        missing = kept - reuse.cached
        parted = explanation.new_from - max(explanation.at_token, reuse.cached)
        if not explanation.reason:
            parted = 0
        if max(missing, parted) <= LEAST_LOSS:
            return None
        if missing >= parted:
            reason, cause = _gone(reuse, kept)
            return self._lost(
                reason, cause, reuse.cached, missing, self._around(side, reuse.cached)
            )
        return self._parted(explanation, reuse)

    def _unknown(self, job: Job, side: Side, reuse: Reuse) -> dict[str, Any]:
        """What no prompt since the start is like: the sessions' own leaves say if it was before."""
        cached, booked = reuse.cached, self._booked(job.session, side.ids) if job.session else []
        own, most = max(booked, key=lambda found: (found[1], found[0]), default=(True, 0))
        if most - cached <= LEAST_LOSS:
            return self._lost("first_seen", "new_conversation", cached, 0)
        reason, cause = _gone(reuse, most) if own else ("namespace", "other_model")
        return self._lost(reason, cause, cached, most - cached, self._around(side, cached))

    def _parted(self, found: Explanation, reuse: Reuse) -> dict[str, Any]:
        assert found.reason is not None
        assert found.cause is not None
        lost = found.new_from - reuse.cached
        texts = found.before, found.after
        told = self._lost(found.reason, found.cause, found.at_token, lost, texts)
        return told | {"where": found.where}

    def _around(self, side: Side, at: int) -> tuple[str, str]:
        shown = side.ids[max(0, at - _AROUND[0]) : at + _AROUND[1]]
        text = self._explainer.decode([int(i) for i in shown if i >= 0])
        return text, text

    def _lost(
        self, reason: str, cause: str, at: int, tokens: int, texts: tuple[str, str] = ("", "")
    ) -> dict[str, Any]:
        return {
            "at_token": at,
            "reason": reason,
            "cause": cause,
            "where": "",
            "lost_tokens": tokens,
            "lost_s": round(tokens / self._rate(), 3),
            "before": texts[0],
            "after": texts[1],
            "advice": advice_for(cause),
        }


def explained(job: Job) -> bool:
    """Whether a request is compared with others: those that were rendered from a conversation."""
    return job.prompt.source is not None and job.api != WARMING


def _settle(record: RequestRecord, spent: float | None) -> None:
    """Say what a loss cost: its share of the seconds that computing the prompt took, if known.

    In a new dictionary: whoever watches the record compares it with what it was.
    """
    if record.lost is not None and spent is not None:
        share = min(1.0, record.lost["lost_tokens"] / max(1, record.fed_tokens))
        record.lost = record.lost | {"lost_s": round(share * spent, 3)}


def _gone(reuse: Reuse, kept: int) -> tuple[str, str]:
    """Why a prefix that was computed is not there, though nothing differs."""
    if reuse.damaged:
        return "corrupt", "checksum"
    if reuse.matched > reuse.cached + LEAST_LOSS and reuse.matched + LEAST_LOSS >= kept:
        return "checkpoint_gap", "no_checkpoint"
    return "evicted", "memory"
