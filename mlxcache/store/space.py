"""The cap on what the folder holds, and the floor of what the file system keeps free."""

from __future__ import annotations

import sqlite3

from mlxcache.config import format_size
from mlxcache.errors import DiskFull
from mlxcache.store import index, quarantine
from mlxcache.store.evict import victims
from mlxcache.store.folder import Folder, remove
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
        aside = sum(size for _, size in quarantine.entries(self.folder))
        pinned, counts = _pinned(connection), index.found_counts(connection)
        chosen = victims(index.rows(connection), need - aside, pinned, counts)
        if chosen is None:
            raise DiskFull(self._sentence(coming))
        quarantine.free(self.folder, need)
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
        need -= quarantine.free(self.folder, need)
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
