"""What requests came to, counted as each is over: outcomes, waiting times, losses. No MLX.

Unlike `figures.Totals` it knows those that were refused, those that joined another, and why a
prefix was lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mlxcache.types import WARMING, RequestRecord

Reuse = Literal["cold", "warm", "restored"]
"""Most of the prompt was computed; most was reused, all of that from RAM; some of it from disk."""

LEAST_SHARE, LEAST_TOKENS = 0.5, 16
"""What a prompt that is not cold has reused of it, and more tokens than which: a tokenizer's first
one and the first words of a template are the same in all prompts, and spare nobody a wait."""

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds of the ranges that times are counted in."""

STAGES = ("queue_s", "render_s", "match_s", "restore_s", "prefill_s", "decode_s")
"""The stages that follow one another; `first_token_s` spans several."""

OUTCOMES = ("done", "cancelled", "failed", "rejected")
REASONS = (
    *("evicted", "edited", "system_changed", "tools_changed", "template_drift"),
    *("checkpoint_gap", "namespace", "corrupt", "first_seen"),
)

KINDS: tuple[Reuse, ...] = ("cold", "warm", "restored")


def reuse_of(record: RequestRecord) -> Reuse:
    """Where most of a request's prompt came from.

    What is called cold, warm and restored anywhere is so by this.
    """
    cached = record.cached_tokens
    if cached <= LEAST_TOKENS or cached < LEAST_SHARE * record.prompt_tokens:
        return "cold"
    return "restored" if record.restored_tokens else "warm"


@dataclass(slots=True)
class Times:
    """How long something took, how often. `counts` are by range, the last one of what is longer
    than the last of `bounds`."""

    bounds: ClassVar[tuple[float, ...]] = SECONDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    @property
    def average(self) -> float | None:
        """Seconds; None where there were none."""
        return self.total_s / self.count if self.count else None


def _no_losses() -> Counter[str]:
    return Counter(dict.fromkeys(REASONS, 0))


def _by_kind() -> dict[Reuse, Times]:
    return {kind: Times() for kind in KINDS}


@dataclass(slots=True)
class Tally:
    """Counts since the start; changed and read on the event loop.

    `outcomes` are by API and status. `first_token` and `whole` are times from a request's arrival:
    of those that were computed for a client and drew a token, and of those of them that came to
    their end. `stages` are seconds. `losses` are by reason and cause, `lost_tokens` by reason.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    joined: int = 0
    first_token: dict[Reuse, Times] = field(default_factory=_by_kind)
    whole: dict[Reuse, Times] = field(default_factory=_by_kind)
    stages: Counter[str] = field(default_factory=Counter)
    losses: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=_no_losses)

    def add(self, record: RequestRecord) -> None:
        """Count a request that is over."""
        api = record.api or "other"
        for outcome in OUTCOMES:  # all of an API's: Prometheus sees no rise from nothing to one
            self.outcomes[api, outcome] += outcome == record.status
        if record.joined is not None:  # what was computed is the other's
            self.joined += 1
            return
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
