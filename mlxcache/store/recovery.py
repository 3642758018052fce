"""Recovery of a store folder after a kill, a damaged index, or the removal of the folder."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from errno import EACCES, EROFS
from pathlib import Path

from mlxcache.errors import StoreError, Vanished
from mlxcache.safetensors import Malformed
from mlxcache.store import index, ranks
from mlxcache.store.context import StoreContext
from mlxcache.store.database import Database, connect_read_only, store_errors
from mlxcache.store.digests import block_digests, root_digest
from mlxcache.store.eviction import TOKEN_BYTES, files_to_evict, ranked_files
from mlxcache.store.folder import (
    CHECKPOINT,
    KINDS,
    RUN,
    SUFFIX,
    TEMP_SUFFIX,
    Folder,
    remove,
)
from mlxcache.store.index import Row
from mlxcache.store.kv_files import open_file, read_checkpoint, read_run
from mlxcache.store.lock import is_alive, opening_lock
from mlxcache.store.reserve import LEAST_BYTES, SMALL_BYTES
from mlxcache.store.totals import read_total
from mlxcache.types import NO_TOKENS, Tokens

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_ROW_BYTES = 2048
"""Most bytes that each of many new rows adds to the index and its log, besides token ids."""

SMALL_INDEX = 64 << 20
"""Bytes below which a start checks the index whole, which takes a second for each 64 MiB.

In a larger one it does not compare the SQL indexes with their tables.
"""

MANY_FILES = 100_000
"""Most files whose sizes a start compares with the index; with more files it compares none.

Comparing so many takes a second on a busy disk.
"""

PROGRESS_S = 5.0
"""Seconds between two log lines of a long start."""

MISSING_S = 1.0
"""Seconds that a folder must be missing before it is created again.

In this time, a command that is removing the folder can finish.
"""

_NOT_DAMAGED = (
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)
"""SQLite errors of an unusable disk; any other error means a damaged index."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stray:
    """A file without an index row, with the row and token ids that can be made from its header.

    `previous`: digest of the checkpoint before it, or empty. `digests`: digests after each whole
    block of a run. `rooted`: the file needs no other run, because it starts at token 0 or is a
    checkpoint.
    """

    row: Row
    path: Path
    previous: bytes
    tokens: Tokens
    digests: list[bytes]
    rooted: bool


def open_database(folder: Folder, limit: int | None) -> Database:
    """Open the index of `folder` and check it.

    A damaged index is moved to quarantine, and an empty one is created. `limit`: limit of the
    folder in bytes, for the quarantine. Raises StoreError.
    """
    if not folder.index.exists():
        _remove_logs(folder)
    try:
        with store_errors(folder.index):
            if _of_no_version(folder.index):
                raise sqlite3.DatabaseError("the version of its format does not exist")
        return _open(folder)
    except StoreError as error:
        if not isinstance(error.__cause__, sqlite3.Error):
            raise
        if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF in _NOT_DAMAGED:
            raise
        log.warning(
            "index %s is damaged, rebuilding it from the files, without sessions and pins: %s",
            *(folder.index, error),
        )
    with store_errors(folder.index):
        folder.set_aside(folder.index, limit)
        _remove_logs(folder)
    return _open(folder)


def open_copy(folder: Folder, why: str) -> Database:
    """Read the index of `folder`, which cannot be written because of `why`, into memory.

    Raises StoreError, also if the index is missing, damaged or of a later version.
    """
    with store_errors(folder.index):
        database = Database.open_copy(folder.path, why)
        try:
            with database.read() as connection:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise _newer(folder)
            database.create(index.SCHEMA, index.complete)
        except BaseException:
            database.close()
            raise
    return database


def find_obstacle(folder: Folder) -> str | None:
    """Return why the folder cannot be written, as a sentence; None if it can, or is missing.

    Raises OSError if the file system cannot be asked.
    """
    if not folder.path.exists() or os.access(folder.path, os.W_OK):
        return None
    read_only = os.statvfs(folder.path).f_flag & os.ST_RDONLY
    return f"{folder.path} cannot be written: {os.strerror(EROFS if read_only else EACCES)}."


def free_least(folder: Folder) -> None:
    """Remove files until the index can be opened for writing, if the disk is full.

    Quarantined files come first, then runs and checkpoints in the order of eviction, which is read
    from the index; their rows stay until `recover` removes them. Without an index, or if it is
    damaged, only quarantined files are removed. Raises OSError if a file cannot be removed.
    """
    free = folder.free()
    if free >= LEAST_BYTES:
        return
    need = SMALL_BYTES - free
    need -= folder.free_quarantine(need)
    with suppress(StoreError):
        for row in _least_used(folder, need):
            remove(folder.file(row.kind, row.digest))


def _least_used(folder: Folder, need: int) -> list[Row]:
    """Return the rows of the files to evict to free `need` bytes, in order.

    If evicting all files frees less, all that can be evicted are returned. The index is not
    written: if its ranks are missing or out of date, it is copied to memory, where they are
    updated. Raises StoreError.
    """
    with (
        store_errors(folder.index),
        closing(connect_read_only(folder.index)) as connection,
        suppress(sqlite3.OperationalError),  # no ranks: made by an earlier version
    ):
        connection.execute("BEGIN")
        found = ranked_files(connection, need)
        if found is not None:
            return found
    with closing(open_copy(folder, "")) as copy, copy.steady() as read:
        return files_to_evict(read, need, partly=True) or []


def recover(context: StoreContext) -> None:
    """Make index and files agree again.

    Removes lock files, temporary files and unfinished files of processes that have ended, and rows
    without a file, and adds rows for complete files that have none. Raises StoreError.
    """
    with store_errors(context.folder.path):
        for lock in list(context.folder.locks.iterdir()):
            if not is_alive(context.folder.locks, lock.name):
                remove(lock)
        with context.database.write() as connection:
            _drop_unfinished(context, connection)
            found = _survey(context, connection)
            for id, damaged in found.lost:  # and all files that continue it
                context.remove_file(id, corrupt=damaged)
            if found.strays:
                _adopt_all(context, connection, found.strays)
                _free_rows(context, connection, found.strays)
            ranks.refresh(connection, _Progress(context.folder.index))


class _Progress:
    """Progress of `ranks.refresh`, as a log line every `PROGRESS_S` seconds.

    `refresh` takes longer than that only for an index of an earlier version, whose files have no
    ranks yet. `path`: that of the index, for the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = time.monotonic() + PROGRESS_S

    def __call__(self, done: int, total: int) -> None:
        if done % 1000 == 0 and time.monotonic() >= self._next:
            self._next += PROGRESS_S
            log.info(
                "index %s is being updated before it is used: %d of %d files put in the order of "
                "eviction",
                *(self._path, done, total),
            )


def _newer(folder: Folder) -> StoreError:
    return StoreError(
        f"{folder.index} was made by a newer version of mlxcache: update mlxcache, or choose "
        "another folder with --cache-dir DIR."
    )


def _open(folder: Folder) -> Database:
    database = Database.open(folder.path)
    try:
        with database.write() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if SCHEMA_VERSION < version < 1000:
                raise _newer(folder)
            if version != SCHEMA_VERSION:  # the statement takes space, which a full disk lacks
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            check = (
                "integrity_check" if folder.index.stat().st_size < SMALL_INDEX else "quick_check"
            )
            (verdict,) = connection.execute(f"PRAGMA {check}(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
        database.create(index.SCHEMA, index.complete)
        with database.read() as connection:
            if not index.shapes() <= set(connection.execute(index.SHAPES)):
                raise sqlite3.DatabaseError("its tables are not those of this version")
    except BaseException:
        database.close()
        raise
    return database


def _of_no_version(path: Path) -> bool:
    """Return whether the file's header has a format version that no SQLite release writes.

    SQLite assumes that such a file was written by a later version, and opens it read-only or not at
    all. Source: https://sqlite.org/fileformat.html#file_format_version_numbers
    """
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError:
        return False  # a missing index, or SQLite says what is wrong
    return any(version not in (1, 2) for version in header[18:])


def _remove_logs(folder: Folder) -> None:
    for suffix in ("-wal", "-shm"):
        remove(folder.index.with_name(folder.index.name + suffix))


def _drop_unfinished(context: StoreContext, connection: sqlite3.Connection) -> None:
    """Remove files that processes were writing when they ended, and their rows."""
    for row in index.rows(connection, "owner IS NOT NULL"):
        assert row.owner is not None
        if not is_alive(context.folder.locks, row.owner):
            remove(context.folder.file(row.kind, row.digest))
            index.delete(connection, row)


@dataclass(slots=True)
class _Survey:
    """Differences between the index and the files of the folder.

    `lost`: id of each row whose file is missing (with False) or has another size (with True).
    `strays`: kind and path of each file without a row.
    """

    lost: list[tuple[int, bool]] = field(default_factory=list)
    strays: list[tuple[str, Path]] = field(default_factory=list)


def _survey(context: StoreContext, connection: sqlite3.Connection) -> _Survey:
    """Compare the files of the folder with the index.

    Removes temporary files of processes that have ended. Sizes of more than `MANY_FILES` files are
    not compared; a file of another size is found damaged when it is read.
    """
    found = _Survey()
    sizes = read_total(connection).files <= MANY_FILES
    for kind in KINDS:
        query = "SELECT lower(hex(digest)) || ?, id FROM file WHERE kind = ?"
        known: dict[str, int] = dict(connection.execute(query, (SUFFIX, kind)))
        for group, entries in context.folder.groups(kind):
            for entry in entries:
                name = entry.name
                if name in known and name.startswith(group):
                    id = known.pop(name)
                    if sizes and not _has_size(connection, id, entry):
                        found.lost.append((id, True))
                elif not name.endswith(TEMP_SUFFIX):
                    found.strays.append((kind, Path(entry.path)))
                elif not is_alive(context.folder.locks, name[1:].rpartition("-")[0]):
                    remove(Path(entry.path))
        for id in known.values():
            if index.one(connection, "id = ? AND owner IS NULL", id) is not None:
                found.lost.append((id, False))
    return found


def _has_size(connection: sqlite3.Connection, id: int, entry: os.DirEntry[str]) -> bool:
    """Return whether a file has the size that its row says, or is being written."""
    query = "SELECT nbytes, owner FROM file WHERE id = ?"
    nbytes, owner = connection.execute(query, (id,)).fetchone()
    return owner is not None or entry.stat(follow_symlinks=False).st_size == nbytes


def _adopt_all(
    context: StoreContext, connection: sqlite3.Connection, strays: list[tuple[str, Path]]
) -> None:
    """Add rows for complete files that have none, and move damaged files to quarantine.

    Runs whose prefix is missing are removed. `strays`: kind and path of each file without a row.
    """
    found = []
    for kind, path in strays:
        try:
            found.append(_read(kind, path))
        except (Malformed, OSError) as error:
            log.warning("file quarantined: %s: %s", path, error)
            context.folder.set_aside(path, context.space.limit)
            context.count("corrupt")
    holders: dict[bytes, int] = {}
    for row in index.rows(connection, "kind = ?", RUN):
        for digest in block_digests(row.base, index.get_tokens(connection, row.id)):
            holders[digest] = row.id
    found.sort(key=lambda stray: (stray.row.kind == CHECKPOINT, stray.row.start))
    for stray in found:
        _adopt(connection, holders, stray)


def _free_rows(
    context: StoreContext, connection: sqlite3.Connection, strays: list[tuple[str, Path]]
) -> None:
    """Evict files to make room for the index rows of `strays`, as the folder may be full.

    `strays`: kind and path of each file without a row.
    """
    if context.space.limit is not None:
        growth = TOKEN_BYTES * read_total(connection).tokens + _ROW_BYTES * len(strays)
        context.space.shrink(connection, max(0, context.space.limit - growth))


def _read(kind: str, path: Path) -> _Stray:
    """Read the header of a file without an index row. Raises Malformed and OSError."""
    with open_file(path) as fd:
        if kind == RUN:
            run = read_run(fd)
            digests, digest, base, start = run.digests, run.digest, run.base, run.start
            stop = start + len(run.tokens)
            key, previous, tokens = (digests or [digest])[0], b"", run.tokens
            rooted = start == 0 and base == root_digest(run.namespace)
        else:
            state = read_checkpoint(fd)
            digest, base, start = state.digest, state.base, state.position
            stop, key, previous, tokens = start, base, state.previous, NO_TOKENS
            digests, rooted = [], True
        stat = os.fstat(fd)
    if (path.parent.name, path.name) != (digest.hex()[:2], digest.hex() + SUFFIX):
        raise Malformed("its name or folder is not that of the digest of its content")
    disk = stat.st_blocks * 512
    sizes = (stat.st_size, disk, stat.st_mtime)
    row = Row(0, kind, digest, base, key, start, stop, *sizes, None, None, None)
    return _Stray(row, path, previous, tokens, digests, rooted)


def _adopt(connection: sqlite3.Connection, holders: dict[bytes, int], stray: _Stray) -> None:
    """Add an index row for a file, or remove the file if it is a run whose prefix is missing.

    `holders` maps the digest after each block to the id of the run that contains the block; the
    blocks of a file that is added are added to it.
    """
    parent = holders.get(stray.row.base)
    if parent is None and not stray.rooted:
        remove(stray.path)
        return
    before = index.one(connection, "kind = ? AND digest = ?", CHECKPOINT, stray.previous)
    row = replace(stray.row, parent=parent, previous=before.id if before else None)
    id = index.insert(connection, row)
    if row.kind == RUN:
        index.put_tokens(connection, id, stray.tokens)
        holders.update((digest, id) for digest in stray.digests)


class StoreReopener:
    """Reopens a store folder that was removed or replaced while the store was open.

    It also reopens a folder that was opened for reading only, once it can be written. Call it
    before each transaction; it returns at once if there is nothing to do.
    """

    def __init__(self, context: StoreContext):
        self._context = context
        self._lock = threading.RLock()
        self._reopening = False
        self._missed_at: float | None = None

    def __call__(self) -> None:
        """Reopen the folder if it was removed or replaced, or can be written again.

        A folder that is missing is created again. Raises Vanished until it has been missing for
        `MISSING_S` seconds, or while its disk is not mounted, and StoreError if it cannot be
        created or its index cannot be used.
        """
        if self._context.database.is_there() and not self._reopening and not self._is_writable():
            self._missed_at = None
            return
        with self._lock:
            if not self._context.database.is_there() or self._is_writable():
                self._reopening = True
                try:
                    self._reopen()
                finally:
                    self._reopening = False
        self._missed_at = None

    def _is_writable(self) -> bool:
        """Return whether the folder was opened for reading only, and can be written now."""
        if self._context.database.obstacle is None:
            return False
        try:
            folder = self._context.folder
            return find_obstacle(folder) is None and folder.free() >= LEAST_BYTES
        except OSError:
            return False

    def _reopen(self) -> None:
        context = self._context
        folder, only_read = context.folder, context.database.obstacle is not None
        now = time.monotonic()
        if self._missed_at is None:
            self._missed_at = now
        if now - self._missed_at < MISSING_S and not folder.index.exists():
            context.check_present()
        with store_errors(folder.path):
            context.database.check_open()
            if not folder.may_be_made_again():
                raise Vanished(f"{folder.path} is missing, and so is the disk that it was on.")
            folder.make()
            with opening_lock(folder.path):
                context.renew_lock()
                context.database.renew()
                with context.database.read() as connection:
                    if not index.shapes() <= set(connection.execute(index.SHAPES)):
                        raise StoreError(f"{folder.index} is not an index of this version.")
                recover(context)
        if only_read:
            log.warning("store folder can be written again: %s", folder.path)
        else:
            log.warning("store folder was removed; reopened: %s", folder.path)
