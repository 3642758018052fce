"""The parts of a prefix tree: nodes with their usage, and the results of a match and a cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlxcache.types import Tokens

NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Usage:
    """The use of one segment, for eviction. Only the tree writes to it.

    `clock`: the eviction order's clock at the last use. `count`: requests that reused it; a new
    segment of a conversation starts with the conversation's count. `reach`: position up to which
    any request reused it. `replaced`: never reused, and a later request of its conversation
    diverged before it. `keeps`: (position, seconds) up to where, and for how long after a use,
    clients ask to keep it. `seen`: time of the last use, in seconds.
    """

    clock: float = 0.0
    count: int = 0
    reach: int = 0
    replaced: bool = False
    keeps: tuple[tuple[int, float], ...] = ()
    seen: float = 0.0

    def copy(self) -> Usage:
        """A copy, for the other part of a divided segment."""
        return replace(self)

    def absorb(self, other: Usage) -> None:
        """Take over a neighbour's use, as its tokens are merged into this segment."""
        self.clock = max(self.clock, other.clock)
        self.count = max(self.count, other.count)
        self.reach = max(self.reach, other.reach)
        self.seen = max(self.seen, other.seen)
        self.replaced = self.replaced and other.replaced
        self.keep(other.keeps)

    def keep(self, wishes: tuple[tuple[int, float], ...]) -> None:
        """Add keep hints; of two with the same time the one that reaches further stays."""
        if wishes and wishes != self.keeps:
            furthest: dict[float, int] = {}
            for position, seconds in (*self.keeps, *wishes):
                furthest[seconds] = max(position, furthest.get(seconds, 0))
            self.keeps = tuple((position, seconds) for seconds, position in furthest.items())

    def until(self, position: int) -> float:
        """Time until which clients ask to keep the tokens before `position`; 0 without a hint."""
        longest = max((long for at, long in self.keeps if at >= position), default=None)
        return 0.0 if longest is None else self.seen + longest


class Node:
    """One segment: the tokens of [start, end), whose KV `value` holds at those positions.

    Only the tree writes to it. A node is identified with its end: splitting an edge keeps the node
    as the lower part, merging two keeps the lower one. Any later call that changes the tree may
    extend, merge or remove it, unless it is locked; `detached` is true once it has left the tree.

    `tokens`: int32, shape (end - start,), owned. `checkpoint`: the state at `end`, of
    `checkpoint_bytes`. `locks`: those on this node and on all below it. `used_at`: the tree's tick
    of the last use. `asked`: a caller requested a boundary here and has neither locked it nor set a
    checkpoint since; such a node is not merged with its child.
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
        """True once the node was removed or merged into its child; the root never is."""
        return self.parent is None and self.end > 0

    def path(self) -> list[Node]:
        """The nodes from the root down to this one, both included."""
        nodes = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix that a tree holds, as it was when looked up.

    `length` tokens match. `nodes` are those on the path, top down and without the root; the last
    may be matched only in part. `checkpoints` are `(position, node)`, ascending, of fully matched
    nodes that hold one. `segments` are the same nodes as `(value, start, end)`, matched part only.
    Later changes of the tree change the nodes, but no other field.
    """

    length: int
    nodes: tuple[Node, ...]
    checkpoints: tuple[tuple[int, Node], ...]
    segments: tuple[tuple[Any, int, int], ...]

    def spans(self, upto: int) -> list[tuple[Any, int, int]]:
        """The values that hold the KV of [0, upto): `(value, start, end)`, ascending, merged.

        Changes nothing. Raises ValueError where `upto` is negative or above `length`.
        """
        if not 0 <= upto <= self.length:
            raise ValueError(f"spans up to {upto} of a match of {self.length} tokens")
        found: list[tuple[Any, int, int]] = []
        for value, start, end in self.segments:
            if start >= upto:
                break
            first = found.pop()[1] if found and found[-1][0] is value else start
            found.append((value, first, min(end, upto)))
        return found


@dataclass(frozen=True, slots=True)
class Cut:
    """A part that left the tree: [start, end) of `value`, and the checkpoint at its end.

    `checkpoint` is None, and `checkpoint_bytes` 0, where there was none.
    """

    value: Any
    start: int
    end: int
    tokens: int
    checkpoint: Any
    checkpoint_bytes: int


def unneeded(node: Node) -> bool:
    """True if the boundary at the end of `node`, which is not the root, can be merged away.

    A shared head that is used more often than the only conversation left below it is not merged.
    """
    if node.asked or node.locks or node.checkpoint is not None or len(node.children) != 1:
        return False
    (child,) = node.children.values()
    return child.value is node.value and child.usage.count >= node.usage.count


def as_tokens(ids: Tokens | Iterable[int]) -> Tokens:
    """`ids` as int32, shape (n,); an array is returned as it is, never copied.

    Raises TypeError for an array of another type or shape, OverflowError for ints beyond int32.
    """
    if isinstance(ids, np.ndarray):
        if ids.dtype != np.int32 or ids.ndim != 1:
            raise TypeError(f"token ids must be int32 of shape (n,), not {ids.dtype} {ids.shape}")
        return ids
    return np.array(list(ids), dtype=np.int32)
