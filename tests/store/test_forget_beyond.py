"""Removal of KV that is not finite, without removing sound KV of others."""

from __future__ import annotations

import numpy as np
import pytest

from mlxcache.safetensors import Tensor
from mlxcache.store.store import Store
from tests.store.content import branch, put, snapshot, tokens


@pytest.mark.parametrize("shared", [4, 64, 130])
def test_only_conversations_that_hold_forgotten_tokens_go(store: Store, shared: int) -> None:
    """Prompts of a model share at least the template's first tokens."""
    mine = tokens(300)
    others = [branch(mine, shared, 250, seed) for seed in (2, 3)]
    for ids in (*others, mine):
        put(store, ids)
    store.write_checkpoint(others[0], snapshot(others[0]))
    store.write_checkpoint(mine, snapshot(mine))
    store.forget_beyond(mine, shared)
    assert store.find(mine).length == shared
    assert [store.find(ids).length for ids in others] == [250, 250]
    assert [one.position for one in store.find(others[0]).checkpoints] == [250]
    assert store.find(mine).checkpoints == ()


@pytest.mark.parametrize("shared", [5, 70, 133])
def test_what_others_computed_of_the_same_tokens_stays(store: Store, shared: int) -> None:
    """Few shared tokens were computed twice, and were finite once."""
    mine = tokens(300)
    other = branch(mine, shared, 250)
    for ids in (other, mine):
        put(store, ids)
    store.forget_beyond(mine, shared - 3)
    assert store.find(other).length == 250
    assert store.find(mine).length == shared


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_numbers_goes_with_all_behind_it(store: Store, kind: str, value: float) -> None:
    mine = tokens(300)
    other = branch(mine, 70, 250)
    kept = branch(mine, 20, 150, seed=5)
    bad = np.ones((250, 2), np.float32)
    bad[68] = value
    raw: dict[str, np.ndarray] = {
        "F32": bad,
        "F16": bad.astype(np.float16),
        "BF16": (bad.view("u4") >> 16).astype("u2"),
    }
    store.write_run(other, 0, [Tensor("keys", kind, bad.shape, raw[kind].data)])
    put(store, kept)
    store.forget_beyond(mine, 66)
    assert store.find(other).length <= 66
    assert store.find(kept).length == 150


@pytest.mark.parametrize("wrong", [False, True])
def test_what_builds_on_forgotten_tokens_goes_if_they_are_no_numbers(
    store: Store, *, wrong: bool
) -> None:
    mine = tokens(300)
    other = branch(mine, 200, 280)
    values = np.ones((300, 2), np.float32)
    values[150] = np.nan if wrong else 2.0
    rows = [Tensor("keys", "F32", (n, 2), values[300 - n :].data) for n in (300, 88)]
    store.write_run(mine, 0, rows[:1])
    store.write_run(other, 192, rows[1:])
    store.forget_beyond(mine, 100)
    assert store.find(mine).length == (0 if wrong else 300)
    assert store.find(other).length == (0 if wrong else 280)


def test_what_was_never_written_costs_nobody_anything(store: Store) -> None:
    other = tokens(300)
    put(store, other)
    store.forget_beyond(branch(other, 4, 200), 4)
    assert store.find(other).length == 300
