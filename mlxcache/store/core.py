"""What the parts of one open store share."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from mlxcache.errors import StoreError, Vanished
from mlxcache.store import index, quarantine
from mlxcache.store.database import Database
from mlxcache.store.digests import Chains
from mlxcache.store.folder import Folder, remove
from mlxcache.store.index import Row
from mlxcache.store.owner import Owner
from mlxcache.store.space import Space

STEP_S = 1e-5
"""By which a use is later than the one before it at least; a float tells so much apart."""

CLOSE_S = 0.5
"""Seconds that a store which closes waits for others that write to the index."""


class Core:
    """Folder, database, space and name of one open store; its counts, and uses to be noted.

    Uses are kept here and go to the index with the next write, so that finding writes nothing.
    """

    def __init__(
        self, folder: Folder, database: Database, owner: Owner, space: Space, namespace: str
    ):
        self.folder = folder
        self.database = database
        self.owner = owner
        self.space = space
        self.namespace = namespace
        self.chains = Chains(namespace)
        self.saving = threading.Lock()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._uses: dict[int, float] = {}
        self._found: list[int] = []
        self.latest = 0.0

    def count(self, what: str, by: int = 1) -> None:
        """Add to a figure of this process."""
        with self._lock:
            self._counts[what] += by

    def counted(self, what: str) -> int:
        """A figure of this process."""
        with self._lock:
            return self._counts[what]

    def use(self, rows: Iterable[Row], *, unless_within: float = 0.0) -> None:
        """All of `rows` were used just now; not worth a note for one used so many seconds ago."""
        now = self.now()
        with self._lock:
            self._uses.update((row.id, now) for row in rows if now - row.used >= unless_within)

    def now(self) -> float:
        """The time by which uses are ordered: the wall clock's, but never back, not even beyond a
        restart. Seconds since 1970."""
        with self._lock:
            self.latest = max(time.time(), self.latest + STEP_S)
            return self.latest

    def found(self, ids: Iterable[int]) -> None:
        """A request found these files, and went on from them."""
        with self._lock:
            self._found += ids

    def note_uses(self, connection: sqlite3.Connection) -> None:
        """Write the uses since the last time into the index."""
        with self._lock:
            uses, self._uses = self._uses, {}
            found, self._found = self._found, []
        index.touch(connection, [(when, id) for id, when in uses.items()])
        index.count_found(connection, found)

    def make_room(self, connection: sqlite3.Connection, coming: int, *, has_row: bool) -> None:
        """As `Space.make_room`; counts what went."""
        self.note_uses(connection)
        self.count("evicted", len(self.space.make_room(connection, coming, has_row=has_row)))

    def check_there(self) -> None:
        """Raise Vanished if the folder, or the index in it, is not the one that was opened."""
        if not self.database.is_there():
            raise Vanished(f"{self.folder.path} has vanished, or was replaced by another.")

    def drop(self, id: int, *, corrupt: bool) -> bool:
        """Take a file and all that builds on it out; False if it is gone already.

        `corrupt`: its file goes to quarantine and is counted.
        """
        with self.database.write() as connection:
            self.check_there()
            rows = index.below(connection, id)
            if not rows:
                return False
            for row in rows:
                path = self.folder.file(row.kind, row.digest)
                if corrupt and row.id == id:
                    quarantine.put(self.folder, path, self.space.limit)
                remove(path)
                index.delete(connection, row)
        if corrupt:
            self.count("corrupt")
        return True

    def close(self) -> None:
        """Note the uses, close the database, give the owner's lock back."""
        self.database.arrive = None
        with (
            suppress(StoreError),
            self.database.patience(CLOSE_S),
            self.database.write() as connection,
        ):
            self.check_there()
            self.note_uses(connection)
        self.database.close()
        self.owner.release()
