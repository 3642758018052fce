"""The RAM of two models under one budget: room for weights, withheld bytes, members."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.tree.budget import Budget
from tests.residency.test_two_models import Models
from tests.scheduled import Bench, prompt


@pytest.fixture
def models(toy_paths: dict[str, Path], rng: np.random.Generator) -> Models:
    """Two models with a conversation of 500 tokens each, room for 400 more, idle weights of 300."""
    pair = Bench(toy_paths["llama"]), Bench(toy_paths["llama"])
    size = pair[0].kv.layout.bytes_per_token
    made = Models(*pair, tokens=2000, weights=300 * size)
    for bench in pair:
        bench.ask(prompt(rng, 500), tokens=2)
    return made


def size_of(models: Models, tokens: int) -> int:
    return tokens * models.benches[0].kv.layout.bytes_per_token


def test_weights_get_idle_kv_of_all_members_and_then_idle_models(models: Models) -> None:
    assert models.shared.make_room(size_of(models, 1400))
    assert not models.asked
    assert models.shared.free >= size_of(models, 1400)
    assert models.shared.make_room(size_of(models, 1900))
    assert not models.weights
    models.check()


def test_nothing_is_evicted_for_weights_that_never_fit(models: Models) -> None:
    held = [bench.kv.tree.tokens for bench in models.benches]
    assert not models.shared.make_room(size_of(models, 2001))
    assert [bench.kv.tree.tokens for bench in models.benches] == held


def test_withheld_bytes_come_from_all_members_and_from_no_weights(models: Models) -> None:
    """What is withheld is returned to all."""
    models.shared.withhold(size_of(models, 1700))
    assert models.shared.budget.by_kind()["withheld"] == size_of(models, 1700)
    assert all(bench.kv.tree.tokens == 0 for bench in models.benches)
    assert models.weights
    assert models.shared.free == 0
    one = models.benches[0].kv
    assert one.ram.shared.withheld == size_of(models, 1700)
    one.end_pressure()
    assert models.shared.free == size_of(models, 1700)
    models.check()


def test_a_closed_cache_is_no_member_any_more(models: Models, rng: np.random.Generator) -> None:
    one, other = models.benches
    assert one.kv.close(1.0) == 0
    assert one.kv.budget.used == 0
    ids = prompt(rng, 1500)
    assert other.ask(ids, tokens=2).out == other.cold(ids, 2)


def test_only_a_member_of_the_budget_may_join(models: Models) -> None:
    layout = models.benches[0].kv.layout
    with pytest.raises(ValueError, match="no member"):
        KVCache.open(layout, Budget(1000), shared=models.shared)
