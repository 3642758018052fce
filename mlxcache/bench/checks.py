"""Measured figures, and the bounds that they are checked against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """A bound on a measured figure: at most `bound`, or at least `bound` if `least` is True.

    `unit` is empty for ratios and counts. `name` is the text to print.
    """

    name: str
    measured: float
    bound: float
    unit: str = ""
    least: bool = False

    @property
    def ok(self) -> bool:
        return self.measured >= self.bound if self.least else self.measured <= self.bound


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one measurement by name, and the bounds on them.

    The name of each figure ends in its unit. A figure is a number, a list of samples, or a text.
    """

    figures: dict[str, Any]
    checks: Sequence[Check]


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None, or None if there are none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def by(mine: float | None, other: float | None) -> float | None:
    """Return the ratio `mine` / `other`, or None if one is None or `other` is 0."""
    return mine / other if mine is not None and other else None
