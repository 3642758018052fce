"""Data types of a prefix tree: nodes with their usage, and the results of `match` and `cut`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxcache.types import Tokens


@dataclass(slots=True)
class Usage:
    """Usage statistics of one segment, for eviction. Only the tree changes them.

    `clock`: the eviction order's clock at the last use. `count`: number of requests that reused the
    segment; a new segment of a conversation starts with the count of that conversation. `reach`:
    the highest position up to which a request reused it. `replaced`: the segment was never reused,
    and a later request of its conversation diverged before it. `keeps`: clients' keep hints, as
    pairs of a position up to which to keep the tokens and the seconds to keep them after each use.
    `seen`: time of the last use, in seconds of a monotonic clock.
    """

    clock: float = 0.0
    count: int = 0
    reach: int = 0
    replaced: bool = False
    keeps: tuple[tuple[int, float], ...] = ()
    seen: float = 0.0

    def copy(self) -> Usage:
        """Return a copy, for the second part of a segment that is split."""
        return replace(self)

    def absorb(self, other: Usage) -> None:
        """Merge the usage `other` of a neighbour whose tokens are merged into this segment.

        Of each number the higher one stays, and keep hints of both. The result counts as
        replaced only if both were.
        """
        self.clock = max(self.clock, other.clock)
        self.count = max(self.count, other.count)
        self.reach = max(self.reach, other.reach)
        self.seen = max(self.seen, other.seen)
        self.replaced = self.replaced and other.replaced
        self.keep(other.keeps)

    def keep(self, wishes: tuple[tuple[int, float], ...]) -> None:
        """Add the keep hints `wishes`, pairs of position and seconds after each use.

        Of two hints with the same seconds, only the one with the higher position is stored.
        """
        if wishes and wishes != self.keeps:
            furthest: dict[float, int] = {}
            for position, seconds in (*self.keeps, *wishes):
                furthest[seconds] = max(position, furthest.get(seconds, 0))
            self.keeps = tuple((position, seconds) for seconds, position in furthest.items())

    def until(self, position: int) -> float:
        """Return the time until which clients want the tokens before `position` kept.

        It is in seconds of the same clock as `seen`; 0 if no keep hint reaches to `position`.
        """
        longest = max((long for at, long in self.keeps if at >= position), default=None)
        return 0.0 if longest is None else self.seen + longest


class Node:
    """One segment: the tokens of [start, end), whose KV is in `value` at those positions.

    Only the tree changes it. The identity of a node follows its end: splitting an edge keeps the
    node as the lower part, and merging two nodes keeps the lower one. Any later call that changes
    the tree may extend, merge or remove the node unless it is locked.

    `tokens`: int32, shape (end - start,), owned by the node. `children`: the nodes directly below,
    by the first token id of each. `checkpoint`: the state at `end`, of `checkpoint_bytes` bytes, or
    None. `locks`: number of locks on this node and on all nodes below it. `used_at`: the tree's
    count of uses (`EvictionClock.ticks`) at the node's last use. `asked`: a caller requested a
    boundary at `end` and has neither locked the node nor set a checkpoint since; such a node is not
    merged with its child.
    """

    __slots__ = (
        "asked",
        "checkpoint",
        "checkpoint_bytes",
        "children",
        "end",
        "locks",
        "parent",
        "start",
        "tokens",
        "usage",
        "used_at",
        "value",
    )

    def __init__(self, parent: Node | None, tokens: Tokens, start: int, value: Any, used_at: int):
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.tokens = tokens
        self.start = start
        self.end = start + len(tokens)
        self.value = value
        self.checkpoint: Any = None
        self.checkpoint_bytes = 0
        self.locks = 0
        self.used_at = used_at
        self.usage = Usage()
        self.asked = False

    def __repr__(self) -> str:
        return f"<Node [{self.start}, {self.end}) of {self.value!r}, {len(self.children)} children>"

    @property
    def detached(self) -> bool:
        """True if the node has been removed from the tree or merged into its child.

        Always False for the root.
        """
        return self.parent is None and self.end > 0

    def path(self) -> list[Node]:
        """Return the nodes from the root down to this one, both included."""
        nodes = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """Result of a lookup: the longest prefix of some tokens that a tree held at that time.

    `length`: number of tokens that match. `nodes`: the nodes on the path from the top down, without
    the root; the last one may match only in part. `checkpoints`: pairs `(position, node)` in
    ascending order, for fully matched nodes with a checkpoint. `segments`: `(value, start, end)`
    for each of `nodes`, limited to the matched part. Later changes of the tree change the nodes,
    but no other field.
    """

    length: int
    nodes: tuple[Node, ...]
    checkpoints: tuple[tuple[int, Node], ...]
    segments: tuple[tuple[Any, int, int], ...]

    @classmethod
    def of(cls, nodes: Sequence[Node], length: int) -> Match:
        """Return the match of `length` tokens that `nodes` hold, from the top down."""
        return cls(
            length,
            tuple(nodes),
            tuple((n.end, n) for n in nodes if n.checkpoint is not None and n.end <= length),
            tuple((n.value, n.start, min(n.end, length)) for n in nodes),
        )

    def spans(self, upto: int) -> list[tuple[Any, int, int]]:
        """Return which values hold the KV of [0, upto), as `(value, start, end)`.

        The ranges ascend, and adjacent ranges of the same value are merged. Changes nothing. Raises
        ValueError if `upto` is negative or above `length`.
        """
        if not 0 <= upto <= self.length:
            raise ValueError(f"position {upto} is outside of a match of {self.length} tokens")
        found: list[tuple[Any, int, int]] = []
        for value, start, end in self.segments:
            if start >= upto:
                break
            first = found.pop()[1] if found and found[-1][0] is value else start
            found.append((value, first, min(end, upto)))
        return found


@dataclass(frozen=True, slots=True)
class Cut:
    """A part removed from the tree: positions [start, end) of `value`, and the checkpoint at `end`.

    `tokens`: number of these positions. `checkpoint` is None and `checkpoint_bytes` 0 if the part
    had no checkpoint.
    """

    value: Any
    start: int
    end: int
    tokens: int
    checkpoint: Any
    checkpoint_bytes: int


def unneeded(node: Node) -> bool:
    """Return whether the boundary at the end of `node` can be removed by merging it into its child.

    `node` must not be the root. A shared prefix that is used more often than its only child is not
    merged.
    """
    if node.asked or node.locks or node.checkpoint is not None or len(node.children) != 1:
        return False
    (child,) = node.children.values()
    return child.value is node.value and child.usage.count >= node.usage.count
