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
from mlxcache.scheduling.guessing import GuessingDecoder
from mlxcache.scheduling.speculation import Speculation
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


class Foretold(Speculation):
    """Guesses of tokens that are known to come, of which every other guess has a wrong one.

    `truth`: replies by their number of prompt tokens. `wrong`: share of guesses with a wrong token.
    """

    def __init__(self, truth: dict[int, Sequence[int]], *, wrong: float = 0.5, seed: int = 1):
        super().__init__(CHEAP)
        self._truth, self._wrong = truth, wrong
        self._rng = random.Random(seed)
        self.proposed: list[int] = []

    def foretell(self, prompt_tokens: int, reply: Sequence[int]) -> None:
        """Guess `reply` after prompts of that many tokens."""
        self._truth[prompt_tokens] = reply

    def propose(self, task: Task, decoder: GuessingDecoder, most: int) -> list[int]:
        output = task.output
        assert output is not None
        super().propose(task, decoder, 0)
        running = self._running.get(task)
        if running is None or running.stopped or most < 1 or output.may_steer(96):
            return []
        if self._rng.random() < 0.15:
            return []
        ready = decoder.ready
        at = len(task.out) + (len(ready) or 1)
        count = self._rng.randrange(1, 32)
        guess = list(self._truth.get(task.prompt_tokens, ())[at : at + min(count, most)])
        if guess and self._rng.random() < self._wrong:
            place = self._rng.randrange(len(guess))
            guess[place] = (guess[place] + 1 + self._rng.randrange(50)) % 400
        self.proposed.append(len(guess))
        return guess


def speculating(path: Path | Bench, speculation: Speculation, **options: Any) -> Bench:
    """A bench whose replies check the guesses of `speculation`."""
    bench = path if isinstance(path, Bench) else Bench(path, **options)
    bench = bench.twin()
    bench.use(KVCache.open(bench.kv.layout, Budget(1 << 30)), speculation=speculation)
    return bench
