"""Order of eviction by its definition, from all files at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import log2

from mlxcache.store.eviction import MOMENT_S
from mlxcache.store.folder import CHECKPOINT
from mlxcache.store.index import MOST_REUSES, Row

NO_REUSES: Mapping[int, int] = {}


def files_to_evict(
    rows: Sequence[Row],
    need: int,
    pinned: Collection[int],
    reuses: Mapping[int, int] = NO_REUSES,
    *,
    partly: bool = False,
) -> list[Row] | None:
    """Choose the files to evict, in order, to free `need` bytes of disk space.

    The oldest come first; age counts from the last use, and is less for a file that was reused
    often (see `_ages`). Of equally old files, the one that ends last is evicted first, and the
    first checkpoint of a path, which new conversations share, last.

    Only files that no other file continues and that are not being written can be chosen. Evicting
    one may make the file before it eligible. Files with an id in `pinned` are chosen only when
    nothing else is left. If all eligible files free less than `need` bytes, they are returned if
    `partly`, otherwise None is returned. `reuses`: number of requests that reused each file, by id.
    """
    ages, by_id = _ages(rows, reuses), {row.id: row for row in rows}
    builds = Counter(row.parent for row in rows)

    def key(row: Row) -> tuple[bool, float, bool, int, int]:
        head = row.kind == CHECKPOINT and row.previous is None
        return (row.id in pinned, -ages[row.id], head, -row.stop, row.id)

    heap = [key(row) for row in rows if row.owner is None and not builds[row.id]]
    heapify(heap)
    chosen: list[Row] = []
    while need > 0:
        if not heap:
            return chosen if partly else None
        row = by_id[heappop(heap)[-1]]
        chosen.append(row)
        need -= row.disk
        parent = None if row.parent is None else by_id.get(row.parent)
        if parent is not None:
            builds[parent.id] -= 1
            if not builds[parent.id] and parent.owner is None:
                heappush(heap, key(parent))
    return chosen


def _ages(rows: Sequence[Row], reuses: Mapping[int, int]) -> dict[int, float]:
    """Return the age of each file, by id: seconds since its last use, divided by a weight.

    The file of the greatest age is evicted first. The weight grows by the same amount with each
    doubling of the file's reuses. A checkpoint is never older than a later one on its path. Times
    are those of the wall clock, because servers that share a folder have no other clock in common.
    """
    used, uses = last_uses(rows), _uses(rows, reuses)
    now = max(used.values(), default=0.0) + MOMENT_S
    ages = {
        row.id: (now - used[row.id]) / (1 + log2(1 + min(uses[row.id], MOST_REUSES)))
        for row in rows
    }
    for row in sorted(rows, key=lambda row: row.start, reverse=True):
        if row.previous in ages:
            ages[row.previous] = min(ages[row.previous], ages[row.id])
    return ages


def _uses(rows: Sequence[Row], reuses: Mapping[int, int]) -> dict[int, int]:
    heirs: dict[int | None, tuple[float, int]] = {}
    for row in rows:
        if row.kind != CHECKPOINT:
            heirs[row.parent] = max(heirs.get(row.parent, (0.0, 0)), (row.used, row.id))
    uses: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: (row.start, row.kind == CHECKPOINT, row.id)):
        uses[row.id] = reuses.get(row.id, 0)
        heir = row.kind == CHECKPOINT or heirs.get(row.parent, (0.0, 0))[1] == row.id
        if row.parent in uses and heir:
            uses[row.id] = max(uses[row.id], uses[row.parent])
    return uses


def last_uses(rows: Sequence[Row]) -> dict[int, float]:
    """Return the time of the last use of each file, by id, in seconds since 1970.

    A checkpoint counts as used whenever a later one on its path was. A use of a path is not noted
    at all of its checkpoints, and a new conversation can start only from the first of them, which
    must therefore stay longest.
    """
    used = {row.id: row.used for row in rows}
    for row in sorted(rows, key=lambda row: row.start, reverse=True):
        if row.previous in used:
            used[row.previous] = max(used[row.previous], used[row.id])
    return used
