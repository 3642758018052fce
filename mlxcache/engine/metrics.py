"""Records of recent requests, and counts of all."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mlxcache.engine.trace import Recordings
from mlxcache.lru import LRU
from mlxcache.types import WARMING, Arrival, Job, RequestRecord

Reuse = Literal["cold", "warm", "restored"]
"""Source of most of a prompt: computed; reused from RAM alone; reused, in part from disk."""

MIN_REUSED_SHARE, MIN_REUSED_TOKENS = 0.5, 16
"""Minimum reuse for a request to count as warm: share of the prompt, and number of tokens."""

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds, in seconds, of the ranges by which durations are counted."""

STAGES = ("queue_s", "render_s", "match_s", "restore_s", "prefill_s", "decode_s")
"""Stages of a request that follow one another; `first_token_s`, in contrast, spans several."""

OUTCOMES = ("done", "cancelled", "failed", "rejected")
REASONS = (
    *("evicted", "edited", "moved", "system_changed", "tools_changed", "template_drift"),
    *("checkpoint_gap", "namespace", "corrupt", "first_seen"),
)

KINDS: tuple[Reuse, ...] = ("cold", "warm", "restored")


def reuse_of(record: RequestRecord) -> Reuse:
    """Return whether a request was cold, warm or restored, as the glossary defines these."""
    cached = record.cached_tokens
    if cached <= MIN_REUSED_TOKENS or cached < MIN_REUSED_SHARE * record.prompt_tokens:
        return "cold"
    return "restored" if record.restored_tokens else "warm"


@dataclass(slots=True)
class Times:
    """A histogram of durations in seconds.

    `counts[i]` is the number of durations up to `bounds[i]` and above the bound before; the last
    count is for durations above all bounds. `total_s`: the sum of all durations.
    """

    bounds: ClassVar[tuple[float, ...]] = SECONDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)


def _no_losses() -> Counter[str]:
    return Counter(dict.fromkeys(REASONS, 0))


def _by_kind() -> dict[Reuse, Times]:
    return {kind: Times() for kind in KINDS}


@dataclass(slots=True)
class Tally:
    """Counts of ended requests, including refused and joined ones. Event loop only.

    `outcomes` counts by API and status, such as ("chat", "done"). `joined`: requests that shared
    the computation of another; only these two fields count them. `first_token` and `whole`: times
    from a client's request to its first token and to its end, by whether it was cold, warm or
    restored. `stages`: total seconds by stage; see `STAGES`. `losses` counts prefix losses by
    reason and cause, `lost_tokens` their tokens by reason. `repetitions`: replies ended because
    they repeated themselves.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    joined: int = 0
    repetitions: int = 0
    first_token: dict[Reuse, Times] = field(default_factory=_by_kind)
    whole: dict[Reuse, Times] = field(default_factory=_by_kind)
    stages: Counter[str] = field(default_factory=Counter)
    losses: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=_no_losses)

    def add(self, record: RequestRecord) -> None:
        api = record.api or "other"
        for outcome in OUTCOMES:  # zeros too: Prometheus sees no rise from an absent series
            self.outcomes[api, outcome] += outcome == record.status
        if record.joined is not None:  # the computation is counted once
            self.joined += 1
            return
        self.repetitions += record.finish_reason == "repetition"
        for stage in STAGES:
            self.stages[stage] += record.timing.get(stage, 0.0)  # type: ignore[assignment]
        if record.api != WARMING:
            self._time(record)
        if record.lost is not None:
            self.losses[record.lost["reason"], record.lost["cause"]] += 1
            self.lost_tokens[record.lost["reason"]] += record.lost["lost_tokens"]

    def _time(self, record: RequestRecord) -> None:
        first, kind = record.timing.get("first_token_s"), reuse_of(record)
        if first is None:
            return
        self.first_token[kind].add(first)
        if record.status == "done":
            self.whole[kind].add(first + record.timing.get("decode_s", 0.0))


MAX_RECORDS = 1000


class Records:
    """Records of the latest `MAX_RECORDS` requests by id, and the tally of all.

    Use on the event loop. `recordings`: traces that are being recorded. `on_over(record)` is called
    for each request that is over.
    """

    def __init__(self, on_over: Callable[[RequestRecord], None]) -> None:
        self.tally = Tally()
        self.recordings = Recordings()
        self._on_over = on_over
        self._kept: LRU[str, RequestRecord] = LRU(MAX_RECORDS)

    def begin(
        self, job: Job, model: str | None = None, session_id: str | None = None
    ) -> RequestRecord:
        """Make the record of a request that has just arrived for the model with label `model`."""
        record = self.expect(job, model)
        record.session_id = session_id
        record.created_at -= job.loaded_s
        record.prompt_tokens = len(job.prompt.ids)
        record.timing["render_s"] = round(job.render_s, 6)
        record.canonicalised = job.prompt.rules
        return record

    def expect(self, request: Arrival | Job, model: str | None) -> RequestRecord:
        """Make the record of a request that waits until its model, of label `model`, is loaded.

        It is replaced by that of `begin`; see `forget`.
        """
        record = RequestRecord(
            id=request.id,
            session=request.session,
            api=request.api,
            client=request.client,
            status="queued",
            created_at=time.time(),
            owner=request.owner,
            model=model,
        )
        self._kept.put(record.id, record)
        return record

    def forget(self, id: str) -> None:
        """Remove the record that `expect` made for request `id`; `begin` makes another one."""
        self._kept.pop(id)

    def end(self, record: RequestRecord) -> None:
        """Count a request that is over, and call `on_over`."""
        self.tally.add(record)
        self._on_over(record)

    def reject(self, record: RequestRecord, error: BaseException) -> None:
        """Complete the record of a request that was refused with `error`, and count it as `end`."""
        record.status, record.error = "rejected", str(error) or type(error).__name__
        self.end(record)

    def all(self, owner: str | None) -> list[RequestRecord]:
        """Return the records of an owner's requests, newest first."""
        return [record for record in reversed(self._kept.values()) if record.owner == owner]

    def get(self, id: str, owner: str | None) -> RequestRecord | None:
        found = self._kept.peek(id)
        return found if found is not None and found.owner == owner else None
