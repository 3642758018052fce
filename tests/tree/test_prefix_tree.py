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
    """Token ids as the tree takes them."""
    return token_ids(tokens)


@pytest.fixture
def tree():
    """An empty tree that is checked again after the test."""
    tree = PrefixTree(bytes_per_token=10)
    yield tree
    check_tree(tree)


def test_an_empty_tree_matches_nothing(tree):
    """No tokens, no nodes, no spans."""
    match = tree.match(ids(1, 2))
    assert (match.length, match.nodes, match.checkpoints, match.spans(0)) == (0, (), (), [])
    assert tree.match(ids()).length == 0


def test_spans_beyond_the_match_are_refused(tree):
    """A span names only KV whose tokens were compared."""
    tree.insert(ids(1, 2, 3), A)
    with pytest.raises(ValueError, match="3 is outside of a match of 2"):
        tree.match(ids(1, 2)).spans(3)


def test_a_leaf_of_the_same_value_grows_in_place(tree):
    """Appending to a lineage makes no chain of nodes, locked or not."""
    leaf = tree.insert(ids(1, 2), A)
    tree.lock(leaf)
    assert tree.insert(ids(1, 2, 3), A) is leaf
    assert (tree.segments, leaf.end, tree.live_range(A)) == (1, 3, (0, 3))


def test_inserting_nothing_returns_the_root(tree):
    """The empty prefix is always present."""
    assert tree.insert(ids(), A) is tree.root


def test_edges_own_their_tokens(tree):
    """Neither the caller's later writes nor its big array matter."""
    tokens = np.arange(100, dtype=np.int32)
    node = tree.insert(tokens[:10], A)
    tokens[:] = 0
    assert tree.match(np.arange(10, dtype=np.int32)).length == 10
    assert node.tokens.base is None


def test_split_at_makes_a_boundary(tree):
    """The upper part is new, the lower keeps identity, checkpoint and children."""
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
    """Then it serves nothing and is merged away."""
    node = tree.insert(ids(1, 2, 3, 4), A)
    upper = tree.split_at(node, 2)
    check_tree(tree)
    tree.lock(upper)
    tree.unlock(upper)
    assert upper.detached
    assert (tree.segments, node.start, upper.value) == (1, 0, None)


def test_set_checkpoint_replaces(tree):
    """It returns what it replaced, and the counts follow."""
    node = tree.insert(ids(1), A)
    assert tree.set_checkpoint(node, "old", 5) is None
    assert tree.set_checkpoint(node, "new", 7) == "old"
    assert (tree.checkpoints, tree.checkpoint_bytes) == (1, 7)
    assert tree.drop_checkpoint(node) == "new"
    assert (tree.checkpoints, tree.checkpoint_bytes) == (0, 0)
    with pytest.raises(ValueError, match="has no checkpoint"):
        tree.drop_checkpoint(node)


@pytest.mark.parametrize(("state", "nbytes"), [(None, 1), ("state", -1)])
def test_a_checkpoint_is_something_of_some_size(tree, state, nbytes):
    """None and negative bytes are refused, and so is the root."""
    with pytest.raises(ValueError, match="cannot set a checkpoint"):
        tree.set_checkpoint(tree.insert(ids(1), A), state, nbytes)
    with pytest.raises(ValueError, match="cannot set a checkpoint"):
        tree.set_checkpoint(tree.root, "state", 1)


def test_asking_for_a_boundary_does_not_outlive_its_checkpoint(tree):
    """Without the checkpoint it serves nothing, though it was asked for again meanwhile."""
    upper = tree.insert(ids(1, 2), A)
    tree.set_checkpoint(upper, "state", 5)
    tree.insert(ids(1, 2, 3), A)
    assert tree.insert(ids(1, 2), A) is upper
    tree.drop_checkpoint(upper)
    assert (upper.detached, tree.segments) == (True, 1)


def test_locks_count_on_the_whole_path(tree):
    """Each lock is undone by one unlock; one too many is refused."""
    tree.insert(ids(1, 2), A)
    leaf = tree.insert(ids(1, 3), B)
    tree.lock(leaf)
    tree.lock(leaf)
    assert [node.locks for node in leaf.path()] == [2, 2, 2]
    tree.unlock(leaf)
    with pytest.raises(ValueError, match="1 locks"):
        tree.cut(leaf, 1)
    tree.unlock(leaf)
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(leaf)
    assert tree.cut(leaf, 1).tokens == 1


def test_retarget_refuses_two_branches(tree):
    """Neither two nodes side by side nor a value that lives beside them."""
    tree.insert(ids(1, 2), A)
    tree.insert(ids(1, 3), B)
    one, two = tree.match(ids(1, 2)).nodes[-1], tree.match(ids(1, 3)).nodes[-1]
    for nodes, value in (([one, two], C), ([one], B), ([tree.root], C)):
        with pytest.raises(ValueError, match="two branches"):
            tree.retarget(nodes, value)
    assert (one.value, two.value) == (A, B)


def test_cut_refuses_what_is_no_unlocked_leaf(tree):
    """Inner nodes, the root, positions outside and removed nodes."""
    tree.insert(ids(1, 2), A)
    leaf = tree.insert(ids(1, 3), B)
    for node, position in ((leaf.parent, 0), (tree.root, 0), (leaf, 2), (leaf, 0)):
        with pytest.raises(ValueError, match="cannot cut"):
            tree.cut(node, position)
    tree.cut(leaf, 1)
    with pytest.raises(ValueError, match="left the tree"):
        tree.cut(leaf, 1)


def test_the_least_recently_used_leaf_goes_first(tree):
    """A match counts as use, a match without touch does not."""
    tree.insert(ids(1), A)
    tree.insert(ids(2), B)
    tree.insert(ids(3), C)
    tree.match(ids(1))
    tree.match(ids(2), touch=False)
    order = []
    while (leaf := tree.least_leaf()) is not None:
        order.append(tree.cut(leaf, leaf.start).value)
    assert order == [B, C, A]


def test_locked_nodes_are_never_offered(tree):
    """They are again once the lock is released."""
    leaf = tree.insert(ids(1, 2), A)
    tree.set_checkpoint(leaf, "state", 1)
    tree.lock(leaf)
    assert tree.least_leaf() is None
    tree.unlock(leaf)
    assert tree.least_leaf() is leaf


def test_a_match_is_a_snapshot(tree):
    """Splitting its last node, as admission does, leaves its spans right."""
    tree.insert(ids(1, 2, 3, 4), A)
    match = tree.match(ids(1, 2, 9))
    tree.split_at(match.nodes[-1], match.length)
    assert match.spans(2) == [(A, 0, 2)]


@pytest.mark.parametrize("breakage", ["start", "locks", "tokens", "checkpoint_bytes", "used_at"])
def test_check_finds_damage(breakage):
    """Each field out of place is an AssertionError."""
    tree = PrefixTree(bytes_per_token=1)
    tree.insert(ids(1, 2), A)
    leaf = tree.insert(ids(1, 3), B)
    check_tree(tree)
    damaged = {"start": 0, "locks": 1, "tokens": ids(4), "checkpoint_bytes": 3, "used_at": 99}
    setattr(leaf, breakage, damaged[breakage])
    with pytest.raises(AssertionError):
        check_tree(tree)
