"""Guesses never make a reply of 100 tokens slower than 0.97 times, whatever they are worth."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxcache.guess.history import Guess, History
from mlxcache.guess.rule import (
    LENGTHS,
    LONGEST,
    PassCosts,
    Purse,
    Repeats,
    ReplyRule,
    Survival,
    Tries,
    cost_curve,
)

TOKENS = 160


class Anything(History):
    """A history that guesses at random, with matches of any length."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self._rng = rng

    def guess(self, count: int) -> Guess:
        length = self._rng.randrange(1, count + 1)
        return Guess(tuple(range(length)), self._rng.choice((3, 5, 9, 20, 64)))


@st.composite
def curves(draw: st.DrawFn) -> list[float]:
    """Seconds of passes of 1 to 32 tokens: anything that never falls, with jumps and plateaus."""
    steps = draw(
        st.lists(st.sampled_from((0.0, 0.0, 0.05, 0.24, 0.75, 3.0)), min_size=31, max_size=31)
    )
    found = [1.0]
    for more in steps:
        found.append(found[-1] + more)
    return found


def slowest(
    believed: list[float], off: list[float], seed: int, chance: float, *, redo: bool
) -> float:
    """Play a reply whose passes take `off` times as long as measured; its worst speed from 100 on.

    Each guessed token is right with `chance`, which changes on the way.
    """
    rng = random.Random(seed)
    scale = rng.uniform(0.001, 0.1)
    costs = PassCosts({0: [(n, scale * believed[n - 1]) for n in LENGTHS]})
    read = cost_curve([(n, believed[n - 1]) for n in LENGTHS])
    guesses, rule = Repeats(Anything(rng), Survival()), ReplyRule(Tries(), redo=redo)
    costs.observe(1, scale, 0)
    spent, said, again, drawn, worst = 0.0, 0, 0, False, 9.0
    while said < TOKENS:
        if rng.random() < 0.02:
            chance = rng.random()
        offer = guesses.offer(costs.at(0), LONGEST - again, ahead=not drawn)
        guess = guesses.tokens[: rule.choose([offer], again)[1]]
        right = 0
        while right < len(guess) and rng.random() < chance:
            right += 1
        size = 1 + again + len(guess)
        took = read(size) * (off[size - 1] if size <= len(off) else off[-1])
        spent += took
        rule.note_pass(costs.observe(size, scale * took, 0), right, plain=size == 1)
        said += 1 + right
        again = again + right + 1 if redo and right < len(guess) else 0
        drawn = bool(guess)
        guesses.say([rng.randrange(40) for _ in range(1 + right)])
        if said >= 100:
            worst = min(worst, said / spent)
    return worst


seeds, chances = st.integers(0, 1 << 30), st.floats(0, 1)


@settings(deadline=None, max_examples=40)
@given(curves(), seeds, chances, st.booleans())
@example(believed=[1.0, *[1.24] * 31], seed=3712, chance=0.0, redo=True)
def test_a_reply_is_never_slower_where_the_costs_are_right(believed, seed, chance, redo):
    """From 100 tokens on it has at least 0.97 of the speed without guesses."""
    assert slowest(believed, [1.0], seed, chance, redo=redo) >= 0.97


@settings(deadline=None, max_examples=40)
@given(
    curves(),
    st.lists(st.floats(0.7, 1.3), min_size=31, max_size=31),
    seeds,
    chances,
    st.booleans(),
)
def test_costs_that_are_off_by_a_third_are_corrected(believed, off, seed, chance, redo):
    assert slowest(believed, [1.0, *off], seed, chance, redo=redo) >= 0.9


def test_without_a_purse_a_reply_would_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule alone is wrong about a reply that repeats nothing after others that did."""
    believed = [1.0 + 0.1 * n for n in range(32)]
    assert slowest(believed, [1.0], 3, 0.0, redo=False) >= 0.97
    monkeypatch.setattr(Purse, "affords", lambda *_: True)
    assert slowest(believed, [1.0], 3, 0.0, redo=False) < 0.97
