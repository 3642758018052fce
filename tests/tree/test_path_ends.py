"""The end of a path in the tree is found without its tokens while the tree is the same there."""

from __future__ import annotations

from mlxcache.tree.prefix_tree import PathEnds, PrefixTree
from mlxcache.types import Tokens, token_ids


def ids(*tokens: int) -> Tokens:
    return token_ids(tokens)


def test_only_a_change_at_its_end_makes_a_path_be_compared_again() -> None:
    """Other conversations and its own head may be split, grow and go."""
    tree = PrefixTree(1)
    ends = PathEnds(tree)
    path, lineage = ids(1, 2, 3, 4, 5, 6), object()
    tree.insert(path[:5], lineage)
    assert ends.match("path", None) is None
    found = ends.match("path", path)
    assert found is not None
    assert found.length == 5
    tree.insert(ids(1, 2, 9, 9), object())
    ends.match("path", path)  # the head was split off, out of the edge in which the path ends
    tree.insert(ids(7, 7, 7), object())
    beside = tree.insert(ids(1, 8), object())
    tree.cut(beside, beside.start)
    found = ends.match("path", None)
    assert found == tree.match(path, touch=False)
    tree.insert(path, lineage)
    assert ends.match("path", None) is None
    assert ends.match("path", path) == tree.match(path, touch=False)
