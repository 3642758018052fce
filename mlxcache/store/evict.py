"""Which files go to make room: the leaf that is missed least first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import log2

from mlxcache.store.folder import CHECKPOINT
from mlxcache.store.index import Row

MOST_FOUND = 7
"""Uses beyond which more do not count, as in memory."""

MOMENT_S = 60.0
"""Seconds that are nothing: of what was used within them, that goes first which was found less."""

NEVER: Mapping[int, int] = {}


def victims(
    rows: Sequence[Row],
    need: int,
    pinned: Collection[int],
    found: Mapping[int, int] = NEVER,
    *,
    partly: bool = False,
) -> list[Row] | None:
    """The files to remove, in order, for `need` bytes on disk.

    If all that may go is less, `partly` chooses that, else the answer is None. A leaf is a file
    that no other builds on and that nobody is writing; removing one may make another. Pinned ones
    go when nothing else is left. A checkpoint counts as used when those after it were. `found`: how
    often requests went on from each file. Of equals a path's first checkpoint, which new
    conversations share, goes last, and what ends further along goes first.
    """
    ages, by_id = _ages(rows, found), {row.id: row for row in rows}
    builds = Counter(row.parent for row in rows)

    def key(row: Row) -> tuple[bool, float, bool, int, int]:
        head = row.kind == CHECKPOINT and row.previous is None
        return (row.id in pinned, -ages[row.id], head, -row.stop, row.id)

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


def _ages(rows: Sequence[Row], found: Mapping[int, int]) -> dict[int, float]:
    """How long ago each was used, in seconds, divided by how often: the most goes first.

    Only time is common to the servers that share a folder, so that is the clock. Each doubling of
    the uses counts the same; nobody's head is older than what was written after it.
    """
    used, uses = last_uses(rows), _uses(rows, found)
    now = max(used.values(), default=0.0) + MOMENT_S
    ages = {
        row.id: (now - used[row.id]) / (1 + log2(1 + min(uses[row.id], MOST_FOUND))) for row in rows
    }
    for row in sorted(rows, key=lambda row: row.start, reverse=True):
        if row.previous in ages:
            ages[row.previous] = min(ages[row.previous], ages[row.id])
    return ages


def _uses(rows: Sequence[Row], found: Mapping[int, int]) -> dict[int, int]:
    """How often each was found; the newest that follows a file stands for its conversation, and
    has its uses from the start. So does a checkpoint within a run."""
    heirs: dict[int | None, tuple[float, int]] = {}
    for row in rows:
        if row.kind != CHECKPOINT:
            heirs[row.parent] = max(heirs.get(row.parent, (0.0, 0)), (row.used, row.id))
    uses: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: (row.start, row.kind == CHECKPOINT, row.id)):
        uses[row.id] = found.get(row.id, 0)
        heir = row.kind == CHECKPOINT or heirs.get(row.parent, (0.0, 0))[1] == row.id
        if row.parent in uses and heir:
            uses[row.id] = max(uses[row.id], uses[row.parent])
    return uses


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
