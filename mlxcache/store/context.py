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
from mlxcache.store.folder import Folder, Reserve, remove
from mlxcache.store.index import Row
from mlxcache.store.listing import LeafFiles
from mlxcache.store.lock import ProcessLock

USE_STEP_S = 1e-5
"""Least seconds between two times of use: a float of seconds since 1970 tells them apart."""

CLOSE_S = 0.5


class StoreContext:
    """One open store folder: its database, process lock, disk space, counters and unwritten uses.

    Uses and reuses, which decide when a file is evicted, are written to the index with its next
    write, so that looking up a prefix writes nothing. Thread-safe.
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
        self.lock.release()
        self.lock = ProcessLock(self.folder.locks)

    def count(self, figure: str, by: int = 1) -> None:
        with self._lock:
            self._figures[figure] += by

    def counted(self, figure: str) -> int:
        with self._lock:
            return self._figures[figure]

    def now(self) -> float:
        """Return the time for a new use: always later than any before."""
        with self._lock:
            self._latest = max(time.time(), self._latest + USE_STEP_S)
            return self._latest

    def resume_clock(self, latest: float) -> None:
        with self._lock:
            self._latest = max(self._latest, latest)

    def note_use(self, rows: Iterable[Row], *, unless_within: float = 0.0) -> None:
        if self.database.obstacle is not None:
            return
        now = self.now()
        with self._lock:
            self._uses.update((row.id, now) for row in rows if now - row.used >= unless_within)

    def note_reuse(self, ids: Iterable[int]) -> None:
        with self._lock:
            if self.database.obstacle is None:
                self._reused += ids

    def write_uses(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
            reused, self._reused = self._reused, []
        index.touch(connection, [(when, id) for id, when in uses.items()])
        index.count_reuses(connection, reused)

    def make_room(self, connection: sqlite3.Connection, coming: int, *, has_row: bool) -> None:
        """Call `write_uses`, then evict files until `coming` more bytes fit into the folder.

        `has_row`: the index already counts these bytes. Raises DiskFull if they cannot fit.
        """
        self.write_uses(connection)
        self.count("evicted", len(self.space.make_room(connection, coming, has_row=has_row)))

    def check_present(self) -> None:
        if not self.database.is_there():
            raise Vanished(
                f"{self.folder.path} was removed, or replaced by another folder. "
                "It is reopened within seconds."
            )

    def remove_file(self, id: int, *, corrupt: bool) -> bool:
        """Remove a file and all files that continue it; return False if the index lacks it.

        `corrupt`: the file itself is damaged; it is moved to quarantine instead, and counted.
        Raises StoreError.
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
