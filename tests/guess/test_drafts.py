"""A draft model proposes as many tokens as pay, and never makes a reply much slower."""

from __future__ import annotations

import numpy as np
import pytest

from mlxcache.guess.rule import (
    LENGTHS,
    DraftCosts,
    Offer,
    ReplyRule,
    Survival,
    Tries,
    best_length,
)


class Drafts:
    """A draft model: its costs, how often it was right, and what it may still lose by tries."""

    def __init__(self, costs: DraftCosts):
        self.costs = costs
        self.survival = Survival.of_drafts()
        self.tries = Tries()

    def offer(self, most: int, unseen: int = 0) -> Offer:
        before = self.costs.catch_up(unseen, 0)
        return Offer(self.survival.chances(0, most), self.costs.at(0), before, unseen=True)


def costs(slope: float, share: float) -> DraftCosts:
    """A model whose pass costs `slope` more a token, and a draft of a `share` of its time."""
    target = {0: [(n, 0.1 * (1 + slope * (n - 1))) for n in LENGTHS]}
    draft = {0: [(n, 0.1 * share * (1 + 0.05 * (n - 1))) for n in LENGTHS]}
    return DraftCosts(target, draft)


def play(
    drafts: Drafts, tokens: int, right: float, rng: np.random.Generator, wrong_by: float = 1.0
) -> tuple[float, int]:
    """A reply whose drafts are right with a chance; returns its cost, and its drafted tokens.

    `wrong_by`: real costs of rounds by those that were measured.
    """
    reply, said, total, drafted, unseen = ReplyRule(drafts.tries), 0, 0.0, 0, 0
    costs = drafts.costs
    fixed = [costs.at(0)(1 + count) for count in range(16)]
    while said < tokens:
        _, count = reply.choose([drafts.offer(min(7, tokens - said - 1), unseen)])
        good = 0
        while good < count and rng.random() < right:
            good += 1
        before = costs.catch_up(unseen, 0) if count else 0.0
        spent = max(1.0, wrong_by * fixed[count]) if count else 1.0
        unseen = 0 if count else unseen + 1
        reply.note_pass(costs.observe(1 + count, 0.1 * spent, 0), good, plain=not count)
        if count:
            drafts.survival.observe(0, count, good)
        total += before + spent
        said, drafted = said + 1 + good, drafted + count
    return total, drafted


@pytest.mark.parametrize(
    ("slope", "share", "right", "least"),
    [
        (0.05, 0.05, 0.9, 2.2),  # a large dense model
        (0.05, 0.3, 0.8, 1.3),
        (0.75, 0.1, 0.8, 0.97),  # latents (MLA): a pass over several tokens is dear
        (0.05, 1.0, 0.95, 0.97),  # a draft as large as the model
        (0.05, 0.05, 0.05, 0.97),  # a draft that is hardly ever right
    ],
)
def test_drafts_pay_or_stop(slope: float, share: float, right: float, least: float) -> None:
    rule, rng = Drafts(costs(slope, share)), np.random.default_rng(1)
    total = sum(play(rule, 300, right, rng)[0] for _ in range(30))
    assert 30 * 300 / total >= least


@pytest.mark.parametrize("seed", range(60))
def test_no_reply_is_much_slower(seed: int) -> None:
    """Whatever it costs and however often it is right; less so if costs were measured wrong."""
    rng = np.random.default_rng(seed)
    off = float(rng.choice([1.0, 0.7, 1.3]))
    rule = Drafts(costs(float(rng.uniform(0, 1)), float(rng.uniform(0.02, 1.2))))
    for _ in range(6):
        tokens = int(rng.integers(100, 400))
        total, _ = play(rule, tokens, float(rng.uniform(0, 1)), rng, off)
        assert tokens / total >= (0.97 if off <= 1 else 0.9)


def test_a_draft_that_improves_is_used_again() -> None:
    rule, rng = Drafts(costs(0.05, 0.1)), np.random.default_rng(2)
    paused = [play(rule, 400, 0.0, rng)[1] for _ in range(3)][-1]
    again = [play(rule, 400, 0.95, rng)[1] for _ in range(3)][-1]
    assert paused < 60
    assert again > 150


def test_the_longest_draft_is_not_always_the_best() -> None:
    counts = []
    for slope, share, right in ((0.02, 0.02, 0.95), (0.1, 0.1, 0.8), (0.4, 0.2, 0.5)):
        rule = Drafts(costs(slope, share))
        for _ in range(50):
            rule.survival.observe(0, 10, int(10 * right) if right < 0.9 else 10)
        counts.append(best_length(rule.offer(15))[0])
    assert counts[0] == 15
    assert counts[0] > counts[1] > counts[2]


def test_live_rounds_correct_what_was_measured() -> None:
    """But not one that something else held up."""
    held = costs(0.1, 0.1)
    before = held.at(0)(4)
    for _ in range(40):
        held.observe(1, 0.1, 0)
        held.observe(4, 0.1 * before * 1.5, 0)
    assert held.at(0)(4) == pytest.approx(1.5 * before, rel=0.05)
    now = held.at(0)(4)
    assert held.observe(4, 100.0, 0) < 5 * now
    assert held.at(0)(4) == now
