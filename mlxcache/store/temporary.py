"""A database in memory, for a server without a disk tier: it ends with the process."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxcache.store.database import Database


class TemporaryDatabase(Database):
    """As `Database`, of one connection that every block waits for. Nothing reaches a disk."""

    def __init__(self) -> None:
        super().__init__(Path(":memory:"))
        self._only = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._only.execute("PRAGMA foreign_keys=ON")
        self._only.execute("PRAGMA temp_store=MEMORY")
        self._one_at_a_time = threading.RLock()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with self._one_at_a_time:
            yield self._only

    def shrink(self) -> None:
        """Nothing to do: there is no file."""

    def close(self) -> None:
        """Forget everything."""
        with self._one_at_a_time:
            self._only.close()
