"""The invariants of a prefix tree, verified from scratch."""

from __future__ import annotations

import numpy as np

from mlxcache.tree.eviction import EvictionOrder
from mlxcache.tree.node import Cut, Node, unneeded
from mlxcache.tree.prefix_tree import PrefixTree


def check_tree(tree: PrefixTree) -> None:
    """Raise AssertionError, naming the node, unless every invariant holds. O(tokens)."""
    root = tree.root
    assert root.parent is None, "the root has a parent"
    assert root.start == root.end == len(root.tokens) == 0, "the root has tokens"
    nodes = []
    pending = [root]
    while pending:
        node = pending.pop()
        _children(node)
        pending.extend(node.children.values())
        if node is not root:
            _edge(node)
            nodes.append(node)
    _counts(tree, nodes)
    _holders(tree, nodes)
    _order(tree, nodes)


def chain(tree: PrefixTree, node: Node, value: object) -> list[Node]:
    """The nodes that hold `value` from `node` down, without a gap, top down.

    `node` itself is the first if it holds `value`; otherwise its child that does.
    """
    found: list[Node] = []
    for held in tree.holders(value):
        if held is node or held.parent is (found[-1] if found else node):
            found.append(held)
    return found


def clear(tree: PrefixTree) -> list[Cut]:
    """Cut every leaf that is not locked; return what was cut, in that order."""
    cuts = []
    while (leaf := tree.least_leaf()) is not None:
        cuts.append(tree.cut(leaf, leaf.start))
    return cuts


def _children(node: Node) -> None:
    for first, child in node.children.items():
        assert child.parent is node, f"{child} has another parent than {node}"
        assert len(child.tokens) > 0, f"{child} is empty"
        assert int(child.tokens[0]) == first, f"{child} is keyed {first} in {node}"
        assert child.start == node.end, f"{child} does not begin where {node} ends"
    locks = sum(child.locks for child in node.children.values())
    assert node.locks >= locks, f"{node} has {node.locks} locks, its children {locks}"


def _edge(node: Node) -> None:
    assert node.tokens.dtype == np.int32, f"{node} holds {node.tokens.dtype}"
    assert node.tokens.base is None, f"{node} keeps somebody else's array alive"
    assert node.end - node.start == len(node.tokens), f"{node} has {len(node.tokens)} tokens"
    assert node.checkpoint is not None or node.checkpoint_bytes == 0, f"{node} has bytes of nothing"
    assert not unneeded(node), f"{node} should have been merged into its child"


def _counts(tree: PrefixTree, nodes: list[Node]) -> None:
    for name, is_now, should in (
        ("tokens", tree.tokens, sum(len(node.tokens) for node in nodes)),
        ("segments", tree.segments, len(nodes)),
        ("checkpoints", tree.checkpoints, sum(node.checkpoint is not None for node in nodes)),
        ("checkpoint_bytes", tree.checkpoint_bytes, sum(node.checkpoint_bytes for node in nodes)),
    ):
        assert is_now == should, f"{name} is {is_now}, and should be {should}"


def _holders(tree: PrefixTree, nodes: list[Node]) -> None:
    by_value: dict[int, list[Node]] = {}
    for node in nodes:
        by_value.setdefault(id(node.value), []).append(node)
    assert len(by_value) == len(tree._holdings), "a value is counted that no node has"
    for held in by_value.values():
        held.sort(key=lambda node: node.start)
        value = held[0].value
        assert held == tree._holdings.of(value), f"the holders of {value!r} are wrong"
        path = held[-1].path()
        assert set(held) <= set(path), f"{value!r} holds segments of two branches"


def _order(tree: PrefixTree, nodes: list[Node]) -> None:
    check_order(tree._leaves)
    for node in nodes:
        assert node.used_at <= tree._clock.ticks, f"{node} was used in the future"
        if not node.locks and not node.children:
            assert node in tree._leaves, f"the leaf {node} can never be evicted"


def check_order(order: EvictionOrder) -> None:
    """Raise AssertionError unless each member has one entry, none of them too high."""
    entered = [node for _, serial, node in order._heap if order._entered.get(node) == serial]
    assert len(entered) == len(order._entered), "a node has no entry in the heap, or two"
    order._end_wishes()
    for index, (key, serial, node) in enumerate(order._heap):
        parent = order._heap[(index - 1) // 2]
        assert parent[:2] <= (key, serial) or index == 0, "the heap is out of order"
        if order._entered.get(node) == serial:
            assert not node.detached, f"{node} left the tree and is still remembered"
            assert key <= order.key(node), f"{node} is keyed higher than it is"
