"""The shape of a prefix tree: each way to change its edges, and what is counted over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mlxcache.cache.holdings import Holdings
from mlxcache.cache.lru import Recency
from mlxcache.cache.node import NO_TOKENS, Node
from mlxcache.types import Tokens


class Edges:
    """The nodes below one root, the counts over them, and their order of use.

    Each change leaves the counts, the holders of each value and the order of use right, and trusts
    its caller that it is allowed.
    """

    def __init__(self) -> None:
        self.root = Node(None, NO_TOKENS, 0, None, 0)
        self.tokens = 0
        self.segments = 0
        self.checkpoints = 0
        self.checkpoint_bytes = 0
        self.tick = 0
        self.holdings = Holdings()
        self.leaves = Recency(lambda node: not (node.locks or node.children))
        self.marked = Recency(lambda node: not node.locks and node.checkpoint is not None)

    def touch(self, nodes: Iterable[Node]) -> None:
        """Make `nodes` the most recently used, equally so."""
        self.tick += 1
        for node in nodes:
            node.used_at = self.tick

    def append(self, node: Node, tail: Tokens, value: Any) -> Node:
        """Put a copy of `tail` after `node`, in its own edge where it may; return the end node."""
        self.tokens += len(tail)
        grows = node is not self.root and node.value is value
        if grows and not node.children and node.checkpoint is None:
            node.tokens = np.concatenate((node.tokens, tail))
            node.end += len(tail)
            node.used_at = self.tick
            return node
        leaf = Node(node, tail.copy(), node.end, value, self.tick)
        node.children[int(tail[0])] = leaf
        self.segments += 1
        self.holdings.add(leaf)
        self.leaves.add(leaf)
        return leaf

    def divide(self, node: Node, position: int) -> Node:
        """Give [start, position) of `node` to a new node above it, which is returned."""
        at = position - node.start
        upper = Node(node.parent, node.tokens[:at].copy(), node.start, node.value, node.used_at)
        upper.locks = node.locks
        upper.children[int(node.tokens[at])] = node
        self._adopt(upper)
        node.tokens = node.tokens[at:].copy()
        node.start = position
        node.parent = upper
        self.segments += 1
        self.holdings.add(upper)
        return upper

    def compress(self, node: Node) -> None:
        """Merge `node` into its only child, if they share a value and nothing needs it apart."""
        if node is self.root or node.detached or not unneeded(node):
            return
        (child,) = node.children.values()
        self.holdings.remove(node)
        self.segments -= 1
        child.tokens = np.concatenate((node.tokens, child.tokens))
        child.start = node.start
        child.parent = node.parent
        child.used_at = max(child.used_at, node.used_at)
        self._adopt(child)
        self._detach(node)

    def shorten(self, leaf: Node, position: int) -> None:
        """Drop the tokens of [position, end), which are not all of them."""
        self.tokens -= leaf.end - position
        leaf.tokens = leaf.tokens[: position - leaf.start].copy()
        leaf.end = position

    def remove(self, leaf: Node) -> None:
        """Take `leaf`, which has no checkpoint, out of the tree."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[int(leaf.tokens[0])]
        self.tokens -= len(leaf.tokens)
        self.segments -= 1
        self.holdings.remove(leaf)
        self._detach(leaf)
        if parent is not self.root and not parent.children:
            self.leaves.add(parent)
        self.compress(parent)

    def take_checkpoint(self, node: Node) -> tuple[Any, int]:
        """Clear the node's checkpoint; return its state and bytes, None and 0 if it has none."""
        taken = (node.checkpoint, node.checkpoint_bytes)
        if node.checkpoint is not None:
            self.checkpoints -= 1
            self.checkpoint_bytes -= node.checkpoint_bytes
            node.checkpoint = None
            node.checkpoint_bytes = 0
        return taken

    def put_checkpoint(self, node: Node, state: Any, nbytes: int) -> Any:
        """Set the node's checkpoint; return the state it replaces, or None."""
        replaced, _ = self.take_checkpoint(node)
        node.checkpoint = state
        node.checkpoint_bytes = nbytes
        node.asked = False
        self.checkpoints += 1
        self.checkpoint_bytes += nbytes
        self.marked.add(node)
        return replaced

    def settle(self, node: Node) -> None:
        """Let a node that has just lost its last lock be evicted, or merged into its child."""
        node.asked = False
        if not node.children:
            self.leaves.add(node)
        if node.checkpoint is not None:
            self.marked.add(node)
        self.compress(node)

    def _adopt(self, node: Node) -> None:
        """Make `node` its parent's child, in place of the one that began like it."""
        assert node.parent is not None
        node.parent.children[int(node.tokens[0])] = node

    def _detach(self, node: Node) -> None:
        """Empty a node that left the tree: whoever still refers to it holds no KV by that."""
        node.parent = None
        node.children = {}
        node.tokens = NO_TOKENS
        node.value = None
        self.leaves.discard(node)
        self.marked.discard(node)


def unneeded(node: Node) -> bool:
    """Whether the boundary at the end of `node`, which is not the root, serves nothing."""
    if node.asked or node.locks or node.checkpoint is not None or len(node.children) != 1:
        return False
    (child,) = node.children.values()
    return child.value is node.value
