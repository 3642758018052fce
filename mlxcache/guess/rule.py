"""How many guessed tokens one pass should check, so that it saves the most time, and what it costs.

A guess of k tokens costs c(1 + k) - 1, where c(q) is the time of a pass of q tokens in passes of
one token, and saves a pass for each of its tokens that the model draws too. How many these are is
estimated from how long earlier guesses with a match of similar length stayed right. The costs are
measured when a model is loaded, and corrected by live passes. All costs are in passes of one token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from mlxcache.guess.history import NO_GUESS, Guess, History

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
    """Decayed counts of how long guesses stay right, by `Guess.matched`. Holds no text."""

    def __init__(self) -> None:
        self._tried = [[PRIOR] * len(PLACES) for _ in MATCHES]
        self._right = [[PRIOR * share] * len(PLACES) for share in _RIGHT]

    def observe(self, matched: int, checked: int, right: int) -> None:
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

    `skip`: 1 if the guess begins with the token that the running pass draws, which is fed anyway.
    `fed`: tokens that the pass feeds again before the newest one. `redo`: after a wrong token, all
    tokens of the pass up to there are fed again with the next pass, as recurrent layers need it.
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
    """Return the cost of a pass by its tokens, from (tokens, cost) that begin with (1, 1.0)."""
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


# -- costs -----------------------------------------------------------------------------------------

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
    """Cost of passes over a few tokens, after as many cached positions.

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
        measured, live = self._measured(cached), self._live

        def cost(tokens: int) -> float:
            return max(1.0, measured(tokens) * live[_group(_GROUPS, tokens)]) if tokens > 1 else 1.0

        return cost

    def _measured(self, cached: int) -> PassCost:
        low, high, share = self._between(cached)
        first, second = self._curves[low], self._curves[high]
        return lambda tokens: first(tokens) + share * (second(tokens) - first(tokens))

    def seconds(self, cached: int) -> float:
        low, high, share = self._between(cached)
        measured = self._plain[low] + share * (self._plain[high] - self._plain[low])
        return measured * (self._single or 1.0)

    def observe(self, tokens: int, seconds: float, cached: int) -> float:
        """Correct the costs by a pass of a running reply; return its cost, at least 1."""
        if tokens == 1:
            self._observe_single(seconds, cached)
            return 1.0
        measured, group = self._measured(cached)(tokens), _group(_GROUPS, tokens)
        live, cost = corrected(self._live[group], measured, seconds / self.seconds(cached))
        if self._single is not None:
            self._live[group] = live
        return cost

    def excess(self, tokens: int, seconds: float, cached: int) -> float:
        """Return by how much a pass took longer than expected, at most `OUTLIER`."""
        over = seconds / self.seconds(cached) - self.at(cached)(tokens)
        return min(OUTLIER, max(0.0, over))

    def _observe_single(self, seconds: float, cached: int) -> None:
        before = 1.0 if self._single is None else self._single
        ratio = before * seconds / self.seconds(cached)
        if self._single is None or ratio < OUTLIER * before:
            weight = NEWEST if self._single is not None else 1.0
            self._single = before + weight * (ratio - before)

    def _between(self, cached: int) -> tuple[int, int, float]:
        """Return the indexes of the two curves around `cached`, and the weight of the second."""
        if len(self._at) == 1:
            return 0, 0, 0.0
        high = min(max(1, bisect_right(self._at, cached)), len(self._at) - 1)
        start, end = self._at[high - 1], self._at[high]
        return high - 1, high, min(1.0, max(0.0, (cached - start) / (end - start)))


def corrected(live: float, measured: float, cost: float) -> tuple[float, float]:
    """Return a correction, adapted to a pass that took `cost` instead of `live * measured`.

    Also returns that cost, at least 1. A pass that took `OUTLIER` times as long as expected
    corrects nothing, and its cost is limited to that: the machine did something else.
    """
    most = OUTLIER * live * measured
    if cost < most:
        live = min(MOST, max(LEAST, live + NEWEST * (cost / measured - live)))
    return live, max(1.0, min(cost, most))


def _scaled(points: Sequence[tuple[int, float]]) -> PassCost:
    plain = dict(points)[1]
    return cost_curve([(tokens, seconds / plain) for tokens, seconds in points])


FIRST = 1.0
"""Balance of a new reply, in passes of one token."""

SHARE = 0.02
"""What each token of a reply adds to the balance, in passes of one token."""


class Purse:
    """The time that one reply may still spend on guesses: `balance`.

    If the costs of passes are estimated correctly, a reply of n tokens takes the time of at most
    1.02 n + 1 passes of one token, however many guesses are wrong.
    """

    def __init__(self) -> None:
        self.balance = FIRST

    def affords(self, cost: float) -> bool:
        """Return whether the reply can pay for a pass of this cost if all of its guess is wrong."""
        return cost - 1.0 <= self.balance

    def note(self, cost: float, tokens: int) -> None:
        self.balance += tokens - cost + SHARE * tokens

    def pay(self, cost: float) -> None:
        """Account for time that gave no token, such as feeding a draft model."""
        self.balance -= cost


class ReplyGuesses:
    """Chooses the guesses of one reply; `saved` is what they brought, in passes of one token.

    `survival`: how long earlier guesses stayed right, which this reply adds to. `redo`: after a
    wrong token, the right ones before it must be fed again, as recurrent layers need it.
    """

    def __init__(
        self, history: History, survival: Survival, *, most: int = LONGEST, redo: bool = False
    ):
        self.history = history
        self.saved = 0.0
        self.purse = Purse()
        self._survival = survival
        self._most = most
        self._redo = redo
        self._watched = NO_GUESS
        self._right = 0

    def propose(self, cost: PassCost, most: int, *, ahead: bool = False, fed: int = 0) -> list[int]:
        """Return the tokens to check in the next pass, behind the newest one; empty if none pays.

        `ahead`: the newest token is not known yet, so that the guess begins with it; it is left out
        of the result. `fed`: number of tokens that the pass feeds again before the newest one.
        """
        count = min(self._most, most)
        if count < 1:
            return []
        guess = self.history.guess(LONGEST)
        self._watch(guess)
        tokens = guess.tokens[ahead:][:count]
        if not tokens:
            return []
        chances = self._survival.chances(guess.matched, ahead + len(tokens))
        length = best_length(chances, cost, skip=int(ahead), fed=fed, redo=self._redo)
        while length and not self.purse.affords(self._worst(cost, length, fed)):
            length //= 2
        return list(tokens[:length])

    def _worst(self, cost: PassCost, length: int, fed: int) -> float:
        spent = cost(1 + fed + length)
        if not self._redo:
            return spent
        return spent + max(cost(2 + fed + right) - 1.0 - right for right in range(length))

    def note_pass(self, cost: float, accepted: int) -> None:
        """Account for a pass of which `accepted` guessed tokens were right.

        `cost` includes tokens that it fed again. For a pass without a guess it is above 1 if it did
        so, or if its launch had to wait for the result of a guess.
        """
        self.purse.note(cost, 1 + accepted)
        self.saved += 1 + accepted - cost

    def say(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._compare(token)
        self.history.say(tokens)

    def _watch(self, guess: Guess) -> None:
        """Start to compare a guess with what the model draws, also one that no pass checks."""
        if not self._watched.tokens and guess.tokens:
            self._watched, self._right = guess, 0

    def _compare(self, token: int) -> None:
        watched = self._watched
        if not watched.tokens:
            return
        if token == watched.tokens[self._right]:
            self._right += 1
            if self._right < len(watched.tokens):
                return
        self._survival.observe(watched.matched, len(watched.tokens), self._right)
        self._watched = NO_GUESS
