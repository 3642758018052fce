"""Who proposes the tokens that a pass checks, and how many, so that a reply comes soonest.

A pass over 1 + k tokens costs c(1 + k), in passes of one token, and gives 1 + a tokens, where a is
the number of proposed tokens that the model draws too. That is estimated from how long earlier
proposals stayed right. Costs are measured when a model is loaded, and corrected by live passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from mlxcache.guess.history import NO_GUESS, Guess, History

PassCost = Callable[[int], float]
"""Cost of a pass over a number of tokens, in passes over one token."""

LONGEST = 31
"""Most tokens of a guess; with the token before it a pass has 32."""

MATCHES = (3, 4, 5, 6, 8, 11, 16, 24, 40, 64)
"""Least matched tokens of each group of guesses that are counted together."""

PLACES = (1, 2, 3, 5, 9, 17)
"""First place, in a guess, of each group of places that are counted together."""

KEPT, KEPT_OF_DRAFTS = 0.985, 0.95
"""Factors by which older counts lose weight with each new observation of their group."""

PRIOR = 4.0
"""Weight of the expectation before anything was observed, in observations."""

_RIGHT = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95)
"""Expected share of right tokens by group of `MATCHES`, before anything was observed."""

_RIGHT_OF_DRAFTS = (0.7,)


class Survival:
    """Decayed counts of how long guesses stay right, by `Guess.matched`. Holds no text."""

    def __init__(self, expected: Sequence[float] = _RIGHT, kept: float = KEPT) -> None:
        self._kept = kept
        self._tried = [[PRIOR] * len(PLACES) for _ in expected]
        self._right = [[PRIOR * share] * len(PLACES) for share in expected]

    @classmethod
    def of_drafts(cls) -> Survival:
        """Counts of a model's drafts, which have no match: its acceptance by depth."""
        return cls(_RIGHT_OF_DRAFTS, KEPT_OF_DRAFTS)

    def observe(self, matched: int, checked: int, right: int) -> None:
        tried, kept = self._counts(matched)
        ends = [*(start - 1 for start in PLACES[1:]), LONGEST]
        for group, (start, end) in enumerate(zip(PLACES, ends, strict=True)):
            good = max(0, min(end, right) - start + 1)
            seen = good + (start <= right + 1 <= end and right < checked)
            if seen:
                fade = self._kept**seen
                tried[group] = fade * tried[group] + seen
                kept[group] = fade * kept[group] + good
            if right < end:
                break

    def chances(self, matched: int, count: int) -> list[float]:
        tried, kept = self._counts(matched)
        found, chance, group = list[float](), 1.0, 0
        for place in range(1, count + 1):
            if group + 1 < len(PLACES) and place >= PLACES[group + 1]:
                group += 1
            chance *= kept[group] / tried[group]
            found.append(chance)
        return found

    def _counts(self, matched: int) -> tuple[list[float], list[float]]:
        row = min(_group(MATCHES, matched), len(self._tried) - 1)
        return self._tried[row], self._right[row]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a proposer can propose for the next pass, of which nothing is computed yet.

    `chances`: for each token, that it and all before it are right. `cost`: of a pass by its tokens,
    with what making its draft takes. `before`: what must be computed first, whatever is proposed.
    `skip`: 1 if the first token is the one that the running pass draws, which is fed anyway.
    `unseen`: how often the proposals are right is only learned by checking some.
    """

    chances: Sequence[float]
    cost: PassCost
    before: float = 0.0
    skip: int = 0
    unseen: bool = False

    @property
    def most(self) -> int:
        return len(self.chances) - self.skip


def best_length(offer: Offer, *, fed: int = 0, redo: bool = False) -> tuple[int, float]:
    """Return how many tokens of an offer to check, 0 if none pays, and tokens by cost then.

    `fed`: tokens that the pass feeds again before the newest one. `redo`: after a wrong token, all
    tokens of the pass up to there are fed again with the next pass.
    """
    chances, cost, skip = offer.chances, offer.cost, offer.skip
    best, length, tokens, again = 1.0 / cost(1 + fed), 0, 1.0, 0.0
    before = chances[skip - 1] if skip and chances else 1.0
    if redo:  # the token that the running pass draws is another than the guess begins with
        again = (1.0 - before) * (cost(2 + fed) - 1.0)
    for count, chance in enumerate(chances[skip:], 1):
        tokens += chance
        if redo:  # the guess ends right before this token
            again += (before - chance) * (cost(1 + fed + count) - 1.0)
            before = chance
        rate = tokens / (cost(1 + fed + count) + again)
        if rate > best:
            best, length = rate, count
    return length, best


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

ANY = range(1 << 30)
"""All numbers of tokens."""

NEWEST = 0.2
"""Weight of a live pass in the correction of passes of about its length."""

OUTLIER = 4.0
"""Ratio of the time of a live pass to the expected one, above which it corrects nothing."""

LEAST, MOST = 0.5, 2.0
"""Bounds of the correction, a factor of measured costs."""

_GROUPS = (1, 2, 4, 8, 12, 16, 24)

Curves = Mapping[int, Sequence[tuple[int, float]]]
"""Measured seconds, as (tokens of a pass, seconds), by the number of cached positions."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes over a few tokens, as measured on a model.

    `equal`: numbers of tokens whose pass gives the bits that passes over one token each give.
    """

    curves: Curves
    equal: Sequence[int] = ()


class PassCosts:
    """Cost of passes over a few tokens, after as many cached positions.

    `curves`: measured passes, as (tokens, seconds), by the number of cached positions before them.
    Between two such numbers the cost is interpolated; below and above them, the cost at the nearest
    one holds. Passes of running replies correct the cost of passes over about as many tokens.
    `lengths`: numbers of tokens that a pass may have beside one; the cost of others is infinite.
    """

    def __init__(self, curves: Curves, lengths: Container[int] = ANY):
        self._lengths = lengths
        self._at = sorted(curves)
        self._curves = [_scaled(curves[at]) for at in self._at]
        self._plain = [dict(curves[at])[1] for at in self._at]
        self._live = [1.0] * len(_GROUPS)
        self._single: float | None = None

    def at(self, cached: int) -> PassCost:
        measured, live = self._measured(cached), self._live

        def cost(tokens: int) -> float:
            if tokens <= 1:
                return 1.0
            if tokens not in self._lengths:
                return inf
            return max(1.0, measured(tokens) * live[_group(_GROUPS, tokens)])

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


class DraftCosts(PassCosts):
    """Costs of passes whose proposed tokens a draft model makes, one in each pass of its own."""

    def __init__(self, target: Curves, draft: Curves, lengths: Container[int] = ANY):
        self._draft = draft_costs = PassCosts(draft)
        super().__init__(
            {
                at: [(n, seconds + (n - 1) * draft_costs.seconds(at)) for n, seconds in points]
                for at, points in target.items()
            },
            lengths,
        )

    def catch_up(self, tokens: int, cached: int) -> float:
        """Return the cost of feeding the draft model `tokens` tokens that it has not seen."""
        share = self._draft.seconds(cached) / self.seconds(cached)
        return share * self._draft.at(cached)(tokens) if tokens else 0.0


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


TRIES, TRIES_SHARE = 2.0, 0.004
"""Passes of one token that may be lost to see whether a draft pays again: at first, and more for
each token decoded."""


class Tries:
    """What drafts that are not expected to pay may still cost, for all replies of a model."""

    def __init__(self) -> None:
        self._balance = TRIES

    def affords(self, cost: float) -> bool:
        return cost - 1.0 <= self._balance

    def note_token(self) -> None:
        self._balance = min(TRIES, self._balance + TRIES_SHARE)

    def note_try(self, cost: float) -> None:
        """Account for a try; `cost` is less the number of drafted tokens that were accepted."""
        self._balance -= max(0.0, cost - 1.0)


class ReplyRule:
    """Chooses, for each pass of one reply, whose tokens it checks and how many.

    `saved`: what they brought, in passes of one token. `redo`: see `best_length`.
    """

    def __init__(self, tries: Tries, *, redo: bool = False):
        self.saved = 0.0
        self.purse = Purse()
        self._tries = tries
        self._redo = redo
        self._trying = False

    def choose(self, offers: Sequence[Offer], fed: int = 0) -> tuple[int, int]:
        """Return the index of an offer and the number of its tokens to check, 0 if none pays.

        `fed`: number of tokens that the pass feeds again before the newest one.
        """
        chosen, length, best = 0, 0, 0.0
        for index, offer in enumerate(offers):
            count, rate = best_length(offer, fed=fed, redo=self._redo)
            if count and rate > best:
                chosen, length, best = index, count, rate
        tried = False
        for index, offer in enumerate(offers):
            affordable = self._tries.affords(offer.before + offer.cost(2 + fed))
            if not length and offer.unseen and offer.most and affordable:
                chosen, length, tried = index, 1, True
        self._trying = tried or (self._trying and not length)
        while length and not self.purse.affords(self._worst(offers[chosen], length, fed)):
            length //= 2
        if length:
            self.pay(offers[chosen].before)
        return chosen, length

    def _worst(self, offer: Offer, length: int, fed: int) -> float:
        cost = offer.cost
        spent = offer.before + cost(1 + fed + length)
        if not self._redo:
            return spent
        return spent + max(cost(2 + fed + right) - 1.0 - right for right in range(length))

    def note_pass(self, cost: float, accepted: int, *, plain: bool = False) -> None:
        """Account for a pass of which `accepted` proposed tokens were right.

        `cost` includes tokens that it fed again. Without a proposal it is above 1 if the pass did
        so, or if its launch had to wait for the result of one. `plain`: it did neither.
        """
        self.purse.note(cost, 1 + accepted)
        self.saved += 1 + accepted - cost
        if plain:
            self._trying = False
            self._tries.note_token()
        elif self._trying:
            self._tries.note_try(cost - accepted)

    def pay(self, cost: float) -> None:
        """Account for time that gave no token, such as feeding a draft model."""
        self.purse.pay(cost)
        self.saved -= cost


class Repeats:
    """What a reply may repeat of its conversation, and how often that was right.

    `survival`: how long earlier guesses stayed right, which this reply adds to.
    """

    def __init__(self, history: History, survival: Survival, *, most: int = LONGEST):
        self.history = history
        self.tokens: Sequence[int] = ()
        self._survival = survival
        self._most = most
        self._watched = NO_GUESS
        self._right = 0

    def offer(self, cost: PassCost, most: int, *, ahead: bool = False) -> Offer:
        """Offer `tokens`, at most `most`, to follow the newest one.

        `ahead`: the newest token is not known yet, so that the guess begins with it; it is left out
        of `tokens`.
        """
        self.tokens, count = (), min(self._most, most)
        if count < 1:
            return Offer((), cost)
        guess = self.history.guess(LONGEST)
        self._watch(guess)
        self.tokens = guess.tokens[ahead:][:count]
        if not self.tokens:
            return Offer((), cost)
        chances = self._survival.chances(guess.matched, ahead + len(self.tokens))
        return Offer(chances, cost, skip=int(ahead))

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
