"""Who holds which value."""

from __future__ import annotations

import pytest

from mlxcache.tree.node import Node
from mlxcache.tree.prefix_tree import Holdings
from mlxcache.types import NO_TOKENS


def node(start: int, value: object) -> Node:
    """A node that begins there."""
    return Node(None, NO_TOKENS, start, value, 0)


def test_nodes_of_a_value_come_top_down():
    """In whatever order they were added."""
    holdings = Holdings()
    value = object()
    low, top = node(5, value), node(0, value)
    holdings.add(low)
    holdings.add(top)
    assert holdings.of(value) == [top, low]
    assert holdings.of(object()) == []


def test_a_value_without_nodes_is_forgotten():
    """And cannot be removed again."""
    holdings = Holdings()
    each = node(0, object())
    holdings.add(each)
    assert list(holdings) == [each.value]
    holdings.remove(each)
    assert (list(holdings), len(holdings)) == ([], 0)
    with pytest.raises(KeyError):
        holdings.remove(each)
