"""Bounds that the measured figures are checked against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.bench.measure import Results, by, middle
from mlxcache.bench.process import OURS, THEIRS

FIRST_TOKEN = 1.05
OWN_TIME = 1.10
OVERHEAD_S = 0.030
THROUGHPUT = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """A bound on a measured figure, with the measured value.

    `measured` must be at most `bound`, or at least `bound` if `least` is True. Both are in `unit`,
    which is empty for ratios and counts. `name` is the text to print.
    """

    name: str
    measured: float
    bound: float
    unit: str = ""
    least: bool = False

    @property
    def ok(self) -> bool:
        """True if the bound holds."""
        return self.measured >= self.bound if self.least else self.measured <= self.bound


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one measurement by name, and the bounds on them (`checks`).

    The name of each figure ends in its unit. A figure is a number, a list of samples, or a text.
    """

    figures: dict[str, Any]
    checks: Sequence[Check]


def speed(results: Results, others: Sequence[str]) -> list[Check]:
    """Return the bounds on this server's speed, each with the figure in `results` that it limits.

    `others` names the other servers that were measured, relative to which some bounds are. A bound
    is left out if `results` lacks a figure for it.
    """
    return [*_beside(results, others), *_by_itself(results)]


def _beside(results: Results, others: Sequence[str]) -> Iterator[Check]:
    for other in others:
        ratio = results.ratio("warm", "first_s", other)
        if ratio is not None:
            yield Check(f"warm first token, by that of {other}", ratio, FIRST_TOKEN)
    cold = [results.ratio("cold", "first_s", other) for other in others]
    worst = max((ratio for ratio in cold if ratio is not None), default=None)
    if worst is not None:
        yield Check("cold first token, by the best of the others", worst, FIRST_TOKEN)
    ratio = results.ratio("concurrent", "throughput", THEIRS)
    if ratio is not None:
        name = f"tokens/s of eight at once, by {THEIRS}'s"
        yield Check(name, ratio, THROUGHPUT, least=True)


def _by_itself(results: Results) -> Iterator[Check]:
    share = middle(by(pair.server_s, pair.own_s) for pair in results.pairs)
    over = middle(pair.server_s - pair.own_s for pair in results.pairs)
    if share is not None and over is not None:
        yield Check("warm first token, by the model's own time", share, OWN_TIME)
        yield Check("warm first token, less the model's own time", over, OVERHEAD_S, "s")


def answered(results: Results) -> list[Check]:
    """Return a list of one bound: no scenario may have failed at this server."""
    failed = sum(failure.startswith(f"{OURS},") for failure in results.failures)
    return [Check("scenarios that failed here", failed, 0)]
