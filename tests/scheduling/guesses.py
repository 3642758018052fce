"""Guesses made on purpose: right by what is known to come, and wrong as often as is wanted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.guess.rule import LENGTHS, DraftCosts, Offer, PassCosts, Passes
from mlxcache.scheduling.proposer import Draws
from mlxcache.scheduling.speculation import Conversations, HistoryProposer, Source, Speculation
from mlxcache.scheduling.task import Task
from mlxcache.tree.budget import Budget
from tests.scheduled import Bench

CHEAP_CURVES = {0: [(n, 1e-3 * (1 + 0.01 * n)) for n in LENGTHS]}
CHEAP = PassCosts(CHEAP_CURVES)
"""Costs at which every guess pays."""


def use_cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines with a draft model draft always, whatever that costs on this machine."""

    def measured(model: Callable[..., Any], *_: Any) -> Passes:
        share = 0.1 if getattr(model, "__name__", "") == "propose" else 1.0
        return Passes(
            {at: [(n, share * s) for n, s in points] for at, points in CHEAP_CURVES.items()}
        )

    monkeypatch.setattr("mlxcache.engine.runtime.measure_passes", measured)
    monkeypatch.setattr(DraftCosts, "observe", lambda self, tokens, _, cached: 1.0)
    monkeypatch.setattr(DraftCosts, "excess", lambda self, tokens, seconds, cached: 0.0)


class Foretold(Conversations):
    """Guesses of tokens that are known to come, of which every other guess has a wrong one.

    `truth`: replies by their number of prompt tokens. `wrong`: share of guesses with a wrong token.
    """

    def __init__(self, truth: dict[int, Sequence[int]], *, wrong: float = 0.5, seed: int = 1):
        super().__init__()
        self.truth, self.wrong = truth, wrong
        self.rng = random.Random(seed)
        self.proposed: list[int] = []

    def foretell(self, prompt_tokens: int, reply: Sequence[int]) -> None:
        """Guess `reply` after prompts of that many tokens."""
        self.truth[prompt_tokens] = reply

    @property
    def alone(self) -> Speculation:
        return Speculation(CHEAP, [self])

    def begin(self, task: Task, costs: PassCosts) -> HistoryProposer:
        return _Foreteller(self, task, costs)


class _Foreteller(HistoryProposer):
    def __init__(self, foretold: Foretold, task: Task, costs: PassCosts):
        super().__init__(foretold, task, costs)
        self.foretold = foretold
        self._guess: Sequence[int] = ()

    def offer(self, most: int, ready: Sequence[int]) -> Offer:
        super().offer(0, ready)
        self._guess = self._foretell(most, ready) if self.task.out else ()
        # checked whatever earlier ones have cost
        return Offer([1.0] * len(self._guess), lambda tokens: 1.0, before=-1e3)

    def draft(self, count: int, newest: mx.array, state: Draws) -> tuple[mx.array, Sequence[Draws]]:
        return mx.array(list(self._guess[:count]), mx.uint32), ()

    def _foretell(self, most: int, ready: Sequence[int]) -> Sequence[int]:
        foretold, task = self.foretold, self.task
        rng = foretold.rng
        if most < 1 or rng.random() < 0.15:
            return []
        at = len(task.out) + (len(ready) or 1)
        count = rng.randrange(1, 32)
        guess = list(foretold.truth.get(task.prompt_tokens, ())[at : at + min(count, most)])
        if guess and rng.random() < foretold.wrong:
            place = rng.randrange(len(guess))
            guess[place] = (guess[place] + 1 + rng.randrange(50)) % 400
        foretold.proposed.append(len(guess))
        return guess


def speculating(
    path: Path | Bench, *sources: Source, costs: PassCosts = CHEAP, **options: Any
) -> Bench:
    """A bench whose replies check what `sources` propose."""
    bench = path if isinstance(path, Bench) else Bench(path, **options)
    bench = bench.twin()
    speculation = Speculation(costs, sources)
    bench.use(KVCache.open(bench.kv.layout, Budget(1 << 30)), speculation=speculation)
    return bench
