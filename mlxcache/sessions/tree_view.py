"""The tree view: the prefixes of all sessions as a tree of few nodes, for the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from mlxcache.owner import plain_ids
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Listed
from mlxcache.tree.prefix_tree import PrefixTree
from mlxcache.types import Tokens

SHOWN_TOKENS = 24

MOST_TEXT = 160


@dataclass(slots=True, eq=False)
class Branch:
    """One node of the tree view: the tokens [start, end), and the sessions that share them.

    `ram`, `disk`: number of its first tokens that a turn would reuse from that tier. `ends`: leaves
    that end here, with their sessions' ids. `merged`: number and tokens of nodes below that are not
    shown.
    """

    parent: Branch | None
    start: int
    end: int
    text: str = ""
    ram: int = 0
    disk: int = 0
    sessions: dict[str, None] = field(default_factory=dict)
    ends: list[tuple[str, LeafRow]] = field(default_factory=list)
    below: list[Branch] = field(default_factory=list)
    merged: tuple[int, int] = (0, 0)
    model: str | None = None


@dataclass(frozen=True, slots=True)
class TreePart:
    listed: Sequence[Listed]
    ids: Mapping[LeafRow, Tokens]
    decode: Callable[[Sequence[int]], str]
    model: str | None = None


def tree_view(
    parts: Sequence[TreePart], *, owner: str | None = None, most: int = 200
) -> dict[str, Any]:
    """Return the body of `GET /v1/cache/tree` for sessions of one owner, a part for each model.

    Of more than `most` nodes, the shortest without children are merged into their parents. Takes
    O(tokens), that is milliseconds per session.
    """
    root = Branch(None, 0, 0)
    for part in parts:
        _grow(root, part, owner)
    _merge(root, most)
    order = _numbered(root)
    numbers = {id(one): number for number, one in enumerate(order)}
    return {
        "object": "cache.tree",
        "nodes": [
            _object(one, number, None if one.parent is None else numbers[id(one.parent)])
            for number, one in enumerate(order)
        ],
    }


def _grow(root: Branch, part: TreePart, owner: str | None) -> None:
    tree = PrefixTree(1)
    leaves = [
        (one.session.id, leaf, ram, disk, tree.insert(part.ids[leaf], leaf))
        for one in part.listed
        for leaf, ram, disk in zip(one.leaves, one.ram.tokens, one.disk.tokens, strict=True)
        if len(part.ids[leaf])
    ]
    known: dict[int, Branch] = {}
    for session, leaf, ram, disk, end in leaves:  # splitting its edge leaves a node's end as it is
        root.sessions[session] = None
        at: Branch = root
        for node in end.path()[1:]:
            if id(node) not in known:
                ids = part.ids[leaf][: min(node.end, node.start + SHOWN_TOKENS)]
                shown = plain_ids(ids, owner)[node.start :]
                text = part.decode([int(i) for i in shown if i >= 0])[:MOST_TEXT]
                known[id(node)] = Branch(at, node.start, node.end, text, model=part.model)
                at.below.append(known[id(node)])
            at = known[id(node)]
            at.sessions[session] = None
            at.ram = max(at.ram, min(ram, at.end) - at.start)
            at.disk = max(at.disk, min(disk, at.end) - at.start)
        at.ends.append((session, leaf))


def _merge(root: Branch, most: int) -> None:
    """Merge the shortest nodes without children until at most `most` are left."""
    nodes = _numbered(root)
    left = len(nodes)
    ends = [(b.end - b.start, number) for number, b in enumerate(nodes) if not b.below and b.parent]
    numbers = {id(one): number for number, one in enumerate(nodes)}
    heapify(ends)
    while left > max(1, most) and ends:
        tokens, number = heappop(ends)
        one = nodes[number]
        assert one.parent is not None
        above: Branch = one.parent
        above.below.remove(one)
        above.ends += one.ends
        above.merged = (
            above.merged[0] + 1 + one.merged[0],
            above.merged[1] + tokens + one.merged[1],
        )
        left -= 1
        if not above.below and above.parent is not None:
            heappush(ends, (above.end - above.start, numbers[id(above)]))


def _numbered(root: Branch) -> list[Branch]:
    """Return `root` and all nodes below it, parents before their children.

    Of siblings, those with more sessions come first, then those with more tokens.
    """
    found, waiting = [], [root]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += sorted(one.below, key=lambda b: (len(b.sessions), b.end - b.start))
    return found


def _object(one: Branch, number: int, parent: int | None) -> dict[str, Any]:
    return {
        "id": number,
        "parent": parent,
        "start": one.start,
        "tokens": one.end - one.start,
        "ram_tokens": max(0, one.ram),
        "disk_tokens": max(0, one.disk),
        "sessions": list(one.sessions),
        "ends": [
            {"session": session, "kind": leaf.kind, "tokens": leaf.tokens}
            for session, leaf in one.ends
        ],
        "text": one.text,
        "merged": {"nodes": one.merged[0], "tokens": one.merged[1]},
        **({} if one.model is None else {"model": one.model}),
    }
