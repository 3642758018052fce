"""Disk space of a store folder: its limit, the free space it leaves, and the order of eviction."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import log2

from mlxcache.config import format_size
from mlxcache.errors import DiskFull
from mlxcache.store import index
from mlxcache.store.folder import CHECKPOINT, Folder, blocks, remove
from mlxcache.store.index import Row

MARGIN = 2 << 20
"""Bytes below the limit that are left for growth of the index and its log.

At most a sixteenth of the limit.
"""

ROW_BYTES = 64 << 10
TOKEN_BYTES = 12
"""Most bytes that one more row, and each token of it, add to the index and its log."""

MOST_REUSES = 7
"""Number of reuses above which further ones do not count, as for eviction in RAM."""

MOMENT_S = 60.0
"""Seconds between two uses below which they count as simultaneous.

The less reused file is then evicted first.
"""

NO_REUSES: Mapping[int, int] = {}


class Space:
    """Disk space of a store folder.

    The folder takes at most `limit` bytes (None: no limit) and leaves `floor` bytes of the disk
    free.
    """

    def __init__(self, folder: Folder, limit: int | None, floor: int):
        self.folder = folder
        self.limit = limit
        self.floor = floor

    def used(self, connection: sqlite3.Connection) -> int:
        """Return the bytes of the folder on disk, including those reserved for files being written.

        Sizes are counted in allocated blocks of the file system.
        """
        (files,) = connection.execute("SELECT ifnull(sum(disk), 0) FROM file").fetchone()
        return int(files) + self.folder.overhead()

    def estimate(self, nbytes: int, tokens: int) -> int:
        """Return an upper bound of the disk space for a file of `nbytes` bytes and its index row.

        Includes the unused part of the last file-system block, file-system metadata, and the growth
        of folders. `tokens`: number of token ids in the row.
        """
        size = self.folder.block_size()
        whole = (nbytes + size - 1) // size * size
        return whole + nbytes // 1024 + 4 * size + ROW_BYTES + TOKEN_BYTES * tokens

    def make_room(self, connection: sqlite3.Connection, coming: int, *, has_row: bool) -> list[Row]:
        """Evict files in this transaction until `coming` more bytes fit; return the removed rows.

        `has_row`: the index already counts these bytes. Files are removed before the transaction
        removes their rows, so that their space is never counted as free too early. After a kill in
        between, some rows have no file; reading and opening the store repair that. Raises DiskFull,
        with nothing removed, if the bytes cannot fit.
        """
        need = self._missing(self.used(connection), coming, 0 if has_row else coming)
        if need <= 0:
            return []
        quarantined = sum(size for _, size in self.folder.quarantined())
        pinned, counts = index.pinned(connection), index.reuse_counts(connection)
        chosen = files_to_evict(index.rows(connection), need - quarantined, pinned, counts)
        if chosen is None:
            raise DiskFull(self._message(coming))
        self.folder.free_quarantine(need)
        self.remove(connection, chosen)
        return chosen

    def remove(self, connection: sqlite3.Connection, chosen: list[Row]) -> None:
        """Remove the files of `chosen` and, in this transaction, their rows."""
        for row in chosen:
            remove(self.folder.file(row.kind, row.digest))
            index.delete(connection, row)

    def shrink(self, connection: sqlite3.Connection, limit: int) -> list[Row]:
        """Evict files in this transaction until at most `limit` bytes are in use.

        Returns the removed rows. Files that are being written stay, so the limit may still be
        exceeded.
        """
        rows = index.rows(connection)
        need = self.used(connection) + self._reserve(limit) - limit
        need -= self.folder.free_quarantine(need)
        counts = index.reuse_counts(connection)
        chosen = files_to_evict(rows, need, index.pinned(connection), counts, partly=True) or []
        self.remove(connection, chosen)
        return chosen

    def obstacle(self, connection: sqlite3.Connection, used: int) -> str | None:
        """Return why no file can be written, even if all others were evicted; None if one can.

        `used`: bytes of the folder, as the method `used` returns them. Changes nothing.
        """
        need = self._missing(used, ROW_BYTES, ROW_BYTES)
        query = "SELECT ifnull(sum(disk), 0) FROM file WHERE owner IS NULL"
        (evictable,) = connection.execute(query).fetchone()
        need -= evictable + sum(size for _, size in self.folder.quarantined())
        return self._message(ROW_BYTES) if need > 0 else None

    def _missing(self, used: int, coming: int, without_row: int) -> int:
        missing = self.floor + coming - self.folder.free()
        if self.limit is not None:
            missing = max(missing, used + without_row + self._reserve(self.limit) - self.limit)
        return missing

    def _reserve(self, limit: int) -> int:
        """Return the bytes to keep free below the limit, for growth of the index.

        The content of the write-ahead log moves into the index later, so its size is included. The
        file that `Reserve` keeps counts as free, because it is removed when the disk is full.
        """
        margin = min(MARGIN, limit // 16) - blocks(self.folder.reserve)
        return max(0, margin) + self.folder.log_bytes()

    def _message(self, coming: int) -> str:
        if self.folder.free() < self.floor + coming:
            return (
                f"The disk of {self.folder.path} has {format_size(self.folder.free())} free, "
                f"and {format_size(self.floor)} are kept free for other programs."
            )
        assert self.limit is not None
        return (
            f"{format_size(coming)} more do not fit into the {format_size(self.limit)} "
            f"that {self.folder.path} may take."
        )


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
    """Return the number of reuses of each file, by id.

    If several runs continue the same run, the most recently used of them inherits its reuses,
    because it continues the conversation. A checkpoint inherits the reuses of the run that contains
    it.
    """
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
