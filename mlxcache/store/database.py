"""The SQLite file with the index and the sessions, and its transactions from any thread."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

from mlxcache.errors import DiskFull, StoreError

BUSY_S = 30.0

WAL_PAGES = 256
"""Pages of 4 KiB in the write-ahead log after which they are moved into the database file."""

OF_THE_DISK = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
"""Codes of SQLite errors that stand for a disk that may become usable again.

A connection that was open before would go on failing then, so pooled connections are closed.
"""

_OF_A_NEW_FILE = ("auto_vacuum=INCREMENTAL",)
"""Pragmas for an empty file, before its first table. In any other file they write to the disk."""

_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "fullfsync=ON",  # on macOS, as `disk_calls.sync`; no effect elsewhere
    "checkpoint_fullfsync=ON",
    f"wal_autocheckpoint={WAL_PAGES}",
    f"journal_size_limit={WAL_PAGES * 4096}",
    "temp_store=MEMORY",
    "cache_spill=OFF",  # the log grows at commits only, after room was made for it
    "foreign_keys=ON",
)


class ReadOnly(sqlite3.Connection):
    """A read-only connection, not pooled, because the disk may become writable later."""


_LOG_IN_MEMORY = ("locking_mode=EXCLUSIVE",)


def primary_code(error: BaseException | None) -> int:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def connect(path: Path) -> sqlite3.Connection:
    try:
        pragmas = _PRAGMAS if path.stat().st_size else (*_OF_A_NEW_FILE, *_PRAGMAS)
        return _connected(path, "mode=rw", pragmas, sqlite3.Connection)
    except sqlite3.OperationalError as error:
        if primary_code(error) not in OF_THE_DISK:
            raise
    return connect_read_only(path)


def connect_read_only(path: Path, wait_s: float = BUSY_S) -> sqlite3.Connection:
    """Connect to a database file that cannot be written, and read its write-ahead log too."""
    if path.with_name(f"{path.name}-shm").exists():
        with suppress(sqlite3.OperationalError):
            return _connected(path, "mode=ro", (), ReadOnly, wait_s)
    log = path.with_name(f"{path.name}-wal")
    if not log.exists() or not log.stat().st_size:  # the file alone is complete
        return _connected(path, "immutable=1", (), ReadOnly, wait_s)
    # SQLite reads a log without its index only in this mode, and there without locks alone
    return _connected(path, "mode=ro&vfs=unix-none", _LOG_IN_MEMORY, ReadOnly, wait_s)


def _connected(
    path: Path,
    how: str,
    pragmas: Sequence[str],
    factory: type[sqlite3.Connection],
    wait_s: float = BUSY_S,
) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=wait_s,
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


NAME = "index.sqlite"


NO_SPACE = 64 << 10
"""Free bytes of a disk below which any error of SQLite is reported as that of a full disk."""


class Unwritable(StoreError):
    """Error raised by a write to a database whose disk cannot be written. Reads work."""


class Locked(StoreError):
    """Error raised if other processes or threads write for longer than the caller may wait."""


class _Memory:
    """A database in memory: one connection, used only by the thread that holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.connection.execute("PRAGMA foreign_keys=ON")
        self.connection.execute("PRAGMA temp_store=MEMORY")

    def close(self) -> None:
        with self.lock:
            self.connection.close()


class Database:
    """One SQLite file in WAL mode, with a pool of connections. Thread-safe.

    Threads of one process take turns at writing, and wait for other processes that write. Inside
    the `with` blocks of `read`, `write` and `steady`, errors of SQLite and of the file system are
    converted to StoreError, and those of a full disk to DiskFull. `obstacle`: why the file cannot
    be written; all reads then use a copy of it in memory.
    """

    def __init__(self, path: Path):
        self.path = path
        self.obstacle: str | None = None
        self._memory: _Memory | None = None
        self._idle: list[sqlite3.Connection] = []
        self._pool_lock = threading.Lock()
        self._turn = threading.Lock()
        self._mine = threading.local()
        self._closed = False
        self._scripts: list[str] = []
        self._inode: int | None = None
        self._era = 0
        self._check: Callable[[], None] | None = None

    @classmethod
    def open(cls, folder: Path) -> Database:
        database = cls(folder / NAME)
        with store_errors(database.path):
            database._make()
            with database.write():  # fails on a damaged file
                pass
        return database

    @classmethod
    def open_copy(cls, folder: Path, obstacle: str) -> Database:
        """Read the database in `folder` into memory; `write` raises Unwritable until `renew`."""
        database = cls(folder / NAME)
        with store_errors(database.path):
            database._inode = database.path.stat().st_ino
            database._memory = _Memory()
            with closing(connect_read_only(database.path)) as source:
                source.backup(database._memory.connection)
        database.obstacle = obstacle
        return database

    def copy(self) -> TemporaryDatabase:
        made = TemporaryDatabase()
        try:
            with self.read() as connection, made._connection() as target:
                connection.rollback()  # the copy is a transaction of its own
                connection.backup(target)
        except BaseException:
            made.close()
            raise
        return made

    def create(self, script: str) -> None:
        """Run a script of CREATE ... IF NOT EXISTS, now and whenever the file is created again."""
        if script not in self._scripts:
            self._scripts.append(script)
        with self.steady() as connection:
            statement = ""
            for line in script.splitlines(keepends=True):
                statement += line
                if sqlite3.complete_statement(statement):
                    connection.execute(statement)
                    statement = ""
            if statement.strip():
                raise ValueError(f"SQL statement without a final semicolon: {statement.strip()!r}")

    def check_before(self, check: Callable[[], None] | None) -> None:
        """Call `check` before each transaction from now on; None stops that.

        What it raises is raised instead of beginning the transaction. A transaction inside another
        one of the same thread joins it, and is not checked.
        """
        self._check = check

    def is_there(self) -> bool:
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def renew(self) -> None:
        """Switch to the file that is now at the database's path, with its tables."""
        self.drop_pool()
        with store_errors(self.path):
            self._make()
        memory, self._memory, self.obstacle = self._memory, None, None
        if memory is not None:
            memory.close()
        try:
            for script in self._scripts:
                self.create(script)
        except BaseException:
            self._inode = None
            raise

    def drop_pool(self) -> None:
        """Close all pooled connections, and each one in use when its `with` block ends."""
        with self._pool_lock:
            idle, self._idle = self._idle, []
            self._era += 1
        for connection in idle:
            connection.close()

    def _make(self) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self._inode = os.fstat(fd).st_ino
        os.close(fd)

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        before, self._mine.busy_s = self._busy_s(), seconds
        try:
            yield
        finally:
            self._mine.busy_s = before

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that sees one state of the database until the block ends.

        Inside a `write` or `steady` block of the same thread, the connection of that block is
        yielded. Raises StoreError.
        """
        current = self._current()
        if current is not None:
            yield current
            return
        with store_errors(self.path):
            self._before(changes=False)
            with self._connection() as connection:
                if connection.in_transaction:  # of this thread, in memory
                    yield connection
                    return
                connection.execute("BEGIN")
                try:
                    yield connection
                finally:
                    connection.rollback()

    def write(self) -> AbstractContextManager[sqlite3.Connection]:
        """Yield a connection in a write transaction, which is committed when the block ends.

        If the block raises, the transaction is rolled back. Changes are durable once the block has
        ended. A nested `write` block of the same thread joins the outer transaction. Blocks while
        other threads or processes write; raises Locked after `BUSY_S` seconds, or the seconds set
        with `patience`, Unwritable if the disk cannot be written, and other StoreErrors.
        """
        return self._transaction(changes=True)

    def steady(self) -> AbstractContextManager[sqlite3.Connection]:
        """Yield a connection to read with, and keep other writers out until the block ends.

        If the file cannot be written, it is one to the copy in memory. Raises as `write` does.
        """
        return self._transaction(changes=False)

    @contextmanager
    def _transaction(self, *, changes: bool) -> Iterator[sqlite3.Connection]:
        current = self._current()
        if current is not None:
            yield current
            return
        with store_errors(self.path):
            self._before(changes=changes)
            with self._writing(), self._connection() as connection:
                connection.execute(f"PRAGMA busy_timeout = {round(self._busy_s() * 1000)}")
                connection.execute("BEGIN IMMEDIATE")
                self._mine.connection = connection
                try:
                    yield connection
                    connection.commit()
                except BaseException:
                    connection.rollback()
                    raise
                finally:
                    self._mine.connection = None

    def empty_log(self, *, shrink: bool = False) -> None:
        """Move the content of the write-ahead log into the file, and truncate the log.

        `shrink`: first return unused pages to the file system, as far as nobody reads them; the log
        grows for that. Does nothing while another connection reads the log. Raises StoreError, and
        DiskFull if the disk has no space for the log.
        """
        if self._memory is not None:
            return
        with store_errors(self.path), self._writing(), self._connection() as connection:
            if shrink:
                connection.execute("PRAGMA incremental_vacuum").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._pool_lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self._memory is not None:
            self._memory.close()

    def check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path} is closed.")

    def _current(self) -> sqlite3.Connection | None:
        connection: sqlite3.Connection | None = getattr(self._mine, "connection", None)
        return connection

    def _before(self, *, changes: bool) -> None:
        if self._check is not None:
            self._check()
        if changes and self.obstacle is not None:
            raise Unwritable(self.obstacle)

    def _busy_s(self) -> float:
        seconds: float = getattr(self._mine, "busy_s", BUSY_S)
        return seconds

    @contextmanager
    def _writing(self) -> Iterator[None]:
        seconds = self._busy_s()
        if not self._turn.acquire(timeout=seconds):
            raise Locked(f"{self.path} was locked by other writers for {seconds:.0f} s: try again.")
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if (memory := self._memory) is not None:
            with memory.lock:
                self.check_open()
                if memory is self._memory:  # else `renew` closed it meanwhile
                    yield memory.connection
                    return
        with self._pool_lock:
            self.check_open()
            connection = self._idle.pop() if self._idle else None
            era = self._era
        if connection is None:
            connection = connect(self.path)
        try:
            yield connection
        except sqlite3.Error as error:
            if primary_code(error) in OF_THE_DISK:
                self.drop_pool()
            raise
        finally:
            with self._pool_lock:
                current = not self._closed and era == self._era
                keep = current and not isinstance(connection, ReadOnly)
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Convert errors of SQLite and of the file system inside the block to StoreError.

    A full disk raises DiskFull, and a busy database Locked. `path` is named in the messages.
    """
    try:
        yield
    except sqlite3.Error as error:
        code = primary_code(error)
        if code == sqlite3.SQLITE_FULL:
            raise DiskFull(f"The disk is full: {path} cannot grow.") from error
        if code == sqlite3.SQLITE_BUSY:
            raise Locked(f"{path} is being written by another process: try again.") from error
        with suppress(OSError):
            stat = os.statvfs(path.parent)
            if stat.f_bavail * stat.f_frsize < NO_SPACE:
                raise DiskFull(f"The disk is full: {path} cannot be opened.") from error
        raise StoreError(f"{path}: {error}.") from error
    except UnicodeDecodeError as error:  # raised for a damaged schema or text
        raise StoreError(f"{path}: {error}.") from sqlite3.DatabaseError(str(error))
    except OSError as error:
        where = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"The disk is full: {where} cannot be written.") from error
        raise StoreError(f"{where}: {error.strerror or error}.") from error


class TemporaryDatabase(Database):
    """A database in memory, for a server without a disk tier, and for copies of a database."""

    def __init__(self) -> None:
        super().__init__(Path(":memory:"))
        self._memory = _Memory()


def list_session_names(folder: Path) -> list[tuple[str, str]]:
    """Return (id, name) of the sessions in the store folder, most recently used first.

    For a shell's completion, which needs an answer at once and cannot show an error: none if the
    store cannot be read, and no import of numpy.
    """
    query = (
        "SELECT id, coalesce(nullif(name, ''), title, label, '') FROM sessions"
        " ORDER BY last_used_at DESC LIMIT 200"
    )
    try:
        with closing(connect_read_only((folder / NAME).resolve(), wait_s=0.1)) as db:
            return [(str(id), str(name)) for id, name in db.execute(query)]
    except (sqlite3.Error, OSError):
        return []
