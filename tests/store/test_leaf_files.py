"""The files of sessions' leaves: measured exactly, and again only where the index changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from mlxcache.store import listing
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held, durable_tokens
from mlxcache.store.store import Store
from mlxcache.types import Tokens, join_ids
from tests.store.content import branch, opened, put, snapshot, tokens, turns

NUMBERS = count(1)


class Leaves:
    """Leaves in groups, and the number of times that token ids of one were read."""

    def __init__(self) -> None:
        self.ids: dict[LeafRow, Tokens] = {}
        self.groups: list[list[LeafRow]] = []
        self.reads = 0

    def add(self, *paths: Tokens) -> None:
        group = [LeafRow(next(NUMBERS), "ses", "main", len(ids), 1, 1, 0.0) for ids in paths]
        self.ids |= dict(zip(group, paths, strict=True))
        self.groups.append(group)

    def measured(self, store: Store) -> list[Held]:
        return store.measure(self.groups, self.read)

    def read(self, leaf: LeafRow) -> Tokens:
        self.reads += 1
        return self.ids[leaf]

    def looked_up(self, store: Store) -> list[Held]:
        return [held(store, [self.ids[leaf] for leaf in group]) for group in self.groups]


def held(store: Store, paths: Sequence[Tokens]) -> Held:
    found = [store.find(ids, touch=False) for ids in paths]
    saved = ((x.length, [y.position for y in x.checkpoints]) for x in found)
    durable = (durable_tokens(*one, needed=store.has_checkpoints()) for one in saved)
    files = {x.path: x.nbytes for each in found for x in each.pieces}
    files |= {x.path: x.nbytes for each in found for x in each.checkpoints}
    return Held(tuple(durable), sum(files.values()))


@pytest.fixture
def leaves() -> Leaves:
    return Leaves()


def test_other_conversations_make_no_leaf_be_read_again(
    store: Store, folder: Path, leaves: Leaves
) -> None:
    head = tokens(200)
    for seed in range(1, 21):
        turns(store, branch(head, 200, 500, seed), 200, 300, 500)
        leaves.add(branch(head, 200, 500, seed))
    leaves.measured(store)
    assert leaves.reads == 20
    with opened(folder) as other:
        for seed in range(31, 41):
            turns(other, branch(head, 200, 400, seed), 300, 400)
    turns(store, join_ids(branch(head, 200, 500, 3), tokens(200)), 500, 700)
    store.remove_beyond(branch(head, 200, 400, 31), 200)
    assert leaves.measured(store) == leaves.looked_up(store)
    assert leaves.reads == 20


def test_a_leaf_grows_and_shrinks_with_its_files(
    store: Store, folder: Path, leaves: Leaves
) -> None:
    ids = tokens(640)
    leaves.add(ids, ids[:130])
    assert leaves.measured(store) == [Held((0, 0), 0)]
    with opened(folder) as other:
        turns(other, ids, 130, 320, 640)
        assert leaves.measured(store)[0].tokens == (640, 130)
        other.remove_beyond(ids, 200)
    assert leaves.measured(store)[0].tokens == (320, 130)
    store.clear()
    assert leaves.measured(store) == [Held((0, 0), 0)]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_is_remembered_is_what_a_lookup_finds(
    folder: Path, leaves: Leaves, monkeypatch: pytest.MonkeyPatch, checkpoints: bool
) -> None:
    monkeypatch.setattr(listing, "MOST_ADDED", 40)
    chance = np.random.default_rng(5)
    paths = [tokens(400, seed) for seed in range(3)]
    with (
        opened(folder, needs_checkpoints=checkpoints) as one,
        opened(folder, needs_checkpoints=checkpoints) as other,
    ):
        for step in range(120):
            store = (one, other)[chance.integers(2)]
            path = paths[chance.integers(len(paths))]
            cut = int(chance.integers(1, len(path) + 1))
            match chance.integers(6):
                case 0 | 1:
                    end = store.find(path[:cut]).length // 64 * 64
                    if end < cut:
                        put(store, path[:cut], end)
                case 2:
                    paths.append(branch(path, cut, cut + 150, step + 10))
                case 3:
                    leaves.add(*(paths[i][:cut] for i in chance.integers(len(paths), size=2)))
                case 4 if checkpoints:
                    store.write_checkpoint(path[:cut], snapshot(path[:cut]))
                case _:
                    store.remove_beyond(path, cut)
            assert leaves.measured(one) == leaves.looked_up(one)
    assert leaves.reads < 120 * len(leaves.ids) / 4
