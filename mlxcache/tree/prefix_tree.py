"""A compressed radix tree over token ids, which treats values and checkpoints as opaque objects."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any
from weakref import ref

from mlxcache.common_prefix import common_length
from mlxcache.lru import LRU
from mlxcache.tree.eviction import EvictionClock, EvictionOrder, Key, Worth
from mlxcache.tree.node import Cut, Match, Node, Usage, unneeded
from mlxcache.types import NO_TOKENS, Tokens, join_ids

MOST_ENDS = 20_000


class Holdings:
    """Map from each value, by identity, to the nodes that hold it, which lie on one path."""

    def __init__(self) -> None:
        # A node keeps its value alive, so an id is not reused while it is a key here.
        self._nodes: dict[int, list[Node]] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter([nodes[0].value for nodes in self._nodes.values()])

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, value: Any) -> list[Node]:
        """Return the nodes that hold `value`, top down: the list itself, not to be changed."""
        return self._nodes.get(id(value), [])

    def add(self, node: Node) -> None:
        insort(self._nodes.setdefault(id(node.value), []), node, key=attrgetter("start"))

    def remove(self, node: Node) -> None:
        nodes = self._nodes[id(node.value)]
        nodes.remove(node)
        if not nodes:
            del self._nodes[id(node.value)]


def _evictable(node: Node) -> bool:
    return not (node.locks or node.children)


def _same_conversation(node: Node, key: int | None) -> bool:
    """Return whether tokens appended after `node` belong to the same conversation as `node`.

    The first `key` tokens of a prompt identify its conversation.
    """
    if key is None:
        return node.end > 0 and not node.children
    return 0 < key <= node.end


class PrefixTree:
    """Index of cached values by token prefix, with the order in which its leaves are evicted.

    A value is any object that holds KV by position, such as a lineage. Each edge is a segment, and
    each shared prefix is held once. All segments of one value lie on one path and never overlap;
    where another value already held some tokens, a value has a gap. Token ids are int32 of shape
    (n,), and edges own copies of them. `now` returns seconds, for keep hints. Not thread-safe.
    """

    def __init__(
        self,
        bytes_per_token: int,
        worth: Worth | None = None,
        now: Callable[[], float] = time.monotonic,
        clock: EvictionClock | None = None,
        order: type[EvictionOrder] = EvictionOrder,
    ):
        self.bytes_per_token = bytes_per_token
        self.root = Node(None, NO_TOKENS, 0, None, 0)
        self.tokens = 0
        self.segments = 0
        self.checkpoints = 0
        self.checkpoint_bytes = 0
        self._now = now
        self._clock = clock or EvictionClock(lambda: self.kv_bytes + self.checkpoint_bytes)
        self._holdings = Holdings()
        self._leaves = order(worth or Worth(bytes_per_token), _evictable, self._clock, now)

    @property
    def kv_bytes(self) -> int:
        return self.tokens * self.bytes_per_token

    # -- finding -----------------------------------------------------------------------------------

    def match(self, ids: Tokens, touch: bool = True) -> Match:
        """Find the longest prefix of `ids` in the tree; it may end inside an edge.

        Changes nothing but, with `touch`, the time of last use of the nodes that `ids` pass.
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
            self._touch(nodes[: len(nodes) - away])
        return Match.of(nodes, length)

    @property
    def value_count(self) -> int:
        return len(self._holdings)

    def values(self) -> list[Any]:
        return list(self._holdings)

    def holders(self, value: Any) -> list[Node]:
        return list(self._holdings.of(value))

    def live_range(self, value: Any) -> tuple[int, int] | None:
        """Return the range [start, end) that `value` holds, maybe with gaps, or None. O(1)."""
        nodes = self._holdings.of(value)
        return (nodes[0].start, nodes[-1].end) if nodes else None

    def useless(self, node: Node) -> bool:
        if node is self.root or node.detached or node.locks:
            return False
        return not node.children and node.checkpoint is None

    # -- changing ----------------------------------------------------------------------------------

    def insert(self, ids: Tokens, value: Any, key: int | None = None) -> Node:
        """Add `ids` to the tree, and return the node that ends at position `len(ids)`.

        Tokens already in the tree keep their value. The missing tail becomes a new segment of
        `value`, which starts with the uses of its conversation (that of the first `key` tokens, or
        if None, of the leaf that the tail follows), or extends the leaf if that has the same value,
        no checkpoint, and no more uses. The caller must lock the node before anything else may
        evict it.

        Raises ValueError, with nothing changed, if there is a tail and `value` already holds tokens
        outside of the part of `ids` that the tree has; cut those first.
        """
        found = self.match(ids, touch=False)
        if found.length < len(ids):
            self._require_room(value, found)
        node = found.nodes[-1] if found.nodes else self.root
        if found.length < node.end:
            node = self._divide(node, found.length)
        self._touch(node.path()[1:])
        if found.length < len(ids):
            count = node.usage.count if _same_conversation(node, key) else 0
            return self._append(node, ids[found.length :], value, count)
        node.asked = bool(node.children)
        return node

    def split_at(self, node: Node, position: int) -> Node:
        """Create a boundary in the edge of `node` at `position`; return the part above.

        It stays until a lock on it is released or a checkpoint at it is dropped.
        """
        self._require_attached(node)
        if not node.start < position <= node.end:
            raise ValueError(f"cannot split {node} at {position}: expected a position in it")
        if position == node.end:
            return node
        upper = self._divide(node, position)
        upper.asked = True
        return upper

    def set_checkpoint(self, node: Node, state: Any, nbytes: int) -> Any:
        """Store `state` as the checkpoint at `node.end`; return the one that it replaces."""
        self._require_attached(node)
        if node is self.root or state is None or nbytes < 0:
            raise ValueError(
                f"cannot set a checkpoint of {nbytes} bytes at {node}: expected a state, a size of "
                "0 or more, and a node below the root"
            )
        replaced, _ = self._take_checkpoint(node)
        node.checkpoint, node.checkpoint_bytes = state, nbytes
        node.asked = False
        self.checkpoints += 1
        self.checkpoint_bytes += nbytes
        self._leaves.renew(node)
        return replaced

    def drop_checkpoint(self, node: Node) -> Any:
        """Remove the checkpoint at `node.end`, and return its state. The KV of the node stays."""
        if node.checkpoint is None:
            raise ValueError(f"{node} has no checkpoint")
        state, _ = self._take_checkpoint(node)
        node.asked = False
        self._compress(node)
        return state

    def lock(self, node: Node) -> None:
        """Protect `node` and all nodes above it from being cut, merged or evicted."""
        self._require_attached(node)
        for each in node.path():
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Boundaries no longer needed are merged, so `node` may leave the tree."""
        self._require_attached(node)
        if node.locks == 0:
            raise ValueError(f"{node} is not locked")
        path = node.path()
        for each in path:
            each.locks -= 1
        for each in path[1:]:
            if each.locks == 0:
                each.asked = False
                if not each.children:
                    self._leaves.add(each)
                self._compress(each)

    def retarget(self, nodes: Sequence[Node], value: Any) -> None:
        """Make `value` the holder of the KV of `nodes`, at the same absolute positions.

        Merges those that now continue a neighbour with the same value.
        """
        together = {*nodes, *self._holdings.of(value)}
        if not together:
            return
        path = set(max(together, key=lambda node: node.end).path()) - {self.root}
        if not together <= path or any(node.detached for node in together):
            raise ValueError(f"{value!r} cannot hold segments of two branches: expected one path")
        for node in dict.fromkeys(nodes):
            self._holdings.remove(node)
            node.value = value
            self._holdings.add(node)
        for node in {above for node in nodes if (above := node.parent)} | set(nodes):
            self._compress(node)

    def cut(self, node: Node, position: int) -> Cut:
        """Remove [position, end) of an unlocked leaf, with its checkpoint, and return that part."""
        self._require_attached(node)
        if node.locks or node.children or not node.start <= position < node.end:
            raise ValueError(
                f"cannot cut {node} with {node.locks} locks at {position}: expected an "
                "unlocked leaf, and a position in it"
            )
        tokens = node.end - position
        kept = node.tokens[: position - node.start].copy()
        cut = Cut(node.value, position, node.end, tokens, *self._take_checkpoint(node))
        self.tokens -= tokens
        if position > node.start:
            node.tokens = kept
            node.end = position
            self._leaves.renew(node)
            return cut
        parent = node.parent
        assert parent is not None
        del parent.children[int(node.tokens[0])]
        self.segments -= 1
        self._holdings.remove(node)
        self._detach(node)
        if parent is not self.root and not parent.children:
            self._leaves.add(parent)
        self._compress(parent)
        return cut

    # -- uses and eviction -------------------------------------------------------------------------

    def count_use(self, match: Match, tokens: int, key: int | None = None) -> int:
        """Count a request of `tokens` tokens whose lookup, made just before, returned `match`.

        Returns the number of uses of its conversation, or 0 if it reuses no segment of it. The
        first `key` tokens identify the conversation. Segments of it after the point where the
        request diverges are marked as replaced, so that they are evicted first, unless a request
        has reused them. May split an edge.
        """
        nodes, length = [node for node in match.nodes if node.end <= match.length], match.length
        if match.nodes and length == tokens:
            nodes = list(match.nodes)
        if key is not None and 0 < key <= length < tokens:
            last = match.nodes[-1]
            if length < last.end and last.usage.reach <= length:
                last = self._divide(last, length)
                last.asked = True
                nodes.append(last)
                self._touch([last])
            if length == last.end:
                self._pass_by(last)
        for node in nodes:
            node.usage.count += 1
            node.usage.reach = max(node.usage.reach, min(node.end, length))
        return nodes[-1].usage.count if nodes and _same_conversation(nodes[-1], key) else 0

    def renew(self, nodes: Sequence[Node], least: int = 0) -> None:
        """Mark the path to the last of `nodes` still in the tree as used, `least` times or more."""
        last = next((node for node in reversed(nodes) if not node.detached), None)
        path = last.path()[1:] if last is not None else []
        self._touch(path)
        for node in path:
            node.usage.count = max(node.usage.count, least)
        for node in path:
            self._compress(node)

    def keep(self, node: Node, wishes: tuple[tuple[int, float], ...]) -> None:
        for each in node.path():
            each.usage.keep(tuple(wish for wish in wishes if wish[0] > each.start))

    def wished(self, leaf: Node) -> int:
        """Return the highest position in `leaf` up to which a keep hint holds, else its start."""
        now, usage = self._now(), leaf.usage
        within = [at for at, _ in usage.keeps if leaf.start < at < leaf.end]
        return max((at for at in within if usage.until(at) > now), default=leaf.start)

    def leaves(self) -> list[Node]:
        below, found = [self.root], list[Node]()
        for node in below:
            below += node.children.values()
            if not node.children and node is not self.root:
                found.append(node)
        return found

    def least_leaf(self) -> Node | None:
        """Return the unlocked leaf to evict next, or None if there is none. O(log n)."""
        return self._leaves.first()

    def rank(self, leaf: Node) -> Key:
        """Return the sort key of `leaf`, comparable between trees that share an eviction clock."""
        return self._leaves.key(leaf)

    def note_eviction(self, leaf: Node, position: int) -> None:
        """Advance the eviction clock before the tokens of `leaf` from `position` on are evicted."""
        size = (leaf.end - position) * self.bytes_per_token + leaf.checkpoint_bytes
        self._leaves.advance(leaf, size)

    # -- edges: these keep counts, holdings and the eviction order consistent ----------------------
    # They copy ids first, so that a copy that finds no memory changes nothing.

    def _touch(self, nodes: Iterable[Node]) -> None:
        """Mark `nodes` as used now: with one tick, none counts as more recent than another."""
        self._clock.tick()
        for node in nodes:
            node.used_at = self._clock.ticks
            node.usage.clock = self._clock.now
            node.usage.seen = self._now()
            node.usage.replaced = False

    def _pass_by(self, node: Node) -> None:
        """Mark the segments below `node` as replaced: evicted before all others.

        Their conversation continues in another branch. Segments that were reused are not marked,
        nor is anything below them. Takes O(1), amortised over insertions.
        """
        pending = list(node.children.values())
        while pending:
            each = pending.pop()
            if not each.usage.replaced and each.usage.reach <= each.start:
                each.usage.replaced = True
                self._leaves.renew(each)
                pending += each.children.values()

    def _append(self, node: Node, tail: Tokens, value: Any, count: int) -> Node:
        """Append a copy of `tail` below `node`, or to it if its uses are at most `count`."""
        grows = node is not self.root and node.value is value and count >= node.usage.count
        if grows and not node.children and node.checkpoint is None:
            node.tokens = join_ids(node.tokens, tail)
            node.end += len(tail)
            self.tokens += len(tail)
            node.used_at = self._clock.ticks
            return node
        leaf = Node(node, tail.copy(), node.end, value, self._clock.ticks)
        leaf.usage = Usage(self._clock.now, count, seen=self._now())
        node.children[int(tail[0])] = leaf
        self.tokens += len(tail)
        self.segments += 1
        self._holdings.add(leaf)
        self._leaves.add(leaf)
        return leaf

    def _divide(self, node: Node, position: int) -> Node:
        """Move [start, position) of `node` to a new node above it, and return the new node."""
        at = position - node.start
        head, tail = node.tokens[:at].copy(), node.tokens[at:].copy()
        upper = Node(node.parent, head, node.start, node.value, node.used_at)
        upper.locks = node.locks
        upper.usage = replace(node.usage)
        upper.children[int(tail[0])] = node
        self._adopt(upper)
        node.tokens = tail
        node.start = position
        node.parent = upper
        self.segments += 1
        self._holdings.add(upper)
        self._leaves.renew(node)
        return upper

    def _compress(self, node: Node) -> None:
        if node is self.root or node.detached or not unneeded(node):
            return
        (child,) = node.children.values()
        child.tokens = join_ids(node.tokens, child.tokens)
        self._holdings.remove(node)
        self.segments -= 1
        child.start = node.start
        child.parent = node.parent
        child.used_at = max(child.used_at, node.used_at)
        child.usage.absorb(node.usage)
        self._adopt(child)
        self._detach(node)

    def _take_checkpoint(self, node: Node) -> tuple[Any, int]:
        taken = (node.checkpoint, node.checkpoint_bytes)
        if node.checkpoint is not None:
            self.checkpoints -= 1
            self.checkpoint_bytes -= node.checkpoint_bytes
            node.checkpoint, node.checkpoint_bytes = None, 0
        return taken

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
        self._leaves.discard(node)

    def _require_attached(self, node: Node) -> None:
        if node.detached:
            raise ValueError(f"{node} left the tree")

    def _require_room(self, value: Any, found: Match) -> None:
        """Raise ValueError if `value` holds tokens outside of the prefix that `found` matched."""
        held = self._holdings.of(value)
        if held and (held[-1] not in found.nodes or held[-1].end > found.length):
            raise ValueError(
                f"{value!r} already holds other tokens up to {held[-1].end}: cut those first"
            )


@dataclass(frozen=True, slots=True)
class _End:
    """The first `length` tokens of a path are in the tree, and end in `node`.

    `edge`: the token ids of `node` then, which the tree replaces by others and never changes; held
    weakly, because the tree may drop them. `following`: the path's next token id, None at its end.
    """

    node: Node
    edge: ref[Tokens]
    length: int
    following: int | None

    def holds(self) -> bool:
        """Return whether the path still ends here, as no token was added or removed at its end."""
        node = self.node
        if self.edge() is not node.tokens:
            return False
        return self.length < node.end or self.following not in node.children


class PathEnds:
    """Remembers where paths end in `tree`: compared once, and again where the tree has changed."""

    def __init__(self, tree: PrefixTree):
        self._tree = tree
        self._ends: LRU[Hashable, _End] = LRU(MOST_ENDS)

    def match(self, key: Hashable, ids: Tokens | None) -> Match | None:
        """Return the match of a path, or None if `ids` is None and tokens must be compared.

        `key` stands for the path: it has the same token ids in each call. Changes nothing.
        """
        if not self._tree.root.children:
            return Match.of((), 0)
        end = self._ends.get(key)
        if end is not None and end.holds():
            return Match.of(end.node.path()[1:], end.length)
        if ids is None:
            return None
        match = self._tree.match(ids, touch=False)
        node = match.nodes[-1] if match.nodes else self._tree.root
        following = int(ids[match.length]) if match.length < len(ids) else None
        self._ends.put(key, _End(node, ref(node.tokens), match.length, following))
        return match
