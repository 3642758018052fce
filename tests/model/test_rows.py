"""Sequences in one batch: what joining copies, and how much room it leaves."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache

from mlxcache.model import rows


def filled(tokens: int, seed: int) -> KVCache:
    cache = KVCache()
    values = np.random.default_rng(seed).normal(size=(2, 1, 2, tokens, 4)).astype(np.float32)
    cache.update_and_fetch(mx.array(values[0]), mx.array(values[1]))
    return cache


def test_joined_rows_hold_what_each_held_and_have_room_for_more() -> None:
    caches = [filled(n, seed) for seed, n in enumerate((5, 9, 7))]
    (batch,) = rows.join([caches[0]], [[c] for c in caches[1:]], batched=False)
    plain = KVCache.merge(caches)
    assert batch.keys.shape[2] == 9 + rows.STEP
    for mine, theirs in zip(batch.keys_and_values(), plain.keys_and_values(), strict=True):
        assert mx.array_equal(mine, theirs)
    assert batch.offset.tolist() == plain.offset.tolist() == [5, 9, 7]
    assert batch.left_padding.tolist() == plain.left_padding.tolist()
    room = batch.keys.shape
    for _ in range(rows.STEP):
        batch.update_and_fetch(mx.ones((3, 2, 1, 4)), mx.ones((3, 2, 1, 4)))
    assert batch.keys.shape == room


def test_composites_are_joined_part_by_part() -> None:
    layers = [CacheList(filled(n, n), filled(n, n + 1)) for n in (3, 4)]
    (batch,) = rows.join([layers[0]], [[layers[1]]], batched=False)
    assert [part.keys.shape[2] for part in batch.caches] == [4 + rows.STEP] * 2


def test_a_layer_that_nothing_has_been_fed_to_is_joined_empty() -> None:
    (batch,) = rows.join([KVCache()], [[KVCache()]], batched=False)
    assert batch.empty()
