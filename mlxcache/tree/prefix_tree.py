"""A compressed radix tree over token ids, which treats values and checkpoints as opaque objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mlxcache.common_prefix import common_length
from mlxcache.tree.edges import Edges
from mlxcache.tree.eviction import EvictionClock, Key, Worth
from mlxcache.tree.node import (
    Cut,
    Match,
    Node,
)
from mlxcache.tree.uses import Uses, same_conversation
from mlxcache.types import Tokens

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

    def match(self, ids: Tokens, touch: bool = True) -> Match:
        """Find the longest prefix of `ids` in the tree; it may end inside an edge.

        Changes nothing but, with `touch`, the time of last use of the nodes on the path; a node
        inside which `ids` diverge is not touched.
        """
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
        return Match.of(nodes, length)

    def insert(self, ids: Tokens, value: Any, key: int | None = None) -> Node:
        """Add `ids` to the tree, and return the node that ends at position `len(ids)`.

        Tokens already in the tree keep their value. The missing tail becomes a new segment of
        `value`, which starts with the uses of its conversation; the first `key` tokens identify the
        conversation; if it is None, a tail that follows a leaf belongs to the leaf's conversation.
        But the tail extends the leaf that it follows if the leaf has the same value, no checkpoint,
        and no more uses than a new segment would start with. The whole path counts as used. Without
        tokens, the root is returned. The caller must lock the node before anything else may evict
        it.

        Raises ValueError, with nothing changed, if there is a tail and `value` already holds tokens
        outside of the part of `ids` that the tree has; cut those first.
        """
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
        """Return the unlocked leaf to evict next, or None if there is no unlocked leaf.

        It is the one with the lowest sort key; see `rank`. Removes nothing. Takes O(log n).
        """
        return self._edges.leaves.first()

    def rank(self, leaf: Node) -> Key:
        """Return the sort key of `leaf` for eviction, see `eviction.Key`. Changes nothing.

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
        """Raise ValueError if `value` holds tokens outside of the prefix that `found` matched."""
        held = self._edges.holdings.of(value)
        if held and (held[-1] not in found.nodes or held[-1].end > found.length):
            raise ValueError(
                f"{value!r} already holds other tokens up to {held[-1].end}: cut those first"
            )
