"""Speed of replies with a draft model that does not pay, by the wall clock.

`python -m tests.proofs.draft_wall` writes the same replies with a draft model and without, in turn.
The draft models have other random weights than their models and are hardly ever right, so drafting
must pause, and replies must have the speed that they have without a draft model.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from mlxcache.cache.kv_cache import KVCache
from mlxcache.guess.rule import DraftCosts
from mlxcache.model.pair import Pair
from mlxcache.scheduling.short_passes import measure_passes
from mlxcache.tree.budget import Budget
from tests.proofs.speculation_wall import timed
from tests.scheduled import Bench, drafting
from tests.toys.toy import make_toy

FAMILIES = ("llama", "gemma3", "deepseek_v3")
LEAST = 0.97
"""Least speed with a draft model, by that without."""

PAIRS, PROMPT = 5, 300
ROOM = 1 << 26


def ruled(pair: Bench) -> Bench:
    """A twin of `pair` whose drafts are chosen by the costs that this machine has now."""
    model, layout, fresh = pair.model, pair.kv.layout, pair.twin()
    assert isinstance(model, Pair)
    costs = DraftCosts(
        *(measure_passes(part, layout, ROOM).curves for part in (model.verify, model.propose))
    )
    fresh.use(KVCache.open(layout, Budget(1 << 30)), speculation=drafting(model, costs))
    return fresh


def compare(plain: Bench, pair: Bench, *, pairs: int, tokens: int) -> float:
    """Return the median of the speeds with a draft by those without.

    Raises AssertionError if a reply differs.
    """
    fast, slow = ruled(pair), plain.twin()
    rng, ratios = np.random.default_rng(1), list[float]()
    for number in range(pairs + 1):
        ids = [int(t) for t in rng.integers(10, 400, PROMPT)]
        order = (slow, fast) if number % 2 else (fast, slow)
        found = {id(bench): timed(bench, ids, tokens) for bench in order}
        assert found[id(slow)][1].out == found[id(fast)][1].out
        if number:  # the first one compiles
            ratios.append(found[id(slow)][0] / found[id(fast)][0])
    return median(ratios)


def main(
    out: Callable[[str], object] = print,
    *,
    hidden: int = 384,
    pairs: int = PAIRS,
    tokens: int = 300,
    families: Sequence[str] = FAMILIES,
) -> int:
    slower = 0
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"hidden": hidden, "intermediate": 4 * hidden}
            model = make_toy(Path(folder) / "model", family, **sizes)  # type: ignore[arg-type]
            draft = make_toy(Path(folder) / "draft", family, seed=5, layers=2)
            speed = compare(Bench(model), Bench(model, draft=draft), pairs=pairs, tokens=tokens)
            out(f"{family:12} a draft that is hardly ever right: {speed:.3f}")
            slower += speed < LEAST
    return slower


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
