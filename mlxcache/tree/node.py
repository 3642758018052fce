"""Data types of a prefix tree: nodes with their usage, and the results of `match` and `cut`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.types import Tokens


@dataclass(slots=True)
class Usage:
    """Usage statistics of one segment, for eviction. Only the tree changes them.

    `clock`: the eviction clock at the last use. `count`: number of requests that reused the
    segment; a new segment of a conversation starts with the count of that conversation. `reach`:
    the highest position up to which a request reused it. `replaced`: the segment was never reused,
    and a later request of its conversation diverged before it. `keeps`: clients' keep hints, as
    pairs of a position up to which to keep the tokens and the seconds to keep them after each use.
    `seen`: seconds.
    """

    clock: float = 0.0
    count: int = 0
    reach: int = 0
    replaced: bool = False
    keeps: tuple[tuple[int, float], ...] = ()
    seen: float = 0.0

    def absorb(self, other: Usage) -> None:
        self.clock = max(self.clock, other.clock)
        self.count = max(self.count, other.count)
        self.reach = max(self.reach, other.reach)
        self.seen = max(self.seen, other.seen)
        self.replaced = self.replaced and other.replaced
        self.keep(other.keeps)

    def keep(self, wishes: tuple[tuple[int, float], ...]) -> None:
        """Add keep hints; of two with the same seconds, the one with the higher position stays."""
        if wishes and wishes != self.keeps:
            furthest: dict[float, int] = {}
            for position, seconds in (*self.keeps, *wishes):
                furthest[seconds] = max(position, furthest.get(seconds, 0))
            self.keeps = tuple((position, seconds) for seconds, position in furthest.items())

    def until(self, position: int) -> float:
        """Return until when, like `seen`, clients want the tokens before `position` kept, or 0."""
        longest = max((long for at, long in self.keeps if at >= position), default=None)
        return 0.0 if longest is None else self.seen + longest


class Node:
    """One segment: the tokens of [start, end), whose KV is in `value` at those positions.

    Only the tree changes it. The identity of a node follows its end: splitting an edge keeps the
    node as the lower part, and merging two nodes keeps the lower one. Any later call that changes
    the tree may extend, merge or remove the node unless it is locked.

    `tokens`: int32, shape (end - start,), owned by the node. `children`: by the first token id of
    each. `checkpoint`: the state at `end`, or None. `locks`: number of locks on this node and on
    all nodes below it. `used_at`: `EvictionClock.ticks` at the last use. `asked`: a caller
    requested a boundary at `end` and has neither locked the node nor set a checkpoint since; such a
    node is not merged with its child.
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
        """True if the node was removed from the tree or merged into its child."""
        return self.parent is None and self.end > 0

    def path(self) -> list[Node]:
        nodes = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of some tokens that a tree held at the time of a lookup.

    `length`: number of tokens that match. `nodes`: from the top down, without the root; the last
    one may match only in part. `checkpoints`: pairs `(position, node)` in ascending order, for
    fully matched nodes with a checkpoint. `segments`: `(value, start, end)` for each of `nodes`,
    limited to the matched part. Later changes of the tree change the nodes, but no other field.
    """

    length: int
    nodes: tuple[Node, ...]
    checkpoints: tuple[tuple[int, Node], ...]
    segments: tuple[tuple[Any, int, int], ...]

    @classmethod
    def of(cls, nodes: Sequence[Node], length: int) -> Match:
        return cls(
            length,
            tuple(nodes),
            tuple((n.end, n) for n in nodes if n.checkpoint is not None and n.end <= length),
            tuple((n.value, n.start, min(n.end, length)) for n in nodes),
        )

    def spans(self, upto: int) -> list[tuple[Any, int, int]]:
        """Return which values hold the KV of [0, upto), as ascending `(value, start, end)`.

        Adjacent ranges of the same value are merged. Raises ValueError if `upto` is not within
        `length`.
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
    """Removed positions [start, end) of `value`, with the checkpoint at `end`, if there was one."""

    value: Any
    start: int
    end: int
    tokens: int
    checkpoint: Any
    checkpoint_bytes: int


def unneeded(node: Node) -> bool:
    """Return whether `node`, not the root, can be merged into its child."""
    if node.asked or node.locks or node.checkpoint is not None or len(node.children) != 1:
        return False
    (child,) = node.children.values()
    return child.value is node.value and child.usage.count >= node.usage.count
