"""Which files go to make room: the least recently used leaf first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from mlxcache.store.folder import CHECKPOINT
from mlxcache.store.index import Row


def victims(
    rows: Sequence[Row], need: int, pinned: Collection[int], *, partly: bool = False
) -> list[Row] | None:
    """The files to remove, in order, for `need` bytes on disk.

    If all that may go is less, `partly` chooses that, else the answer is None.

    A leaf is a file that no other builds on and that nobody is writing; removing one may make
    another. Pinned ones go when nothing else is left. A checkpoint counts as used when those after
    it were. Of equal use a path's first checkpoint, which new conversations share, goes last, and
    what ends further along goes first.
    """
    used = last_uses(rows)
    by_id = {row.id: row for row in rows}
    builds = Counter(row.parent for row in rows)

    def key(row: Row) -> tuple[bool, float, bool, int, int]:
        head = row.kind == CHECKPOINT and row.previous is None
        return (row.id in pinned, used[row.id], head, -row.stop, row.id)

    leaves = [key(row) for row in rows if row.owner is None and not builds[row.id]]
    heapify(leaves)
    chosen: list[Row] = []
    while need > 0:
        if not leaves:
            return chosen if partly else None
        row = by_id[heappop(leaves)[-1]]
        chosen.append(row)
        need -= row.disk
        parent = None if row.parent is None else by_id.get(row.parent)
        if parent is not None:
            builds[parent.id] -= 1
            if not builds[parent.id] and parent.owner is None:
                heappush(leaves, key(parent))
    return chosen


def last_uses(rows: Sequence[Row]) -> dict[int, float]:
    """When each of `rows` was used last, by its id; a checkpoint whenever one after it was.

    Not each use of a path is noted at all of it, and a new conversation can start at the first
    alone: it must outlive what was written after it.
    """
    used = {row.id: row.used for row in rows}
    for row in sorted(rows, key=lambda row: row.start, reverse=True):
        if row.previous in used:
            used[row.previous] = max(used[row.previous], used[row.id])
    return used
