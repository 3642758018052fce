"""The verbs of the prefix tree, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from mlxcache.tree.prefix_tree import PrefixTree
from mlxcache.types import token_ids
from tests.tree.check import check_tree


class Buffer:
    """A value: something that is itself and equal to nothing else."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


A, B, C = Buffer("A"), Buffer("B"), Buffer("C")


def ids(*tokens: int):
    return token_ids(tokens)


@pytest.fixture
def tree():
    """An empty tree that is checked again after the test."""
    tree = PrefixTree(bytes_per_token=10)
    yield tree
    check_tree(tree)


def test_spans_beyond_the_match_are_refused(tree):
    tree.insert(ids(1, 2, 3), A)
    with pytest.raises(ValueError, match="3 is outside of a match of 2"):
        tree.match(ids(1, 2)).spans(3)


def test_edges_own_their_tokens(tree):
    """Neither the caller's later writes nor its big array matter."""
    tokens = np.arange(100, dtype=np.int32)
    node = tree.insert(tokens[:10], A)
    tokens[:] = 0
    assert tree.match(np.arange(10, dtype=np.int32)).length == 10
    assert node.tokens.base is None


def test_split_at_makes_a_boundary(tree):
    node = tree.insert(ids(1, 2, 3, 4), A)
    tree.set_checkpoint(node, "state", 5)
    tree.lock(node)
    upper = tree.split_at(node, 1)
    assert (upper.start, upper.end, upper.locks, upper.used_at) == (0, 1, 1, node.used_at)
    assert (node.start, node.end, node.checkpoint, upper.checkpoint) == (1, 4, "state", None)
    assert tree.split_at(node, 4) is node
    for position in (1, 5):
        with pytest.raises(ValueError, match="cannot split"):
            tree.split_at(node, position)


def test_a_boundary_lasts_until_its_lock_is_released(tree):
    node = tree.insert(ids(1, 2, 3, 4), A)
    upper = tree.split_at(node, 2)
    check_tree(tree)
    tree.lock(upper)
    tree.unlock(upper)
    assert upper.detached
    assert (tree.segments, node.start, upper.value) == (1, 0, None)


@pytest.mark.parametrize(("state", "nbytes"), [(None, 1), ("state", -1)])
def test_a_checkpoint_is_something_of_some_size(tree, state, nbytes):
    with pytest.raises(ValueError, match="cannot set a checkpoint"):
        tree.set_checkpoint(tree.insert(ids(1), A), state, nbytes)
    with pytest.raises(ValueError, match="cannot set a checkpoint"):
        tree.set_checkpoint(tree.root, "state", 1)


def test_cut_refuses_what_is_no_unlocked_leaf(tree):
    tree.insert(ids(1, 2), A)
    leaf = tree.insert(ids(1, 3), B)
    for node, position in ((leaf.parent, 0), (tree.root, 0), (leaf, 2), (leaf, 0)):
        with pytest.raises(ValueError, match="cannot cut"):
            tree.cut(node, position)
    tree.cut(leaf, 1)
    with pytest.raises(ValueError, match="left the tree"):
        tree.cut(leaf, 1)


def test_ids_without_memory_change_nothing(tree, monkeypatch):
    tree.insert(ids(1, 2), A)

    def refuse(*parts):
        raise MemoryError

    monkeypatch.setattr("mlxcache.tree.prefix_tree.join_ids", refuse)
    with pytest.raises(MemoryError):
        tree.insert(ids(1, 2, 3, 4), A)
    check_tree(tree)
    assert tree.match(ids(1, 2, 3, 4)).length == 2


def test_a_match_is_a_snapshot(tree):
    tree.insert(ids(1, 2, 3, 4), A)
    match = tree.match(ids(1, 2, 9))
    tree.split_at(match.nodes[-1], match.length)
    assert match.spans(2) == [(A, 0, 2)]


@pytest.mark.parametrize("breakage", ["start", "locks", "tokens", "checkpoint_bytes", "used_at"])
def test_check_finds_damage(breakage):
    tree = PrefixTree(bytes_per_token=1)
    tree.insert(ids(1, 2), A)
    leaf = tree.insert(ids(1, 3), B)
    check_tree(tree)
    damaged = {"start": 0, "locks": 1, "tokens": ids(4), "checkpoint_bytes": 3, "used_at": 99}
    setattr(leaf, breakage, damaged[breakage])
    with pytest.raises(AssertionError):
        check_tree(tree)
