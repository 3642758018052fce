"""The nodes of a prefix tree: changes of its edges, with counts and the order of eviction."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from mlxcache.tree.eviction import EvictionClock, EvictionOrder, Worth
from mlxcache.tree.node import Node, Usage, unneeded
from mlxcache.types import NO_TOKENS, Tokens, join_ids


class Holdings:
    """Map from each value to the nodes that hold it. Values are compared by identity.

    A value is any object that holds KV by position, such as a lineage. All nodes of a value lie on
    one path, because a value holds at most one token per position.
    """

    def __init__(self) -> None:
        # A node keeps its value alive, so an id is not reused while it is a key here.
        self._nodes: dict[int, list[Node]] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter([nodes[0].value for nodes in self._nodes.values()])

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, value: Any) -> list[Node]:
        """Return the nodes that hold `value`, from the top down.

        The list is the internal one, and must not be changed by the caller.
        """
        return self._nodes.get(id(value), [])

    def add(self, node: Node) -> None:
        """Add `node` to the nodes of its value."""
        insort(self._nodes.setdefault(id(node.value), []), node, key=attrgetter("start"))

    def remove(self, node: Node) -> None:
        """Remove `node`, whose value must be the same as when it was added.

        Raises KeyError or ValueError if the node was not added.
        """
        nodes = self._nodes[id(node.value)]
        nodes.remove(node)
        if not nodes:
            del self._nodes[id(node.value)]


def _evictable(node: Node) -> bool:
    return not (node.locks or node.children)


class Edges:
    """The nodes of one tree, with counts over them and the eviction order of the leaves.

    Each method keeps counts, holdings and eviction order consistent, and does not check whether the
    change is allowed: the caller does. `worth`, `now`, `clock`: see `EvictionOrder`.
    """

    def __init__(
        self,
        worth: Worth,
        now: Callable[[], float] = time.monotonic,
        clock: EvictionClock | None = None,
    ) -> None:
        self.root = Node(None, NO_TOKENS, 0, None, 0)
        self.tokens = 0
        self.segments = 0
        self.checkpoints = 0
        self.checkpoint_bytes = 0
        self.holdings = Holdings()
        self.leaves = EvictionOrder(worth, _evictable, now, clock)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments and checkpoints together."""
        return self.tokens * self.leaves.worth.bytes_per_token + self.checkpoint_bytes

    def touch(self, nodes: Iterable[Node]) -> None:
        """Mark `nodes` as used now.

        All of them get the same tick of the eviction clock, so none counts as more recently used
        than another.
        """
        self.leaves.clock.tick()
        for node in nodes:
            node.used_at = self.leaves.clock.ticks
            node.usage.clock = self.leaves.clock.now
            node.usage.seen = self.leaves.now()
            node.usage.replaced = False

    def pass_by(self, node: Node) -> None:
        """Mark the segments below `node` as replaced: evicted before all others.

        Called when their conversation continues in another branch. Segments that were reused are
        not marked, nor is anything below them. Takes O(1), amortised over insertions.
        """
        pending = list(node.children.values())
        while pending:
            each = pending.pop()
            if not each.usage.replaced and each.usage.reach <= each.start:
                each.usage.replaced = True
                self.leaves.renew(each)
                pending += each.children.values()

    def append(self, node: Node, tail: Tokens, value: Any, count: int = 0) -> Node:
        """Append a copy of the token ids `tail` below `node`; return the node in which it ends.

        Their KV is in `value`. The edge of `node` is extended if it is a leaf with the same value,
        without a checkpoint and with at most `count` uses; with more uses it is shared with other
        conversations. Otherwise a new node starts with `count` uses.
        """
        self.tokens += len(tail)
        grows = node is not self.root and node.value is value and count >= node.usage.count
        if grows and not node.children and node.checkpoint is None:
            node.tokens = join_ids(node.tokens, tail)
            node.end += len(tail)
            node.used_at = self.leaves.clock.ticks
            return node
        leaf = Node(node, tail.copy(), node.end, value, self.leaves.clock.ticks)
        leaf.usage = Usage(self.leaves.clock.now, count, seen=self.leaves.now())
        node.children[int(tail[0])] = leaf
        self.segments += 1
        self.holdings.add(leaf)
        self.leaves.add(leaf)
        return leaf

    def divide(self, node: Node, position: int) -> Node:
        """Move [start, position) of `node` to a new node above it, and return the new node."""
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
        """Merge `node` into its only child if nothing needs the boundary between them.

        See `node.unneeded`. Otherwise, and for the root or a node that left the tree, does
        nothing.
        """
        if node is self.root or node.detached or not unneeded(node):
            return
        (child,) = node.children.values()
        self.holdings.remove(node)
        self.segments -= 1
        child.tokens = join_ids(node.tokens, child.tokens)
        child.start = node.start
        child.parent = node.parent
        child.used_at = max(child.used_at, node.used_at)
        child.usage.absorb(node.usage)
        self._adopt(child)
        self._detach(node)

    def shorten(self, leaf: Node, position: int) -> None:
        """Drop the tokens of `leaf` from `position` to its end; at least one token must remain."""
        self.tokens -= leaf.end - position
        leaf.tokens = leaf.tokens[: position - leaf.start].copy()
        leaf.end = position
        self.leaves.renew(leaf)

    def remove(self, leaf: Node) -> None:
        """Remove `leaf`, a node without children and checkpoint, from the tree.

        Its parent may then become a leaf, or be merged into its one remaining child.
        """
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
        """Remove the checkpoint of `node`, and return its state and number of bytes.

        Returns `(None, 0)` if the node has no checkpoint.
        """
        taken = (node.checkpoint, node.checkpoint_bytes)
        if node.checkpoint is not None:
            self.checkpoints -= 1
            self.checkpoint_bytes -= node.checkpoint_bytes
            node.checkpoint = None
            node.checkpoint_bytes = 0
        return taken

    def put_checkpoint(self, node: Node, state: Any, nbytes: int) -> Any:
        """Set the checkpoint of `node` to `state`, of `nbytes` bytes.

        Returns the state that it replaces, or None.
        """
        replaced, _ = self.take_checkpoint(node)
        node.checkpoint = state
        node.checkpoint_bytes = nbytes
        node.asked = False
        self.checkpoints += 1
        self.checkpoint_bytes += nbytes
        self.leaves.renew(node)
        return replaced

    def settle(self, node: Node) -> None:
        """Update a node whose last lock was released.

        Without children it becomes evictable. It is merged into its child if it has exactly one,
        which holds the KV in the same value and is used at least as often, and if no checkpoint is
        at the boundary between them.
        """
        node.asked = False
        if not node.children:
            self.leaves.add(node)
        self.compress(node)

    def _adopt(self, node: Node) -> None:
        """Make `node` a child of its parent, instead of any child with the same first token."""
        assert node.parent is not None
        node.parent.children[int(node.tokens[0])] = node

    def _detach(self, node: Node) -> None:
        """Clear a node that left the tree, so that remaining references to it keep no KV alive."""
        node.parent = None
        node.children = {}
        node.tokens = NO_TOKENS
        node.value = None
        self.leaves.discard(node)
