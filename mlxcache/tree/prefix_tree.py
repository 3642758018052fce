"""A compressed radix tree over token ids, which treats values and checkpoints as opaque objects."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mlxcache.common_prefix import common_length
from mlxcache.tree.eviction import EvictionClock, EvictionOrder, Key, Worth
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
    """Map from each value to the nodes that hold it. Values are compared by identity.

    All nodes of a value lie on one path, because a value holds at most one token per position.
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
    change is allowed: the caller does.
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

        All of them get the same tick, so none counts as more recently used than another.
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
            node.tokens = np.concatenate((node.tokens, tail))
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
        child.tokens = np.concatenate((node.tokens, child.tokens))
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
        """Remove `leaf` from the tree. It must have no checkpoint."""
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
        """Update a node that lost its last lock: make it evictable, or merge it into its child."""
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


def same_conversation(node: Node, key: int | None) -> bool:
    """Return whether tokens appended after `node` belong to the same conversation as `node`.

    The first `key` tokens of a prompt identify its conversation, so the answer is True if `node`
    ends at or after them. With `key` None it is True only for a leaf.
    """
    if key is None:
        return node.end > 0 and not node.children
    return 0 < key <= node.end


class Uses:
    """Usage counts of a tree's segments. Each method but `wished` changes the eviction order."""

    def __init__(self, edges: Edges):
        self._edges = edges

    def found(self, match: Match, tokens: int, key: int | None = None) -> int:
        """Count a request of `tokens` tokens whose lookup, made just before, returned `match`.

        Returns the number of uses of its conversation, or 0 if the tree holds none of it. The first
        `key` tokens identify the conversation (see `same_conversation`). Segments of the
        conversation after the point where the request diverges are marked as replaced, and so
        evicted first, unless they were reused. May split an edge.
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
        """Mark the path to the last of `nodes` that is still in the tree as used now.

        The number of uses of each node on it is raised to at least `least`. Called for a
        conversation that no request uses at the moment, but that is expected to continue.
        """
        last = next((node for node in reversed(nodes) if not node.detached), None)
        path = last.path()[1:] if last is not None else []
        self._edges.touch(path)
        for node in path:
            node.usage.count = max(node.usage.count, least)
        for node in path:
            self._edges.compress(node)

    def keep(self, node: Node, wishes: tuple[tuple[int, float], ...]) -> None:
        """Add the clients' keep hints `wishes` to the nodes on the path to `node`.

        Each hint is a position up to which to keep tokens, and the seconds to keep them after each
        use.
        """
        for each in node.path():
            each.usage.keep(tuple(wish for wish in wishes if wish[0] > each.start))

    def wished(self, leaf: Node) -> int:
        """Return the highest position inside `leaf` up to which a client's keep hint is valid.

        Returns the start of the leaf if there is none; a hint for its end is not considered.
        Changes nothing.
        """
        return self._edges.leaves.wished(leaf)

    def evicting(self, leaf: Node, position: int) -> None:
        """Advance the eviction clock before part of `leaf` is evicted.

        The evicted part is from `position` to the end of the leaf.
        """
        leaves, held = self._edges.leaves, self._edges.nbytes
        size = (leaf.end - position) * leaves.worth.bytes_per_token + leaf.checkpoint_bytes
        leaves.advance(leaf, size, held)


__all__ = ["Cut", "Match", "Node", "PrefixTree", "Worth"]


class PrefixTree:
    """Index of cached values by token prefix, a compressed radix tree.

    A value is any object that holds KV by position, such as a lineage. Each edge is a segment, and
    each shared prefix is held once. A value is addressed by absolute position, so all segments of
    one value lie on one path and never overlap. Where another value already held some tokens, a
    value has a gap. Values are compared by identity. Token ids are int32 of shape (n,), and edges
    own copies of them. Not thread-safe: only one thread may call it. Counts are kept up to date
    with each change, and reading them takes O(1).

    `bytes_per_token`: bytes of KV. `worth`: scores segments for eviction. `now`: returns seconds.
    `clock`: the eviction clock, which several trees may share. `uses` counts the uses of segments.
    """

    def __init__(
        self,
        bytes_per_token: int,
        worth: Worth | None = None,
        now: Callable[[], float] = time.monotonic,
        clock: EvictionClock | None = None,
    ):
        self.bytes_per_token = bytes_per_token
        self.worth = worth or Worth(bytes_per_token)
        self._edges = Edges(self.worth, now, clock)
        self.uses = Uses(self._edges)

    @property
    def root(self) -> Node:
        """The node of zero tokens, at which every path begins."""
        return self._edges.root

    @property
    def tokens(self) -> int:
        """Number of tokens in the tree; a token of a shared prefix is counted once."""
        return self._edges.tokens

    @property
    def segments(self) -> int:
        """Number of segments, that is of nodes without the root."""
        return self._edges.segments

    @property
    def checkpoints(self) -> int:
        """Number of nodes with a checkpoint."""
        return self._edges.checkpoints

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all checkpoints: the sum of the sizes given to `set_checkpoint`."""
        return self._edges.checkpoint_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV of all segments: `tokens` times `bytes_per_token`."""
        return self.tokens * self.bytes_per_token

    def values(self) -> list[Any]:
        """Return a list of the distinct values of all segments. Changes nothing."""
        return list(self._edges.holdings)

    def match(self, tokens: Tokens | Iterable[int], touch: bool = True) -> Match:
        """Find the longest prefix of `tokens` in the tree; it may end inside an edge.

        Changes nothing but, with `touch`, the time of last use of the nodes on the path; a node
        inside which `tokens` diverge is not touched. Raises TypeError if `tokens` is an array that
        is not int32 of shape (n,).
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
        """Add `tokens` to the tree, and return the node that ends at position `len(tokens)`.

        Tokens already in the tree keep their value. The missing tail becomes a new segment of
        `value`, or extends the leaf that it follows if the leaf has the same value and no
        checkpoint. The whole path counts as used. A new segment starts with the uses of its
        conversation, which its first `key` tokens identify (see `Uses.found`). Without tokens, the
        root is returned. The caller must lock the node before anything else may evict it.

        Raises TypeError if `tokens` is an array that is not int32 of shape (n,). Raises ValueError,
        with nothing changed, if there is a tail and `value` already holds tokens outside of the
        part of `tokens` that the tree has; cut those first.
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
        """Create a boundary inside the edge of `node` at absolute `position`.

        Returns the part above the boundary. Changes the tree: a new node takes [start, position)
        with the same value, locks and last use. `node` becomes the lower part, and keeps its
        checkpoint, children and `end`. The boundary stays until a lock on it is released or a
        checkpoint at it is dropped. If `position` is `node.end`, nothing is split and `node` is
        returned.

        Raises ValueError if `position` is not in (start, end], or if `node` has left the tree.
        """
        self._require_attached(node)
        if not node.start < position <= node.end:
            raise ValueError(f"cannot split {node} at {position}: expected a position in it")
        if position == node.end:
            return node
        upper = self._edges.divide(node, position)
        upper.asked = True
        return upper

    def set_checkpoint(self, node: Node, state: Any, nbytes: int) -> Any:
        """Store `state`, of `nbytes` bytes, as the checkpoint at `node.end`.

        Returns the state that it replaces, or None. Changes the node and the counts. Raises
        ValueError for the root, for a node that has left the tree, if `state` is None, or if
        `nbytes` is negative.
        """
        self._require_attached(node)
        if node is self.root or state is None or nbytes < 0:
            raise ValueError(
                f"cannot set a checkpoint of {nbytes} bytes at {node}: expected a state, a size of "
                "0 or more, and a node below the root"
            )
        return self._edges.put_checkpoint(node, state, nbytes)

    def drop_checkpoint(self, node: Node) -> Any:
        """Remove the checkpoint at `node.end`, and return its state. The KV of the node stays.

        Changes the node and the counts. An unlocked node that was separate only because of its
        checkpoint is merged into its child. Raises ValueError if the node has no checkpoint.
        """
        if node.checkpoint is None:
            raise ValueError(f"{node} has no checkpoint")
        state, _ = self._edges.take_checkpoint(node)
        node.asked = False
        self._edges.compress(node)
        return state

    def lock(self, node: Node) -> None:
        """Protect `node` and all nodes above it from being cut, merged or evicted.

        Changes the lock counts on the path; each `lock` needs one `unlock`. Raises ValueError if
        `node` has left the tree.
        """
        self._require_attached(node)
        for each in node.path():
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`.

        Changes the lock counts on the path. Boundaries that are no longer needed are merged away,
        so `node` may leave the tree. Raises ValueError if `node` is not locked.
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
        """Return all nodes that hold `value`, from the top down. Changes nothing.

        The nodes lie on one path.
        """
        return list(self._edges.holdings.of(value))

    def retarget(self, nodes: Sequence[Node], value: Any) -> None:
        """Make `value` the holder of the KV of `nodes`, at the same absolute positions.

        Changes the nodes, and merges those that now continue a neighbour with the same value.
        Raises ValueError, with nothing changed, if a node is the root or has left the tree, or if
        `nodes` and the nodes that already hold `value` do not all lie on one path.
        """
        together = {*nodes, *self._edges.holdings.of(value)}
        if not together:
            return
        path = set(max(together, key=lambda node: node.end).path()) - {self.root}
        if not together <= path or any(node.detached for node in together):
            raise ValueError(f"{value!r} cannot hold segments of two branches: expected one path")
        for node in dict.fromkeys(nodes):
            self._edges.holdings.remove(node)
            node.value = value
            self._edges.holdings.add(node)
        for node in {above for node in nodes if (above := node.parent)} | set(nodes):
            self._edges.compress(node)

    def live_range(self, value: Any) -> tuple[int, int] | None:
        """Return the range [start, end) from the first to the last position that `value` holds.

        `value`: an object that was given to `insert`, such as the KV of tokens. Tokens inside the
        range may belong to other values. Returns None if no node holds `value`. Takes O(1) and
        changes nothing.
        """
        nodes = self._edges.holdings.of(value)
        return (nodes[0].start, nodes[-1].end) if nodes else None

    def least_leaf(self) -> Node | None:
        """Return the unlocked leaf with the lowest score, or None if there is none.

        Removes nothing. Takes O(log n).
        """
        return self._edges.leaves.first()

    def rank(self, leaf: Node) -> Key:
        """Return the sort key of `leaf` for eviction. Changes nothing.

        Of the leaves of several trees that share an eviction clock, the one with the lowest key is
        evicted first.
        """
        return self._edges.leaves.key(leaf)

    def useless(self, node: Node) -> bool:
        """Return whether `node` is in the tree and has no child, no lock and no checkpoint.

        False for the root.
        """
        if node is self.root or node.detached or node.locks:
            return False
        return not node.children and node.checkpoint is None

    def cut(self, node: Node, position: int) -> Cut:
        """Remove [position, end) of an unlocked leaf, with its checkpoint.

        Returns the removed part. Changes the tree. If `position` is `node.start`, the whole node is
        removed; its parent may then become a leaf, or be merged into its one remaining child of the
        same value. Raises ValueError if `position` is not in [start, end), or if `node` is the
        root, locked, not a leaf, or no longer in the tree.
        """
        self._require_attached(node)
        if node.locks or node.children or not node.start <= position < node.end:
            raise ValueError(
                f"cannot cut {node} with {node.locks} locks at {position}: expected an "
                "unlocked leaf, and a position in it"
            )
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
        """Raise ValueError if `value` holds tokens outside of the prefix `found`."""
        held = self._edges.holdings.of(value)
        if held and (held[-1] not in found.nodes or held[-1].end > found.length):
            raise ValueError(
                f"{value!r} already holds other tokens up to {held[-1].end}: cut those first"
            )
