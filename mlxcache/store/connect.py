"""A connection to the SQLite file of a folder, on a disk that may be read-only."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

BUSY_S = 30.0
"""How long a transaction waits for another process's."""

WAL_PAGES = 256
"""Pages of 4 KiB after which what was committed moves from the log into the file."""

OF_THE_DISK = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
"""After these the disk may come back, and a connection from before would not know."""

_PRAGMAS = (
    "auto_vacuum=INCREMENTAL",  # takes effect in a new file, before its first table
    "journal_mode=WAL",
    "synchronous=FULL",
    f"wal_autocheckpoint={WAL_PAGES}",
    f"journal_size_limit={WAL_PAGES * 4096}",
    "temp_store=MEMORY",
    "cache_spill=OFF",  # the log grows at commits only, when room has been made for it
    "foreign_keys=ON",
)


class ReadOnly(sqlite3.Connection):
    """Good for one transaction: the next may be able to write again."""


def connect(path: Path) -> sqlite3.Connection:
    """A connection to the file, which must be there. Raises sqlite3.Error."""
    try:
        return _connected(path, "mode=rw", _PRAGMAS, sqlite3.Connection)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in OF_THE_DISK:
            raise
    # so much is left of a disk that is read-only; without a log nothing can be missed
    log = path.with_name(f"{path.name}-wal")
    return _connected(path, "mode=ro" if log.exists() else "immutable=1", (), ReadOnly)


def _connected(
    path: Path, how: str, pragmas: Sequence[str], factory: type[sqlite3.Connection]
) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
        factory=factory,
    )
    try:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection
