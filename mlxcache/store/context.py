"""State of one open store folder, shared by the stores of all its namespaces."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from mlxcache.errors import StoreError, Vanished
from mlxcache.store import index
from mlxcache.store.database import Database
from mlxcache.store.eviction import Space
from mlxcache.store.folder import Folder, remove
from mlxcache.store.index import Row
from mlxcache.store.leaf_files import LeafFiles
from mlxcache.store.lock import ProcessLock
from mlxcache.store.reserve import Reserve

USE_STEP_S = 1e-5
"""Least seconds between two times of use.

It is large enough for a float of seconds since 1970 to tell the two apart.
"""

CLOSE_S = 0.5
"""Seconds that a closing store waits for other writers of the index."""


class StoreContext:
    """One open store folder: its database, process lock, disk space, counters and unwritten uses.

    The time of a file's last use and the number of its reuses by requests decide when it is
    evicted. Uses and reuses are collected in memory and written to the index with the next write,
    so that looking up a prefix writes nothing. `lock` shows other processes that the folder is
    open; see `ProcessLock`. `space` evicts files. `reserve`: the file that is removed while the
    disk is full. Thread-safe.
    """

    def __init__(
        self,
        folder: Folder,
        database: Database,
        lock: ProcessLock,
        space: Space,
        reserve: Reserve,
    ):
        self.folder = folder
        self.reserve = reserve
        self.database = database
        self.lock = lock
        self.space = space
        self.leaf_files = LeafFiles()
        self.saving = threading.Lock()
        """Lock held while a file is written, so that each process writes one file at a time."""
        self._lock = threading.Lock()
        self._figures: Counter[str] = Counter()
        self._uses: dict[int, float] = {}
        self._reused: list[int] = []
        self._latest = 0.0

    def renew_lock(self) -> None:
        """Replace the process lock by a new one, after the folder was created again.

        Raises OSError.
        """
        self.lock.release()
        self.lock = ProcessLock(self.folder.locks)

    def count(self, figure: str, by: int = 1) -> None:
        """Add `by` to a counter of this process, named as in `StoreStats`."""
        with self._lock:
            self._figures[figure] += by

    def counted(self, figure: str) -> int:
        """Return the value of a counter of this process, named as in `StoreStats`."""
        with self._lock:
            return self._figures[figure]

    def now(self) -> float:
        """Return the time for a new use, in seconds since 1970.

        It is the wall clock's time, but always later than any time returned before or passed to
        `resume_clock`, so that times of use are ordered.
        """
        with self._lock:
            self._latest = max(time.time(), self._latest + USE_STEP_S)
            return self._latest

    def resume_clock(self, latest: float) -> None:
        """Make `now` return only times after `latest`, the newest time of use in the index."""
        with self._lock:
            self._latest = max(self._latest, latest)

    def note_use(self, rows: Iterable[Row], *, unless_within: float = 0.0) -> None:
        """Remember that the files of `rows` are used now; `write_uses` writes that to the index.

        Files used within the last `unless_within` seconds are skipped, and all of them while the
        index cannot be written.
        """
        if self.database.obstacle is not None:
            return
        now = self.now()
        with self._lock:
            self._uses.update((row.id, now) for row in rows if now - row.used >= unless_within)

    def note_reuse(self, ids: Iterable[int]) -> None:
        """Remember that a request reused these files; `write_uses` counts it in the index.

        `ids`: ids of their index rows. Does nothing while the index cannot be written.
        """
        with self._lock:
            if self.database.obstacle is None:
                self._reused += ids

    def write_uses(self, connection: sqlite3.Connection) -> None:
        """Write to the index when files were last used, and how often requests reused them.

        Writes what `note_use` and `note_reuse` collected since the last call, within the open
        transaction of `connection`.
        """
        with self._lock:
            uses, self._uses = self._uses, {}
            reused, self._reused = self._reused, []
        index.touch(connection, [(when, id) for id, when in uses.items()])
        index.count_reuses(connection, reused)

    def make_room(self, connection: sqlite3.Connection, coming: int, *, has_row: bool) -> None:
        """Call `write_uses`, then evict files until `coming` more bytes fit into the folder.

        `has_row`: the index already counts these bytes, because it has the row of the file to be
        written. Part of the transaction of `connection`. Raises DiskFull if they cannot fit.
        """
        self.write_uses(connection)
        self.count("evicted", len(self.space.make_room(connection, coming, has_row=has_row)))

    def check_present(self) -> None:
        """Raise Vanished if the folder or its index was removed or replaced since it was opened."""
        if not self.database.is_there():
            raise Vanished(
                f"{self.folder.path} was removed, or replaced by another folder. "
                "It is reopened within seconds."
            )

    def remove_file(self, id: int, *, corrupt: bool) -> bool:
        """Remove a file and all files that continue it; return False if the index lacks it.

        `id`: id of the file's index row. `corrupt`: the file itself is damaged; it is moved to
        quarantine instead, and counted in `StoreStats.corrupt`. Raises StoreError.
        """
        with self.database.write() as connection:
            self.check_present()
            rows = index.subtree(connection, id)
            if not rows:
                return False
            for row in rows:
                path = self.folder.file(row.kind, row.digest)
                if corrupt and row.id == id:
                    self.folder.set_aside(path, self.space.limit)
                remove(path)
                index.delete(connection, row)
        if corrupt:
            self.count("corrupt")
        return True

    def close(self) -> None:
        """Call `write_uses`, close the database, and release the process lock.

        If the index cannot be written within `CLOSE_S` seconds, the uses are lost.
        """
        self.database.check_before(None)
        with (
            suppress(StoreError),
            self.database.patience(CLOSE_S),
            self.database.write() as connection,
        ):
            self.check_present()
            self.write_uses(connection)
        self.database.close()
        self.lock.release()
