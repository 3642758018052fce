"""The number of guessed tokens that one pass should check, so that it saves the most time.

A guess of k tokens costs c(1 + k) - 1, where c(q) is the time of a pass of q tokens in passes of
one token, and saves a pass for each of its tokens that the model draws too. How many these are is
estimated from how long earlier guesses with a match of similar length stayed right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

PassCost = Callable[[int], float]
"""Cost of a pass over a number of tokens, in passes over one token."""

LONGEST = 31
"""Most tokens of a guess; with the token before it a pass has 32."""

MATCHES = (3, 4, 5, 6, 8, 11, 16, 24, 40, 64)
"""Least matched tokens of each group of guesses that are counted together."""

PLACES = (1, 2, 3, 5, 9, 17)
"""First place, in a guess, of each group of places that are counted together."""

KEPT = 0.985
"""Factor by which older counts lose weight with each new observation of their group."""

PRIOR = 4.0
"""Weight of the expectation before anything was observed, in observations."""

_RIGHT = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95)
"""Expected share of right tokens by group of `MATCHES`, before anything was observed."""


class Survival:
    """Decayed counts of how long guesses stay right, by the length of their match.

    The match of a guess is the tokens before it that occurred earlier in the text too; see
    `Guess.matched`. Holds numbers only, and no text.
    """

    def __init__(self) -> None:
        self._tried = [[PRIOR] * len(PLACES) for _ in MATCHES]
        self._right = [[PRIOR * share] * len(PLACES) for share in _RIGHT]

    def observe(self, matched: int, checked: int, right: int) -> None:
        """Count a guess of which the first `right` of `checked` tokens were right.

        `matched`: the guess's `Guess.matched`.
        """
        row = _group(MATCHES, matched)
        tried, kept = self._tried[row], self._right[row]
        ends = [*(start - 1 for start in PLACES[1:]), LONGEST]
        for group, (start, end) in enumerate(zip(PLACES, ends, strict=True)):
            good = max(0, min(end, right) - start + 1)
            seen = good + (start <= right + 1 <= end and right < checked)
            if seen:
                fade = KEPT**seen
                tried[group] = fade * tried[group] + seen
                kept[group] = fade * kept[group] + good
            if right < end:
                break

    def chances(self, matched: int, count: int) -> list[float]:
        """Return the chances that the first 1, 2, ... `count` tokens of a guess are all right.

        `matched`: the guess's `Guess.matched`.
        """
        row = _group(MATCHES, matched)
        tried, kept = self._tried[row], self._right[row]
        found, chance, group = list[float](), 1.0, 0
        for place in range(1, count + 1):
            if group + 1 < len(PLACES) and place >= PLACES[group + 1]:
                group += 1
            chance *= kept[group] / tried[group]
            found.append(chance)
        return found


def best_length(
    chances: Sequence[float],
    cost: PassCost,
    *,
    skip: int = 0,
    fed: int = 0,
    redo: bool = False,
) -> int:
    """Return how many tokens of a guess to check after its first `skip`; 0 if none pays.

    `chances`: `Survival.chances` of the guess. `skip`: 1 if the guess begins with the token that
    the running pass draws, which is fed anyway. `fed`: tokens that the pass feeds again before the
    newest one. `redo`: after a wrong token, all tokens of the pass up to there are fed again with
    the next pass, as recurrent layers need it.
    """
    best, length, gained, again = 0.0, 0, 0.0, 0.0
    before = chances[skip - 1] if skip else 1.0
    without = cost(1 + fed)
    if redo:  # the token that the running pass draws is another than the guess begins with
        again = (1.0 - before) * (cost(2 + fed) - 1.0)
    for count, chance in enumerate(chances[skip:], 1):
        gained += chance
        if redo:  # the guess ends right before this token
            again += (before - chance) * (cost(1 + fed + count) - 1.0)
            before = chance
        net = gained - (cost(1 + fed + count) - without) - again
        if net > best:
            best, length = net, count
    return length


def cost_curve(points: Sequence[tuple[int, float]]) -> PassCost:
    """Return a function from the number of tokens of a pass to its cost, in passes of one token.

    It interpolates between measured `points`, (tokens, cost), which ascend; the first is (1, 1.0).
    Beyond the last, the cost grows as between the last two.
    """
    table = [1.0, 1.0]
    for (start, low), (end, high) in pairwise(points):
        table += [low + (high - low) * (at - start) / (end - start) for at in range(start + 1, end)]
        table.append(high)

    def cost(tokens: int) -> float:
        if tokens < len(table):
            return table[tokens]
        return table[-1] + (tokens - len(table) + 1) * max(0.0, table[-1] - table[-2])

    return cost


def _group(starts: Sequence[int], value: int) -> int:
    return max(0, bisect_right(starts, value) - 1)
