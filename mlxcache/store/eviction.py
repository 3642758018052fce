"""Disk space of a store folder: its limit, the free space it leaves, and the order of eviction."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing
from heapq import heappop, heappush, merge
from math import log2

from mlxcache.config import format_size
from mlxcache.errors import DiskFull
from mlxcache.store import index
from mlxcache.store.folder import Folder, blocks, remove
from mlxcache.store.index import Row
from mlxcache.store.ranks import MOST_REUSES, refresh
from mlxcache.store.totals import read_total

MARGIN = 2 << 20
"""Bytes below the limit that are left for growth of the index and its log.

At most a sixteenth of the limit.
"""

ROW_BYTES = 64 << 10
TOKEN_BYTES = 12
"""Most bytes that one more row, and each token of it, add to the index and its log."""

MOMENT_S = 60.0
"""Seconds between two uses below which they count as simultaneous.

The less reused file is then evicted first.
"""

_MORE_USED_AFTER = """
WITH RECURSIVE after (file) AS (
  SELECT ?1 UNION
  SELECT rank.file FROM rank, after WHERE rank.previous = after.file AND rank.most > ?2)
SELECT max(used), uses FROM rank JOIN after USING (file) GROUP BY uses
"""
"""SQL query for the latest time of use at each number of reuses, as rows (time, reuses).

It covers the checkpoint with id ?1 and those after it on its path that have more reuses than ?2,
the checkpoint's own number.
"""


class Space:
    """Disk space of a store folder: evicts files from it to make room.

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
        return read_total(connection).disk + self.folder.overhead()

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

        They fit if the folder then takes at most `limit` bytes and leaves `floor` bytes of the disk
        free. `has_row`: the index already counts the `coming` bytes. Files are removed before the
        transaction removes their rows, so that their space is never counted as free too early.
        After a kill in between, some rows have no file; reading and opening the store repair that.
        Raises DiskFull, with nothing removed, if the bytes cannot fit.
        """
        need = self._missing(self.used(connection), coming, 0 if has_row else coming)
        if need <= 0:
            return []
        quarantined = sum(size for _, size in self.folder.quarantined())
        chosen = files_to_evict(connection, need - quarantined)
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
        need = self.used(connection) + self._reserve(limit) - limit
        need -= self.folder.free_quarantine(need)
        chosen = files_to_evict(connection, need, partly=True) or []
        self.remove(connection, chosen)
        return chosen

    def obstacle(self, connection: sqlite3.Connection, used: int) -> str | None:
        """Return why no file could be written even if all others were evicted; None if one could.

        The text is for users: a sentence about the disk or the limit. `used`: bytes of the folder,
        as the method `used` returns them. Changes nothing.
        """
        need = self._missing(used, ROW_BYTES, ROW_BYTES)
        need -= read_total(connection).durable_disk + sum(
            size for _, size in self.folder.quarantined()
        )
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
    connection: sqlite3.Connection, need: int, *, partly: bool = False
) -> list[Row] | None:
    """Choose the files to evict, in order, to free `need` bytes of disk space.

    The oldest come first. The age of a file is the number of seconds since its last use, divided by
    a weight that grows by the same amount with each doubling of the file's reuses. A checkpoint is
    never older than a later one on its path. Of equally old files, the one that ends at the highest
    position comes first, and the first checkpoint of a path, which new conversations share, last.
    Times are those of the wall clock, because servers that share a folder have no other clock in
    common.

    Only files that no other file continues and that are not being written can be chosen. Evicting
    one may make the file before it eligible. Pinned files are chosen only when nothing else is
    left. If all eligible files free less than `need` bytes, they are returned if `partly`,
    otherwise None is returned. Updates the ranks of files (see `store.ranks`), as part of the
    transaction of `connection`, and reads only the rows that it chooses, and a few more.
    """
    refresh(connection)
    return _choose(connection, need, partly)


def ranked_files(connection: sqlite3.Connection, need: int) -> list[Row] | None:
    """Choose files as `files_to_evict` does, by the ranks as they are. Writes nothing.

    Files whose ranks are out of date (see `store.ranks`) are not chosen. Returns None if the others
    together free less than `need` bytes.
    """
    return _choose(connection, need, partly=False)


def _choose(connection: sqlite3.Connection, need: int, partly: bool) -> list[Row] | None:
    chosen: list[Row] = []
    with closing(_Order(connection)) as order:
        while need > 0:
            row = order.take()
            if row is None:
                return chosen if partly else None
            chosen.append(row)
            need -= row.disk
    return chosen


_Key = tuple[int, float, int, int, int]
"""Sort key of a file in the order of eviction: pinned, negative age, head, negative end, id.

Pinned and head are 0 or 1. Head: the file is the first checkpoint of its path. End: position after
its last token. Id: that of its index row.
"""


class _Order:
    """Iterator over the durable files that no other file continues, in the order of eviction.

    Files with the same pin and the same number of reuses are ordered by time of use, so the index
    has a sorted list for each such group. The next file is the first of one of these lists, or one
    that became eligible because all files that continued it were taken.
    """

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection
        self._now = index.latest_use(connection) + MOMENT_S
        self._lists = [self._list(p, uses) for p in (0, 1) for uses in range(MOST_REUSES + 1)]
        self._listed = merge(*self._lists)
        self._next = next(self._listed, None)
        self._eligible: list[_Key] = []
        self._continued: dict[int, int] = {}

    def close(self) -> None:
        """Close the queries: an open one would keep the write-ahead log from being emptied."""
        for one in self._lists:
            one.close()

    def take(self) -> Row | None:
        """Return the row of the next file to evict; None if none is left. Removes nothing."""
        while self._next is not None and not (self._eligible and self._eligible[0] < self._next):
            heappush(self._eligible, self._key_of_path(self._next))
            self._next = next(self._listed, None)
        if not self._eligible:
            return None
        row = index.one(self._connection, "id = ?", heappop(self._eligible)[-1])
        assert row is not None
        if row.parent is not None:
            self._release(row.parent)
        return row

    def _list(self, pinned: int, uses: int) -> Generator[_Key, None, None]:
        query = (
            "SELECT used, head, stop, file FROM rank WHERE evictable AND pinned = ? AND uses = ?"
            " AND file NOT IN changed ORDER BY used, head, stop DESC, file"
        )
        with closing(self._connection.execute(query, (pinned, uses))) as found:
            for used, head, stop, id in found:
                yield pinned, -self._age(used, uses), head, -stop, id

    def _age(self, used: float, uses: int) -> float:
        return (self._now - used) / (1 + log2(1 + uses))

    def _key_of_path(self, key: _Key) -> _Key:
        """Return the sort key with which a file takes its place in the order of eviction.

        `key`: the sort key of the file by its own age. It is returned unchanged, except that a
        checkpoint gets the lowest age of itself and of the later checkpoints on its path. The time
        of use of a checkpoint is never before those of the later ones, so a later one can have a
        lower age only by more reuses: only the rows of such ones are read.
        """
        pinned, age, head, end, id = key
        query = "SELECT uses FROM rank WHERE file = ? AND checkpoint AND most > uses"
        found = self._connection.execute(query, (id,)).fetchone()
        if found is None:
            return key
        after = self._connection.execute(_MORE_USED_AFTER, (id, found[0]))
        age = max(age, *(-self._age(used, uses) for used, uses in after))
        return (pinned, age, head, end, id)

    def _release(self, id: int) -> None:
        """Count that `take` returned one of the files that continue the file `id`.

        Once it returned all of them, the file `id` can be taken too.
        """
        if id not in self._continued:
            query = "SELECT count(*) FROM file WHERE parent = ?"
            (self._continued[id],) = self._connection.execute(query, (id,)).fetchone()
        self._continued[id] -= 1
        if not self._continued[id]:
            query = (
                "SELECT pinned, file.used, uses, file.stop FROM file JOIN rank ON rank.file = id"
                " WHERE id = ? AND owner IS NULL AND id NOT IN changed"
            )
            for pinned, used, uses, stop in self._connection.execute(query, (id,)):
                heappush(self._eligible, (pinned, -self._age(used, uses), 0, -stop, id))
