"""The order of use."""

from __future__ import annotations

from mlxcache.cache.lru import Recency
from mlxcache.cache.node import NO_TOKENS, Node


def node(used_at: int) -> Node:
    """A node that was used then."""
    return Node(None, NO_TOKENS, 0, None, used_at)


def test_the_oldest_stays_until_it_is_used():
    """Asking removes nothing; a later use moves it back."""
    recency = Recency(lambda _: True)
    one, two = node(1), node(2)
    recency.add(two)
    recency.add(one)
    assert recency.oldest() is recency.oldest() is one
    one.used_at = 3
    assert recency.oldest() is two
    recency.check()


def test_what_is_not_eligible_is_forgotten_until_added_again():
    """It costs one look, not one on every call."""
    recency = Recency(lambda each: not each.locks)
    one = node(1)
    one.locks = 1
    recency.add(one)
    assert recency.oldest() is None
    assert one not in recency
    one.locks = 0
    recency.add(one)
    assert recency.oldest() is one


def test_discarded_nodes_do_not_pile_up():
    """A tree that loses as many nodes as it gains keeps a small heap."""
    recency = Recency(lambda _: True)
    for tick in range(1000):
        each = node(tick)
        recency.add(each)
        recency.discard(each)
    assert recency.oldest() is None
    assert len(recency._heap) < 100
    recency.check()
