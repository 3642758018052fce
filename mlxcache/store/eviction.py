"""Eviction of files: to make room on disk, and of checkpoints to keep them within their share."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from heapq import heappop, heappush, merge
from itertools import chain
from math import log2

from mlxcache.config import format_size
from mlxcache.errors import DiskFull
from mlxcache.store import index
from mlxcache.store.folder import CHECKPOINT, Folder, blocks, remove
from mlxcache.store.index import MOST_REUSES, Match, Row, read_totals, update_ranks
from mlxcache.store.session_rows import shared_lengths
from mlxcache.tree.thinning import BUDGET_SHARE, NEWEST, allowed, checkpoints_to_drop
from mlxcache.types import Tokens

MARGIN = 2 << 20

ROW_BYTES = 64 << 10
TOKEN_BYTES = 12
"""Most bytes that one more row, and each token of it, add to the index and its log."""

MOMENT_S = 60.0
"""Seconds between two uses below which the less reused file is evicted first."""

SIDE_TOKENS = 1024
"""Tokens after a path's checkpoint within which one beside the path may be removed as surplus."""

SIDE_KEPT = 2
"""Checkpoints beside a path that stay: a request may continue from the last used ones."""

_MORE_USED_AFTER = """
WITH RECURSIVE after (file) AS (
  SELECT ?1 UNION
  SELECT rank.file FROM rank, after WHERE rank.previous = after.file AND rank.most > ?2)
SELECT max(used), uses FROM rank JOIN after USING (file) GROUP BY uses
"""
"""The latest time of use at each number of reuses, as rows (time, reuses).

It covers the checkpoint with id ?1 and those after it on its path that have more reuses than ?2,
the checkpoint's own number.
"""


class Space:
    """Disk space of a store folder: at most `limit` bytes, with `floor` bytes of the disk free."""

    def __init__(self, folder: Folder, limit: int | None, floor: int):
        self.folder = folder
        self.limit = limit
        self.floor = floor

    def used(self, connection: sqlite3.Connection) -> int:
        return read_totals(connection).disk + self.folder.overhead()

    def estimate(self, nbytes: int, tokens: int) -> int:
        """Return an upper bound of the disk space of a file, its index row, and growing folders."""
        size = self.folder.block_size()
        whole = (nbytes + size - 1) // size * size
        return whole + nbytes // 1024 + 4 * size + ROW_BYTES + TOKEN_BYTES * tokens

    def make_room(self, connection: sqlite3.Connection, coming: int, *, has_row: bool) -> list[Row]:
        """Evict files in this transaction until `coming` more bytes fit; return the removed rows.

        `has_row`: the index already counts the `coming` bytes. Files are removed before the
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
        for row in chosen:
            remove(self.folder.file(row.kind, row.digest))
            index.delete(connection, row)

    def shrink(self, connection: sqlite3.Connection, limit: int) -> list[Row]:
        need = self.used(connection) + self._reserve(limit) - limit
        need -= self.folder.free_quarantine(need)
        chosen = files_to_evict(connection, need, partly=True) or []
        self.remove(connection, chosen)
        return chosen

    def obstacle(self, connection: sqlite3.Connection, used: int) -> str | None:
        """Return why no file could be written even if all others were evicted."""
        need = self._missing(used, ROW_BYTES, ROW_BYTES)
        need -= read_totals(connection).durable_disk + sum(
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
    left. If all free less than `need` bytes, they are returned if `partly`, otherwise None is.
    """
    update_ranks(connection)
    return ranked_files(connection, need, partly=partly)


def ranked_files(
    connection: sqlite3.Connection, need: int, *, partly: bool = False
) -> list[Row] | None:
    """Choose files as `files_to_evict` does, by ranks that are up to date already."""
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
"""Place of a file in the order of eviction: pinned, negative age, head, negative end, row id."""


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
        unpinned, pinned = self._lists[: MOST_REUSES + 1], self._lists[MOST_REUSES + 1 :]
        self._listed = chain(merge(*unpinned), merge(*pinned))
        self._next = next(self._listed, None)
        self._eligible: list[_Key] = []
        self._continued: dict[int, int] = {}

    def close(self) -> None:
        """Close the queries: an open one would keep the write-ahead log from being emptied."""
        for one in self._lists:
            one.close()

    def take(self) -> Row | None:
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
        """Return the key with which a file takes its place; `key` is that by its own age.

        A checkpoint gets the lowest age of itself and of the later checkpoints on its path. Its
        time of use is never before theirs, so a later one can have a lower age only by more reuses:
        only the rows of such ones are read.
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


def surplus_checkpoints(
    connection: sqlite3.Connection, namespace: str, ids: Tokens, match: Match, limit: int
) -> list[Row]:
    """Choose checkpoints of the path `ids` to remove, because there are more than it may have.

    `limit`: that of the folder, by which `tree.thinning.allowed` gives the bytes that they may
    take. `match`: the part of `ids` on disk. First in the result come checkpoints beside the path:
    those at the ends of replies that later prompts do not contain as they were generated, for
    example because a template leaves out thinking. Then come those on the path that
    `checkpoints_to_drop` chooses, in order of position.

    Two kinds of checkpoints on the path are never chosen. One kind is the `NEWEST` last ones of any
    path that contains them: the session of that path may not be recorded yet, because the files of
    a turn are written first. The other is the last one that each recorded conversation with the
    same head and first message shares with the path, even a fork that was not continued. Beside the
    path, those that directly follow one of the second kind are never chosen, nor the `SIDE_KEPT`
    most recently used.
    """
    path = match.checkpoints
    if not path:
        return []
    kv_bytes = sum(row.disk * (b - a) // (row.stop - row.start) for row, a, b in match.cover)
    size = max(row.disk for row in path)
    most = allowed(kv_bytes, size, limit) // max(1, size)
    beside = _beside(connection, path)
    excess = len(path) + len(beside) - most
    if excess <= 0:
        return []
    last = _last(path, shared_lengths(connection, namespace, ids))
    gone = [row for row in beside[:-SIDE_KEPT] if row.previous not in last][:excess]
    positions = [row.start for row in path]
    parted = {row.start for row in path if len(_followers(connection, row.id)) > 1}
    drop = checkpoints_to_drop(positions, max(match.length, positions[-1]), most, parted=parted)
    away = {row.id for row in gone}
    return gone + [
        row
        for row in path
        if row.start in drop and row.id not in last and not _is_newest(connection, row.id, away)
    ]


def _beside(connection: sqlite3.Connection, path: Sequence[Row]) -> list[Row]:
    """Return the checkpoints of short side branches of a path, least recently used first.

    They follow one of `path` by less than `SIDE_TOKENS` tokens, and no other follows them.
    """
    own = {row.id: row.start for row in path}
    found: list[Row] = []
    for id, start in own.items():
        after = index.rows(connection, "previous = ? AND owner IS NULL", id)
        near = [row for row in after if row.id not in own and row.start - start < SIDE_TOKENS]
        found += [row for row in near if not _followers(connection, row.id)]
    return sorted(found, key=lambda row: (row.used, row.id))


def _last(path: Sequence[Row], ends: Sequence[int]) -> set[int]:
    before = ([row for row in path if row.start <= end] for end in ends)
    return {rows[-1].id for rows in before if rows}


def checkpoints_over_share(connection: sqlite3.Connection, coming: int, limit: int) -> list[Row]:
    """Choose checkpoints to remove so that another of `coming` bytes fits into their share.

    The share is `BUDGET_SHARE` of the folder's `limit`. The least recently used are chosen first; a
    checkpoint counts as used whenever a later one on its path was. Of equally old ones, those
    between a path's first and last are chosen first, then the last, then the first, which new
    conversations share. Pinned ones are chosen only when no others are left.
    """
    need = read_totals(connection, CHECKPOINT).disk + coming - int(limit * BUDGET_SHARE)
    if need <= 0:
        return []
    update_ranks(connection)
    query = (
        "SELECT file FROM rank WHERE evictable AND checkpoint"
        " ORDER BY pinned, used, head, last, stop DESC"
    )
    chosen: list[Row] = []
    with closing(connection.execute(query)) as oldest:
        for (id,) in oldest:
            chosen += index.rows(connection, "id = ?", id)
            need -= chosen[-1].disk
            if need <= 0:
                break
    return chosen


def _followers(connection: sqlite3.Connection, id: int) -> list[int]:
    query = "SELECT id FROM file WHERE previous = ?"
    return [found[0] for found in connection.execute(query, (id,))]


def _is_newest(connection: sqlite3.Connection, id: int, away: Collection[int]) -> bool:
    """Return whether it is one of the last `NEWEST` of any path, without those `away`."""
    level = [id]
    for _ in range(NEWEST):
        after: list[int] = []
        for each in level:
            following = [one for one in _followers(connection, each) if one not in away]
            if not following:
                return True
            after += following
        level = after
    return False
