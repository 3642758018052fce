"""What is no numbers leaves the disk, and nothing of others does."""

from __future__ import annotations

import pytest

from mlxcache.store import Store
from mlxcache.store.prefixes import forget_beyond
from tests.store.content import branch, put, snapshot, tokens


@pytest.mark.parametrize("shared", [4, 64, 130])
def test_only_conversations_that_hold_forgotten_tokens_go(store: Store, shared: int) -> None:
    """All prompts of a model begin alike, with the template's first tokens at least."""
    mine = tokens(300)
    others = [branch(mine, shared, 250, seed) for seed in (2, 3)]
    for ids in (*others, mine):
        put(store, ids)
    store.write_checkpoint(others[0], snapshot(others[0]))
    store.write_checkpoint(mine, snapshot(mine))
    forget_beyond(store, mine, shared)
    assert store.find(mine).length == shared
    assert [store.find(ids).length for ids in others] == [250, 250]
    assert [one.position for one in store.find(others[0]).checkpoints] == [250]
    assert store.find(mine).checkpoints == ()


def test_what_builds_on_forgotten_tokens_goes(store: Store) -> None:
    mine = tokens(300)
    other = branch(mine, 200, 280)
    put(store, mine)
    put(store, other)
    forget_beyond(store, mine, 100)
    assert store.find(mine).length <= 128
    assert store.find(other).length <= 128


def test_what_was_never_written_costs_nobody_anything(store: Store) -> None:
    other = tokens(300)
    put(store, other)
    forget_beyond(store, branch(other, 4, 200), 4)
    assert store.find(other).length == 300
