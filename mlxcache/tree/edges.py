"""The shape of a prefix tree: each way to change its edges, and what is counted over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mlxcache.tree.eviction import Order
from mlxcache.tree.holdings import Holdings
from mlxcache.tree.node import NO_TOKENS, Node
from mlxcache.tree.worth import Usage, Worth
from mlxcache.types import Tokens


class Edges:
    """The nodes below one root, the counts over them, and the order in which leaves go.

    Each change leaves the counts, the holders of each value and the order right, and trusts its
    caller that it is allowed.
    """

    def __init__(self, worth: Worth, now: Callable[[], float] = time.monotonic) -> None:
        self.root = Node(None, NO_TOKENS, 0, None, 0)
        self.tokens = 0
        self.segments = 0
        self.checkpoints = 0
        self.checkpoint_bytes = 0
        self.tick = 0
        self.holdings = Holdings()
        self.leaves = Order(worth, lambda node: not (node.locks or node.children), now)

    @property
    def nbytes(self) -> int:
        """The bytes of all segments and checkpoints."""
        return self.tokens * self.leaves.worth.bytes_per_token + self.checkpoint_bytes

    def touch(self, nodes: Iterable[Node]) -> None:
        """Make `nodes` the most recently used, equally so."""
        self.tick += 1
        for node in nodes:
            node.used_at = self.tick
            node.usage.clock = self.leaves.clock
            node.usage.seen = self.leaves.now()
            node.usage.replaced = False

    def pass_by(self, node: Node) -> None:
        """Note that a conversation went another way than what follows on `node`.

        That is replaced as far as nobody ever came back to it. O(1), amortised over inserts.
        """
        pending = list(node.children.values())
        while pending:
            each = pending.pop()
            if not each.usage.replaced and each.usage.reach <= each.start:
                each.usage.replaced = True
                self.leaves.renew(each)
                pending += each.children.values()

    def append(self, node: Node, tail: Tokens, value: Any, count: int = 0) -> Node:
        """Put a copy of `tail` after `node`, in its own edge where it may; return the end node.

        It begins with `count` uses: an edge that had more is another's, and its own stays apart.
        """
        self.tokens += len(tail)
        grows = node is not self.root and node.value is value and count >= node.usage.count
        if grows and not node.children and node.checkpoint is None:
            node.tokens = np.concatenate((node.tokens, tail))
            node.end += len(tail)
            node.used_at = self.tick
            return node
        leaf = Node(node, tail.copy(), node.end, value, self.tick)
        leaf.usage = Usage(self.leaves.clock, count, seen=self.leaves.now())
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
        upper.usage = node.usage.copy()
        upper.children[int(node.tokens[at])] = node
        self._adopt(upper)
        node.tokens = node.tokens[at:].copy()
        node.start = position
        node.parent = upper
        self.segments += 1
        self.holdings.add(upper)
        self.leaves.renew(node)
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
        child.usage.absorb(node.usage)
        self._adopt(child)
        self._detach(node)

    def shorten(self, leaf: Node, position: int) -> None:
        """Drop the tokens of [position, end), which are not all of them."""
        self.tokens -= leaf.end - position
        leaf.tokens = leaf.tokens[: position - leaf.start].copy()
        leaf.end = position
        self.leaves.renew(leaf)

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
        self.leaves.renew(node)
        return replaced

    def settle(self, node: Node) -> None:
        """Let a node that has just lost its last lock be evicted, or merged into its child."""
        node.asked = False
        if not node.children:
            self.leaves.add(node)
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


def unneeded(node: Node) -> bool:
    """Whether the boundary at the end of `node`, which is not the root, serves nothing.

    A head that is asked for more often than the one conversation left behind it stays apart.
    """
    if node.asked or node.locks or node.checkpoint is not None or len(node.children) != 1:
        return False
    (child,) = node.children.values()
    return child.value is node.value and child.usage.count >= node.usage.count
