"""Guesses made on purpose: right by what is known to come, and wrong as often as is wanted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.guess.drafts import DraftCosts
from mlxcache.guess.rule import LENGTHS, Curves, PassCosts
from mlxcache.scheduling.speculation import Conversations, HistoryProposer, Speculation
from mlxcache.scheduling.task import Task
from mlxcache.tree.budget import Budget
from tests.scheduled import Bench

CHEAP_CURVES = {0: [(n, 1e-3 * (1 + 0.01 * n)) for n in LENGTHS]}
CHEAP = PassCosts(CHEAP_CURVES)
"""Costs at which every guess pays."""


def use_cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines with a draft model draft always, whatever that costs on this machine."""

    def measured(model: Callable[..., Any], *_: Any) -> Curves:
        share = 0.1 if model.__name__ == "propose" else 1.0
        return {at: [(n, share * s) for n, s in points] for at, points in CHEAP_CURVES.items()}

    monkeypatch.setattr("mlxcache.engine.runtime.measure_passes", measured)
    monkeypatch.setattr(DraftCosts, "observe", lambda self, drafts, _, cached: 1.0)
    monkeypatch.setattr(DraftCosts, "excess", lambda self, seconds, cached: 0.0)


class Foretold(Conversations):
    """Guesses of tokens that are known to come, of which every other guess has a wrong one.

    `truth`: replies by their number of prompt tokens. `wrong`: share of guesses with a wrong token.
    """

    def __init__(self, truth: dict[int, Sequence[int]], *, wrong: float = 0.5, seed: int = 1):
        super().__init__(CHEAP)
        self.truth, self.wrong = truth, wrong
        self.rng = random.Random(seed)
        self.proposed: list[int] = []

    def foretell(self, prompt_tokens: int, reply: Sequence[int]) -> None:
        """Guess `reply` after prompts of that many tokens."""
        self.truth[prompt_tokens] = reply

    def begin(self, task: Task) -> HistoryProposer:
        return _Foreteller(self, task)


class _Foreteller(HistoryProposer):
    def __init__(self, foretold: Foretold, task: Task):
        super().__init__(foretold, task)
        self.foretold = foretold

    def guess(self, most: int, ready: Sequence[int], again: int) -> Sequence[int]:
        super().guess(0, ready, again)
        foretold, task = self.foretold, self.task
        rng = foretold.rng
        if self.stopped or most < 1 or task.may_steer(96) or rng.random() < 0.15:
            return []
        at = len(task.out) + (len(ready) or 1)
        count = rng.randrange(1, 32)
        guess = list(foretold.truth.get(task.prompt_tokens, ())[at : at + min(count, most)])
        if guess and rng.random() < foretold.wrong:
            place = rng.randrange(len(guess))
            guess[place] = (guess[place] + 1 + rng.randrange(50)) % 400
        foretold.proposed.append(len(guess))
        return guess


def speculating(path: Path | Bench, speculation: Speculation, **options: Any) -> Bench:
    """A bench whose replies check the guesses of `speculation`."""
    bench = path if isinstance(path, Bench) else Bench(path, **options)
    bench = bench.twin()
    bench.use(KVCache.open(bench.kv.layout, Budget(1 << 30)), speculation=speculation)
    return bench
