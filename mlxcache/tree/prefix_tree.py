"""A compressed radix tree over token ids. Values and checkpoints are opaque to it."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mlxcache.common_prefix import common_length
from mlxcache.tree.eviction import EvictionOrder, Worth
from mlxcache.tree.node import (
    NO_TOKENS,
    Cut,
    Match,
    Node,
    Usage,
    as_tokens,
    unneeded,
)
from mlxcache.types import Tokens


class Holdings:
    """The nodes of each value, top down. Values are compared by identity.

    All nodes of a value lie on one path, as it holds at most one token per position.
    """

    def __init__(self) -> None:
        # A node keeps its value alive, so an id is not reused while it is a key here.
        self._nodes: dict[int, list[Node]] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter([nodes[0].value for nodes in self._nodes.values()])

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, value: Any) -> list[Node]:
        """The nodes that hold `value`, top down; the caller does not change the list."""
        return self._nodes.get(id(value), [])

    def add(self, node: Node) -> None:
        """Add `node` to its value's nodes."""
        insort(self._nodes.setdefault(id(node.value), []), node, key=attrgetter("start"))

    def remove(self, node: Node) -> None:
        """Remove `node`, whose value must be the one at its `add`.

        Raises KeyError or ValueError if it was not added.
        """
        nodes = self._nodes[id(node.value)]
        nodes.remove(node)
        if not nodes:
            del self._nodes[id(node.value)]


class Edges:
    """The nodes below one root, the counts over them, and the eviction order of the leaves.

    Each change keeps the counts, the holders of each value and the order right; the caller makes
    sure that it is allowed.
    """

    def __init__(self, worth: Worth, now: Callable[[], float] = time.monotonic) -> None:
        self.root = Node(None, NO_TOKENS, 0, None, 0)
        self.tokens = 0
        self.segments = 0
        self.checkpoints = 0
        self.checkpoint_bytes = 0
        self.tick = 0
        self.holdings = Holdings()
        self.leaves = EvictionOrder(worth, lambda node: not (node.locks or node.children), now)

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
        """Mark segments after `node` as replaced: their conversation continues elsewhere now.

        Only segments that were never reused are marked. O(1), amortised over inserts.
        """
        pending = list(node.children.values())
        while pending:
            each = pending.pop()
            if not each.usage.replaced and each.usage.reach <= each.start:
                each.usage.replaced = True
                self.leaves.renew(each)
                pending += each.children.values()

    def append(self, node: Node, tail: Tokens, value: Any, count: int = 0) -> Node:
        """Append a copy of `tail` to `node`, extending its edge if possible; returns the end node.

        A new edge starts with `count` uses; an edge with more belongs to others and is not
        extended.
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
        """Move [start, position) of `node` to a new node above it; returns that."""
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
        """Merge `node` into its only child, if they share a value and the boundary is unneeded."""
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
        """Remove `leaf`, which has no checkpoint, from the tree."""
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
        """Make a node that lost its last lock evictable, or merge it into its child."""
        node.asked = False
        if not node.children:
            self.leaves.add(node)
        self.compress(node)

    def _adopt(self, node: Node) -> None:
        """Make `node` its parent's child, in place of the one with the same first token."""
        assert node.parent is not None
        node.parent.children[int(node.tokens[0])] = node

    def _detach(self, node: Node) -> None:
        """Clear a node that left the tree, so that references to it keep no KV alive."""
        node.parent = None
        node.children = {}
        node.tokens = NO_TOKENS
        node.value = None
        self.leaves.discard(node)


def same_conversation(node: Node, key: int | None) -> bool:
    """True if what follows the end of `node` belongs to the same conversation.

    The first `key` tokens identify a conversation. Without a key only what follows the very end of
    a leaf belongs to it.
    """
    if key is None:
        return node.end > 0 and not node.children
    return 0 < key <= node.end


class Uses:
    """The uses of a tree's segments. Each verb changes them, and so the eviction order."""

    def __init__(self, edges: Edges):
        self._edges = edges

    def found(self, match: Match, tokens: int, key: int | None = None) -> int:
        """Count a request for `tokens` tokens that matched `match`, made just now.

        Returns the uses of its conversation, 0 if none of that is held. `key` as in
        `same_conversation`. Segments of its conversation after the point where the request diverges
        are marked as replaced unless they were reused: they are evicted first. May split an edge.
        """
        nodes, length = [node for node in match.nodes if node.end <= match.length], match.length
        if match.nodes and length == tokens:
            nodes = list(match.nodes)
        if key is not None and 0 < key <= length < tokens:
            last = match.nodes[-1]
            if length < last.end and last.usage.reach <= length:
                last = self._edges.divide(last, length)
                last.asked = True
                nodes.append(last)
                self._edges.touch([last])
            if length == last.end:
                self._edges.pass_by(last)
        for node in nodes:
            node.usage.count += 1
            node.usage.reach = max(node.usage.reach, min(node.end, length))
        return nodes[-1].usage.count if nodes and same_conversation(nodes[-1], key) else 0

    def renew(self, nodes: Sequence[Node], least: int = 0) -> None:
        """Count a use now, and at least `least` uses, of the path to the last attached of `nodes`.

        For a conversation that no request uses now, but that is expected to continue.
        """
        last = next((node for node in reversed(nodes) if not node.detached), None)
        path = last.path()[1:] if last is not None else []
        self._edges.touch(path)
        for node in path:
            node.usage.count = max(node.usage.count, least)
        for node in path:
            self._edges.compress(node)

    def keep(self, node: Node, wishes: tuple[tuple[int, float], ...]) -> None:
        """Add clients' keep hints, (position, seconds after each use), to the path to `node`."""
        for each in node.path():
            each.usage.keep(tuple(wish for wish in wishes if wish[0] > each.start))

    def wished(self, leaf: Node) -> int:
        """Position up to which a client asks to keep `leaf`; its start without a hint.

        Changes nothing.
        """
        return self._edges.leaves.wished(leaf)

    def evicting(self, leaf: Node, position: int) -> None:
        """Advance the clock, as `leaf` is about to be evicted from `position` on."""
        leaves, held = self._edges.leaves, self._edges.nbytes
        size = (leaf.end - position) * leaves.worth.bytes_per_token + leaf.checkpoint_bytes
        leaves.advance(leaf, size / max(1, held))


__all__ = ["Cut", "Match", "Node", "PrefixTree", "Worth"]


class PrefixTree:
    """Cached values by token prefix: each edge is a segment, each shared prefix is held once.

    A value is addressed by absolute position, so all segments of one value lie on one path and
    never overlap; where another value already held some tokens there is a gap between them.
    Values are compared by identity. Token ids are int32, shape (n,); edges own their copies.
    Not thread-safe: one thread calls it. Counts are kept up to date, and cost nothing to read.
    `uses` counts uses for eviction, scored by `worth`. `now`: seconds.
    """

    def __init__(
        self,
        bytes_per_token: int,
        worth: Worth | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self.bytes_per_token = bytes_per_token
        self.worth = worth or Worth(bytes_per_token)
        self._edges = Edges(self.worth, now)
        self.uses = Uses(self._edges)

    @property
    def root(self) -> Node:
        """The node of no tokens, where every path begins."""
        return self._edges.root

    @property
    def tokens(self) -> int:
        """Tokens held, each shared one counted once."""
        return self._edges.tokens

    @property
    def segments(self) -> int:
        """Edges, that is nodes without the root."""
        return self._edges.segments

    @property
    def checkpoints(self) -> int:
        """Nodes that hold a checkpoint."""
        return self._edges.checkpoints

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of all checkpoints, as they were set."""
        return self._edges.checkpoint_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV of all segments, computed with `bytes_per_token`."""
        return self.tokens * self.bytes_per_token

    def values(self) -> list[Any]:
        """The distinct values that some segment has. Changes nothing."""
        return list(self._edges.holdings)

    def match(self, tokens: Tokens | Iterable[int], touch: bool = True) -> Match:
        """The longest prefix of `tokens` that is held, to the token.

        Changes nothing, except with `touch` the last use of the nodes on the path; a node inside
        which `tokens` diverge is not touched. Raises TypeError if `tokens` is an array that is not
        int32 of shape (n,).
        """
        ids = as_tokens(tokens)
        nodes: list[Node] = []
        length = 0
        node: Node | None = self.root
        while node is not None and length == node.end and length < len(ids):
            node = node.children.get(int(ids[length]))
            if node is not None:
                nodes.append(node)
                length += common_length(node.tokens, ids[length:])
        if touch:
            away = bool(nodes) and length < min(nodes[-1].end, len(ids))
            self._edges.touch(nodes[: len(nodes) - away])
        return Match(
            length,
            tuple(nodes),
            tuple((n.end, n) for n in nodes if n.checkpoint is not None and n.end <= length),
            tuple((n.value, n.start, min(n.end, length)) for n in nodes),
        )

    def insert(self, tokens: Tokens | Iterable[int], value: Any, key: int | None = None) -> Node:
        """Make `tokens` present and return the node that ends at exactly their number.

        Changes the tree: what is held keeps its value, the missing tail becomes a segment of
        `value`, or extends the leaf it follows if that has the same value and no checkpoint. The
        whole path counts as used. A new segment starts with the uses of its conversation, which its
        first `key` tokens identify (see `Uses.found`). The root is returned for no tokens. Lock the
        node before anything else may evict it.

        Raises TypeError as `match` does, and ValueError, with nothing changed, where `value`
        already holds other tokens at the tail's positions (cut those first).
        """
        ids = as_tokens(tokens)
        found = self.match(ids, touch=False)
        if found.length < len(ids):
            self._require_room(value, found)
        node = found.nodes[-1] if found.nodes else self.root
        if found.length < node.end:
            node = self._edges.divide(node, found.length)
        self._edges.touch(node.path()[1:])
        if found.length < len(ids):
            count = node.usage.count if same_conversation(node, key) else 0
            return self._edges.append(node, ids[found.length :], value, count)
        node.asked = bool(node.children)
        return node

    def split_at(self, node: Node, position: int) -> Node:
        """Make a boundary at absolute `position` inside `node`'s edge; return the part above it.

        Changes the tree: a new node takes [start, position) with the same value, locks and last
        use; `node` becomes the part below, and keeps its checkpoint, children and `end`. The
        boundary stays until a lock on it is released or a checkpoint at it is dropped.
        With `position` at `node.end` there is nothing to split, and `node` is returned.

        Raises ValueError where `position` is outside (start, end], or `node` left the tree.
        """
        self._require_attached(node)
        if not node.start < position <= node.end:
            raise ValueError(f"cannot split {node} at {position}")
        if position == node.end:
            return node
        upper = self._edges.divide(node, position)
        upper.asked = True
        return upper

    def set_checkpoint(self, node: Node, state: Any, nbytes: int) -> Any:
        """Keep `state`, of `nbytes`, at `node.end`; return the state it replaces, or None.

        Changes the node and the counts. Raises ValueError for the root, a node that left the
        tree, a state of None or negative bytes.
        """
        self._require_attached(node)
        if node is self.root or state is None or nbytes < 0:
            raise ValueError(f"no checkpoint {state!r} of {nbytes} bytes at {node}")
        return self._edges.put_checkpoint(node, state, nbytes)

    def drop_checkpoint(self, node: Node) -> Any:
        """Remove the checkpoint at `node.end` and return its state; KV stays.

        Changes the node and the counts. An unlocked node that only its checkpoint kept apart is
        merged into its child. Raises ValueError where there is none.
        """
        if node.checkpoint is None:
            raise ValueError(f"{node} has no checkpoint")
        state, _ = self._edges.take_checkpoint(node)
        node.asked = False
        self._edges.compress(node)
        return state

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it from being cut, merged away or evicted.

        Changes the lock counts on the path; one `unlock` undoes one `lock`. Raises ValueError
        where `node` left the tree.
        """
        self._require_attached(node)
        for each in node.path():
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`.

        Changes the lock counts on the path. Boundaries that nothing needs any more are merged
        away, so `node` may leave the tree. Raises ValueError where it is not locked.
        """
        self._require_attached(node)
        if node.locks == 0:
            raise ValueError(f"{node} is not locked")
        path = node.path()
        for each in path:
            each.locks -= 1
        for each in path[1:]:
            if each.locks == 0:
                self._edges.settle(each)

    def holders(self, value: Any) -> list[Node]:
        """All nodes that hold `value`, top down; they lie on one path. Changes nothing."""
        return list(self._edges.holdings.of(value))

    def retarget(self, nodes: Sequence[Node], value: Any) -> None:
        """Let `value` hold the KV of `nodes` from now on, at the same absolute positions.

        Changes the nodes; those that then continue a neighbour of the same value are merged.
        Raises ValueError, with nothing changed, where a node is the root or left the tree, or
        where they and the nodes that hold `value` already do not all lie on one path.
        """
        together = {*nodes, *self._edges.holdings.of(value)}
        if not together:
            return
        path = set(max(together, key=lambda node: node.end).path()) - {self.root}
        if not together <= path or any(node.detached for node in together):
            raise ValueError(f"{value!r} cannot hold segments of two branches")
        for node in dict.fromkeys(nodes):
            self._edges.holdings.remove(node)
            node.value = value
            self._edges.holdings.add(node)
        for node in {above for node in nodes if (above := node.parent)} | set(nodes):
            self._edges.compress(node)

    def live_range(self, value: Any) -> tuple[int, int] | None:
        """The first and the last position, as [start, end), that nodes hold with `value`.

        None if no node does. Tokens inside may belong to another value. O(1), changes nothing.
        """
        nodes = self._edges.holdings.of(value)
        return (nodes[0].start, nodes[-1].end) if nodes else None

    def least_leaf(self) -> Node | None:
        """The unlocked leaf with the lowest score, or None. Removes nothing. O(log n)."""
        return self._edges.leaves.first()

    def useless(self, node: Node) -> bool:
        """True if `node` has no child, no lock and no checkpoint."""
        if node is self.root or node.detached or node.locks:
            return False
        return not node.children and node.checkpoint is None

    def cut(self, node: Node, position: int) -> Cut:
        """Drop [position, end) of an unlocked leaf, and its checkpoint; say what was freed.

        Changes the tree. With `position` at `node.start` the node is removed; its parent may then
        be a leaf, or be merged into the one child of the same value that it has left.
        Raises ValueError where `position` is outside [start, end), or where `node` is the root,
        locked, no leaf, or no longer in the tree.
        """
        self._require_attached(node)
        if node.locks or node.children or not node.start <= position < node.end:
            raise ValueError(f"cannot cut {node} with {node.locks} locks at {position}")
        value, end, tokens = node.value, node.end, node.end - position
        state, nbytes = self._edges.take_checkpoint(node)
        if position > node.start:
            self._edges.shorten(node, position)
        else:
            self._edges.remove(node)
        return Cut(value, position, end, tokens, state, nbytes)

    def _require_attached(self, node: Node) -> None:
        if node.detached:
            raise ValueError(f"{node} left the tree")

    def _require_room(self, value: Any, found: Match) -> None:
        """Raise ValueError if `value` holds tokens elsewhere than on the matched path."""
        held = self._edges.holdings.of(value)
        if held and (held[-1] not in found.nodes or held[-1].end > found.length):
            raise ValueError(f"{value!r} holds other tokens up to {held[-1].end} already")
