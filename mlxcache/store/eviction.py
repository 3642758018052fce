"""The cap on what the folder holds, and the floor of what the file system keeps free."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import log2

from mlxcache.config import format_size
from mlxcache.errors import DiskFull
from mlxcache.store import index
from mlxcache.store.folder import CHECKPOINT, Folder, remove
from mlxcache.store.index import Row

MARGIN = 2 << 20
"""Bytes below the cap that are left to the index: for rows of sessions, marks of use, and a log
that has not been moved into it yet. Less where the cap is small: a sixteenth."""

ROW_BYTES = 64 << 10
TOKEN_BYTES = 12
"""What one more row, and each token of it, may add to the index and its log at most."""


class Space:
    """Room within `limit` (None: no cap) that leaves `floor` bytes free."""

    def __init__(self, folder: Folder, limit: int | None, floor: int):
        self.folder = folder
        self.limit = limit
        self.floor = floor

    def used(self, connection: sqlite3.Connection) -> int:
        """Bytes that the folder takes by the file system's count, or that are set aside."""
        (files,) = connection.execute("SELECT ifnull(sum(disk), 0) FROM file").fetchone()
        return int(files) + self.folder.overhead()

    def estimate(self, nbytes: int, tokens: int) -> int:
        """The most that a file of `nbytes` takes while it is written, its row included.

        Whole blocks of the file system, what maps them, and folders that grow by the name.
        """
        size = self.folder.block_size()
        whole = (nbytes + size - 1) // size * size
        return whole + nbytes // 1024 + 4 * size + ROW_BYTES + TOKEN_BYTES * tokens

    def make_room(self, connection: sqlite3.Connection, coming: int, *, has_row: bool) -> list[Row]:
        """Evict in this transaction until `coming` more bytes fit; returns what went.

        `has_row`: they are in the index already. The files are gone before their rows are, so that
        nobody fills their room too early: after a kill in between, rows without files are left,
        which reading and opening put right. Raises DiskFull, having removed nothing.
        """
        need = self._missing(connection, coming, 0 if has_row else coming)
        if need <= 0:
            return []
        aside = sum(size for _, size in self.folder.quarantined())
        pinned, counts = _pinned(connection), index.found_counts(connection)
        chosen = victims(index.rows(connection), need - aside, pinned, counts)
        if chosen is None:
            raise DiskFull(self._sentence(coming))
        self.folder.free_quarantine(need)
        self.remove(connection, chosen)
        return chosen

    def remove(self, connection: sqlite3.Connection, chosen: list[Row]) -> None:
        """Remove files and their rows."""
        for row in chosen:
            remove(self.folder.file(row.kind, row.digest))
            index.delete(connection, row)

    def shrink(self, connection: sqlite3.Connection, limit: int) -> list[Row]:
        """Evict in this transaction until all is within `limit`, as far as may go."""
        rows = index.rows(connection)
        need = self.used(connection) + self._spare(limit) - limit
        need -= self.folder.free_quarantine(need)
        counts = index.found_counts(connection)
        chosen = victims(rows, need, _pinned(connection), counts, partly=True) or []
        self.remove(connection, chosen)
        return chosen

    def _missing(self, connection: sqlite3.Connection, coming: int, without_row: int) -> int:
        missing = self.floor + coming - self.folder.free()
        if self.limit is not None:
            used = self.used(connection) + without_row
            missing = max(missing, used + self._spare(self.limit) - self.limit)
        return missing

    def _spare(self, limit: int) -> int:
        """Bytes below the cap that files leave; what is in the log moves into the index in time."""
        return min(MARGIN, limit // 16) + self.folder.log_bytes()

    def _sentence(self, coming: int) -> str:
        if self.folder.free() < self.floor + coming:
            return (
                f"The disk of {self.folder.path} has {format_size(self.folder.free())} left, "
                f"of which {format_size(self.floor)} are kept free."
            )
        assert self.limit is not None
        return (
            f"{format_size(coming)} more do not fit into the {format_size(self.limit)} "
            f"that {self.folder.path} may take."
        )


def _pinned(connection: sqlite3.Connection) -> set[int]:
    return {id for (id,) in connection.execute("SELECT file FROM pin")}


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
