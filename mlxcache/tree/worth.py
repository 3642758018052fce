"""What it would cost to lose a segment: how often it was asked for, seconds to compute, bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

CHECKPOINT_TOKENS = 1024
"""Tokens before a checkpoint from which on it is worth the bytes that it takes."""

MOST_USES = 7
"""Uses beyond which more do not count: who comes next has them before long."""

KEPT_MORE = 1.0
"""What a client's wish to keep a prefix adds, within its time: as much as twice the uses."""

PLACE = 0.4
"""What twice the time to compute by the byte adds, or half of it takes; more does not count."""


@dataclass(slots=True)
class Usage:
    """How one segment has been used. Only the tree writes to it.

    `clock`: that of the order of eviction at the last use. `count`: requests that found it; a new
    segment of a conversation begins with the conversation's. `reach`: the position up to which any
    found it. `replaced`: nobody came back to it, and a later
    request of the same conversation went another way. `keeps`: (position, seconds) up to where, and
    for how long after a use, clients wish it kept. `seen`: seconds, at the last use.
    """

    clock: float = 0.0
    count: int = 0
    reach: int = 0
    replaced: bool = False
    keeps: tuple[tuple[int, float], ...] = ()
    seen: float = 0.0

    def copy(self) -> Usage:
        """The same for the other part of a segment that is divided."""
        return replace(self)

    def absorb(self, other: Usage) -> None:
        """Stand for a neighbour's tokens too."""
        self.clock = max(self.clock, other.clock)
        self.count = max(self.count, other.count)
        self.reach = max(self.reach, other.reach)
        self.seen = max(self.seen, other.seen)
        self.replaced = self.replaced and other.replaced
        self.keep(other.keeps)

    def keep(self, wishes: tuple[tuple[int, float], ...]) -> None:
        """Add wishes; of those for as long the one that reaches further stands."""
        if wishes and wishes != self.keeps:
            furthest: dict[float, int] = {}
            for position, seconds in (*self.keeps, *wishes):
                furthest[seconds] = max(position, furthest.get(seconds, 0))
            self.keeps = tuple((position, seconds) for seconds, position in furthest.items())

    def until(self, position: int) -> float:
        """The time up to which the tokens before `position` are wished kept; 0 if nobody does."""
        longest = max((long for at, long in self.keeps if at >= position), default=None)
        return 0.0 if longest is None else self.seen + longest


@dataclass(slots=True)
class Worth:
    """The worth of a segment: GreedyDual-Size-Frequency's frequency x cost / size, as a logarithm.

    So a hundred uses of yesterday do not stand for a hundred turns of today. Cost / size counts in
    doublings, one at most, and one use weighs more than any: whoever was found again outlasts who
    never was, at the same clock, and of those who are worth about the same the oldest goes first.
    `growth`: by which share a token takes longer to compute for each one before it, as measured.
    """

    bytes_per_token: int
    checkpoint_bytes: int = 0
    growth: float = 0.0

    def of(self, uses: int, tokens: int, end: int, nbytes: int, *, kept: bool = False) -> float:
        """That of `tokens` tokens up to position `end`, which take `nbytes` in all."""
        frequency = 1.0 + log2(1 + min(uses, MOST_USES))
        return frequency + KEPT_MORE * kept + PLACE * self.place(tokens, end, nbytes)

    def place(self, tokens: int, end: int, nbytes: int) -> int:
        """Whether computing them again takes, by the byte that they free, about as long as that of
        this model's first tokens does (0), at least twice as long (1), or at most half (-1)."""
        usual = self.bytes_per_token + self.checkpoint_bytes / CHECKPOINT_TOKENS
        if nbytes <= 0 or usual <= 0 or tokens <= 0:
            return 0
        dear = tokens * (1.0 + self.growth * end) * usual / nbytes
        return max(-1, min(1, int(log2(dear))))
