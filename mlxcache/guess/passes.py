"""Cost of passes over few tokens: measured when a model is loaded, and corrected by live passes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from mlxcache.guess.rule import LONGEST, PassCost, cost_curve

LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, LONGEST + 1)
"""Tokens of the passes that are measured; on Metal the cost jumps between 8 and 12."""

NEWEST = 0.2
"""Weight of a live pass in the correction of passes of about its length."""

OUTLIER = 4.0
"""Ratio of the time of a live pass to the expected one, above which it corrects nothing."""

LEAST, MOST = 0.5, 2.0
"""Bounds of the correction, a factor of measured costs."""

_GROUPS = (1, 2, 4, 8, 12, 16, 24)

Curves = Mapping[int, Sequence[tuple[int, float]]]
"""Measured seconds, as (tokens of a pass, seconds), by the number of cached positions."""


class PassCosts:
    """Cost of a pass over some tokens, in passes over one token after as many cached positions.

    `curves`: measured passes, as (tokens, seconds), by the number of cached positions before them.
    Between two such numbers the cost is interpolated; below and above them, the cost at the nearest
    one holds. Passes of running replies correct the cost of passes over about as many tokens.
    """

    def __init__(self, curves: Curves):
        self._at = sorted(curves)
        self._curves = [_scaled(curves[at]) for at in self._at]
        self._plain = [dict(curves[at])[1] for at in self._at]
        self._live = [1.0] * len(_GROUPS)
        self._single: float | None = None

    def at(self, cached: int) -> PassCost:
        """Return the cost of passes after `cached` positions, as a function of their tokens.

        The function takes the number of tokens of a pass, and returns its cost in passes over one
        token.
        """
        measured, live = self._measured(cached), self._live

        def cost(tokens: int) -> float:
            return max(1.0, measured(tokens) * live[_group(tokens)]) if tokens > 1 else 1.0

        return cost

    def _measured(self, cached: int) -> PassCost:
        low, high, share = self._between(cached)
        first, second = self._curves[low], self._curves[high]
        return lambda tokens: first(tokens) + share * (second(tokens) - first(tokens))

    def seconds(self, cached: int) -> float:
        """Return the seconds of a pass over one token after `cached` positions."""
        low, high, share = self._between(cached)
        measured = self._plain[low] + share * (self._plain[high] - self._plain[low])
        return measured * (self._single or 1.0)

    def observe(self, tokens: int, seconds: float, cached: int) -> float:
        """Correct the costs by a pass of a running reply; return its cost in passes over one token.

        `tokens`: tokens of the pass. `seconds`: what it took. `cached`: positions before it. The
        result is at least 1. A pass that took `OUTLIER` times as long as expected corrects nothing,
        and the result is limited to `OUTLIER` times the expected cost: the machine did something
        else.
        """
        if tokens == 1:
            self._observe_single(seconds, cached)
            return 1.0
        measured, group = self._measured(cached)(tokens), _group(tokens)
        cost = seconds / self.seconds(cached)
        most = OUTLIER * measured * self._live[group]
        if self._single is not None and cost < most:
            live = self._live[group] + NEWEST * (cost / measured - self._live[group])
            self._live[group] = min(MOST, max(LEAST, live))
        return max(1.0, min(cost, most))

    def excess(self, tokens: int, seconds: float, cached: int) -> float:
        """Return by how much a pass took longer than expected, in passes over one token.

        The result is from 0 to `OUTLIER`. The expected costs are not corrected. `tokens`: tokens of
        the pass. `seconds`: what it took. `cached`: positions before it.
        """
        over = seconds / self.seconds(cached) - self.at(cached)(tokens)
        return min(OUTLIER, max(0.0, over))

    def _observe_single(self, seconds: float, cached: int) -> None:
        before = 1.0 if self._single is None else self._single
        ratio = before * seconds / self.seconds(cached)
        if self._single is None or ratio < OUTLIER * before:
            weight = NEWEST if self._single is not None else 1.0
            self._single = before + weight * (ratio - before)

    def _between(self, cached: int) -> tuple[int, int, float]:
        """Return the indexes of two curves to interpolate between, and the weight of the second.

        They were measured at the numbers of positions nearest to `cached`, the lower one first. The
        weight is from 0 (the first alone counts) to 1 (the second alone).
        """
        if len(self._at) == 1:
            return 0, 0, 0.0
        high = min(max(1, bisect_right(self._at, cached)), len(self._at) - 1)
        start, end = self._at[high - 1], self._at[high]
        return high - 1, high, min(1.0, max(0.0, (cached - start) / (end - start)))


def _scaled(points: Sequence[tuple[int, float]]) -> PassCost:
    plain = dict(points)[1]
    return cost_curve([(tokens, seconds / plain) for tokens, seconds in points])


def _group(tokens: int) -> int:
    return bisect_right(_GROUPS, tokens) - 1
