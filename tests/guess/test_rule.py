"""As many tokens are checked as pay for themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxcache.guess.history import History
from mlxcache.guess.rule import (
    LENGTHS,
    LONGEST,
    OUTLIER,
    Offer,
    PassCost,
    PassCosts,
    Repeats,
    ReplyRule,
    Survival,
    Tries,
    best_length,
    cost_curve,
)


def flat(tokens: int) -> float:
    return 1.0 if tokens == 1 else 1.5


def steep(tokens: int) -> float:
    return 1.0 + 0.6 * (tokens - 1)


def best(chances: Sequence[float], cost: PassCost, *, skip: int = 0, redo: bool = False) -> int:
    return best_length(Offer(chances, cost, skip=skip), redo=redo)[0]


def test_a_flat_cost_is_worth_a_long_guess_and_a_steep_one_a_short_guess() -> None:
    sure, doubtful = [0.97**n for n in range(1, 32)], [0.5**n for n in range(1, 32)]
    assert best(sure, flat) == 31
    assert best(doubtful, flat) > 4
    assert best(doubtful, steep) == 0
    assert 0 < best(sure, steep) < 20
    assert best([0.0] * 31, flat) == 0


def test_a_token_that_is_fed_anyway_and_tokens_fed_again_make_guesses_worth_less() -> None:
    """The first token of a guess brings nothing if the running pass draws it."""
    chances = [0.8**n for n in range(1, 32)]
    assert best(chances, steep, skip=1) <= best(chances, steep)
    assert best(chances, steep, redo=True) <= best(chances, steep)


def test_what_guesses_were_worth_is_learned_by_the_length_of_their_match() -> None:
    survival = Survival()
    before = survival.chances(5, 8)
    for _ in range(300):
        survival.observe(5, 31, 0)
        survival.observe(40, 31, 31)
    assert survival.chances(5, 1)[0] < 0.05 < before[0]
    assert survival.chances(40, 31)[-1] > 0.9
    assert survival.chances(3, 1) == Survival().chances(3, 1)
    for _ in range(300):
        survival.observe(5, 31, 31)
    assert survival.chances(5, 31)[-1] > 0.8


def test_an_end_is_no_wrong_token() -> None:
    """A guess that was right as far as it was checked counts for nothing beyond."""
    survival = Survival()
    for _ in range(100):
        survival.observe(10, 2, 2)
    assert survival.chances(10, 2)[-1] > 0.95
    assert survival.chances(10, 3)[2] < survival.chances(10, 2)[-1]


def test_costs_are_interpolated_and_corrected_by_live_passes() -> None:
    """Between lengths and contexts; an interrupted pass corrects nothing."""
    costs = PassCosts(
        {0: [(n, 0.01 * flat(n)) for n in LENGTHS], 4000: [(n, 0.02 * steep(n)) for n in LENGTHS]}
    )
    assert costs.at(0)(5) == pytest.approx(1.5)
    assert costs.at(4000)(5) == pytest.approx(steep(5))
    assert costs.at(2000)(5) == pytest.approx((1.5 + steep(5)) / 2)
    assert costs.seconds(2000) == pytest.approx(0.015)
    assert cost_curve([(1, 1.0), (3, 2.0)])(4) == pytest.approx(2.5)
    for _ in range(40):
        costs.observe(1, 0.02, 0)
        assert costs.observe(5, 0.036, 0) <= 1.8 * 2
    assert costs.at(0)(5) == pytest.approx(1.8, rel=0.02)
    assert costs.observe(5, 9.0, 0) == pytest.approx(4 * 1.8, rel=0.02)
    assert costs.at(0)(5) == pytest.approx(1.8, rel=0.02)


def test_a_pass_that_waited_for_a_guess_costs_more_and_corrects_nothing() -> None:
    """It was launched only when the guess had been checked."""
    costs = PassCosts({0: [(1, 0.1), (2, 0.15), (4, 0.2)]})
    assert costs.excess(1, 0.13, 0) == pytest.approx(0.3)
    assert costs.excess(2, 0.2, 0) == pytest.approx(0.5)
    assert costs.excess(1, 0.05, 0) == 0
    assert costs.excess(1, 100.0, 0) == OUTLIER
    assert costs.seconds(0) == 0.1


def test_a_reply_learns_of_guesses_that_were_not_checked() -> None:
    """So that guesses begin as soon as they would be right."""
    survival, history = Survival(), History()
    for _ in range(60):
        survival.observe(3, 31, 0)
    guesses, rule = Repeats(history, survival), ReplyRule(Tries())
    said, proposed = [1, 2, 3, 4, 5, 6, 7] * 12, 0
    for token in said:
        proposed += rule.choose([guesses.offer(steep, LONGEST)])[1]
        guesses.say([token])
    assert proposed
    assert survival.chances(64, 1)[0] > 0.9
