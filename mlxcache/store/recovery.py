"""Opening of a store folder, and its recovery after a kill, damage or removal."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from errno import EACCES, EROFS
from pathlib import Path

from mlxcache.errors import StoreError, Vanished
from mlxcache.safetensors import Malformed
from mlxcache.store import index
from mlxcache.store.context import StoreContext
from mlxcache.store.database import Database, connect_read_only, primary_code, store_errors
from mlxcache.store.digests import block_digests, root_digest
from mlxcache.store.eviction import TOKEN_BYTES, Space, files_to_evict, ranked_files
from mlxcache.store.folder import (
    CHECKPOINT,
    KINDS,
    LEAST_BYTES,
    RUN,
    SMALL_BYTES,
    SUFFIX,
    TEMP_SUFFIX,
    Folder,
    Reserve,
    remove,
)
from mlxcache.store.index import Row, read_totals
from mlxcache.store.kv_files import open_file, read_checkpoint, read_run
from mlxcache.store.lock import NoLock, ProcessLock, is_alive, opening_lock
from mlxcache.types import NO_TOKENS, Tokens

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_ROW_BYTES = 2048
"""Most bytes that each of many new rows adds to the index and its log, besides token ids."""

SMALL_INDEX = 64 << 20
"""Bytes below which a start checks the index whole, which takes a second for each 64 MiB."""

MANY_FILES = 100_000
"""Most files whose sizes a start compares with the index: so many take a second."""

MISSING_S = 1.0
"""Seconds that a folder must be missing before it is created again: its removal may go on."""

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


@dataclass(frozen=True, slots=True, eq=False)
class _Stray:
    """A file without an index row, with the row and token ids that can be made from its header.

    `previous`: digest of the checkpoint before it, or empty. `digests`: digests after each whole
    block of a run. `rooted`: the file needs no other run.
    """

    row: Row
    path: Path
    previous: bytes
    tokens: Tokens
    digests: list[bytes]
    rooted: bool


def open_folder(space: Space, *, reading: bool) -> StoreContext:
    folder = space.folder
    with store_errors(folder.path):
        why = find_obstacle(folder)
        if reading and why is None and folder.index.exists() and folder.free() < LEAST_BYTES:
            why = f"The disk of {folder.path} is full."
        return _open_writable(space) if why is None else _open_read_only(space, why)


def _open_writable(space: Space) -> StoreContext:
    folder, reserve = space.folder, Reserve(space.folder, space.limit)
    folder.make()
    with reserve.freeing(), opening_lock(folder.path):
        free_least(folder)
        lock = ProcessLock(folder.locks)
        try:
            database = open_database(folder, space.limit)
            context = StoreContext(folder, database, lock, space, reserve)
            recover(context)
            with database.read() as connection:
                context.resume_clock(index.latest_use(connection))
            if space.limit is not None:
                with database.write() as connection:
                    context.count("evicted", len(space.shrink(connection, space.limit)))
            database.check_before(StoreReopener(context))
        except BaseException:
            lock.release()
            raise
    return context


def _open_read_only(space: Space, why: str) -> StoreContext:
    folder = space.folder
    folder.note_device()
    database = open_copy(folder, why)
    context = StoreContext(folder, database, NoLock(), space, Reserve(folder, space.limit))
    with database.read() as connection:
        context.resume_clock(index.latest_use(connection))
    database.check_before(StoreReopener(context))
    return context


def open_database(folder: Folder, limit: int | None) -> Database:
    """Open the index and check it. A damaged one is moved to quarantine and made anew."""
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
        if primary_code(error.__cause__) in _NOT_DAMAGED:
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
    """Read the index, which cannot be written because of `why`, into memory."""
    with store_errors(folder.index):
        database = Database.open_copy(folder.path, why)
        try:
            with database.read() as connection:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise _newer(folder)
            database.create(index.SCHEMA)
        except BaseException:
            database.close()
            raise
    return database


def find_obstacle(folder: Folder) -> str | None:
    """Return why the folder cannot be written, as a sentence; None if it can, or is missing."""
    if not folder.path.exists() or os.access(folder.path, os.W_OK):
        return None
    read_only = os.statvfs(folder.path).f_flag & os.ST_RDONLY
    return f"{folder.path} cannot be written: {os.strerror(EROFS if read_only else EACCES)}."


def free_least(folder: Folder) -> None:
    """Remove files until the index can be opened for writing, if the disk is full.

    Quarantined files come first, then runs and checkpoints in the order of eviction, which is read
    from the index; their rows stay until `recover` removes them. Raises OSError if a file cannot be
    removed.
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
    """Return the rows of the files to evict to free `need` bytes, or of all if they free less.

    The index is not written: if its ranks are out of date, it is copied to memory, where they are
    updated. Raises StoreError.
    """
    with store_errors(folder.index), closing(connect_read_only(folder.index)) as connection:
        connection.execute("BEGIN")
        found = ranked_files(connection, need)
        if found is not None:
            return found
    with closing(open_copy(folder, "")) as copy, copy.steady() as read:
        return files_to_evict(read, need, partly=True) or []


def recover(context: StoreContext) -> None:
    """Make index and files agree again, after kills, and after changes of the folder by hand."""
    with store_errors(context.folder.path):
        for lock in list(context.folder.locks.iterdir()):
            if not is_alive(context.folder.locks, lock.name):
                remove(lock)
        with context.database.write() as connection:
            for row in index.rows(connection, "owner IS NOT NULL"):
                if row.owner is not None and not is_alive(context.folder.locks, row.owner):
                    context.space.remove(connection, [row])
            lost, strays = _compare(context, connection)
            for id, damaged in lost:  # and all files that continue it
                context.remove_file(id, corrupt=damaged)
            if strays:
                _adopt_all(context, connection, strays)
            index.update_ranks(connection)


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
            shapes = set(connection.execute(index.SHAPES))
            if shapes and not index.shapes() <= shapes:
                raise sqlite3.DatabaseError("its tables are not those of this version")
        database.create(index.SCHEMA)
    except BaseException:
        database.close()
        raise
    return database


def _of_no_version(path: Path) -> bool:
    """Return whether the file's header has a format version that no SQLite release writes.

    SQLite would open it read-only or not at all. Source:
    https://sqlite.org/fileformat.html#file_format_version_numbers
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


def _compare(
    context: StoreContext, connection: sqlite3.Connection
) -> tuple[list[tuple[int, bool]], list[tuple[str, Path]]]:
    """Compare the files of the folder with the index.

    Returns the id of each row whose file is missing (with False) or has another size (with True),
    and kind and path of each file without a row. Sizes of more than `MANY_FILES` files are not
    compared; a file of another size is found damaged when it is read.
    """
    lost: list[tuple[int, bool]] = []
    strays: list[tuple[str, Path]] = []
    sizes = read_totals(connection).files <= MANY_FILES
    for kind in KINDS:
        query = "SELECT lower(hex(digest)) || ?, id, nbytes, owner IS NULL FROM file WHERE kind = ?"
        known = {name: row for name, *row in connection.execute(query, (SUFFIX, kind))}
        for group, entries in context.folder.groups(kind):
            for entry in entries:
                name = entry.name
                if name in known and name.startswith(group):
                    id, nbytes, durable = known.pop(name)
                    if sizes and durable and entry.stat(follow_symlinks=False).st_size != nbytes:
                        lost.append((id, True))
                elif not name.endswith(TEMP_SUFFIX):
                    strays.append((kind, Path(entry.path)))
                elif not is_being_written(context.folder, Path(entry.path)):
                    remove(Path(entry.path))
        lost += [(id, False) for id, _, durable in known.values() if durable]
    return lost, strays


def is_being_written(folder: Folder, path: Path) -> bool:
    owner = path.name[1:].rpartition("-")[0]
    return path.name.endswith(TEMP_SUFFIX) and is_alive(folder.locks, owner)


def _adopt_all(
    context: StoreContext, connection: sqlite3.Connection, strays: list[tuple[str, Path]]
) -> None:
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
    # the folder may be full, and the new rows take space
    if context.space.limit is not None:
        growth = TOKEN_BYTES * read_totals(connection).tokens + _ROW_BYTES * len(strays)
        context.space.shrink(connection, max(0, context.space.limit - growth))


def _read(kind: str, path: Path) -> _Stray:
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
    """Add an index row for a file, or remove the file if it is a run whose prefix is missing."""
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
    """Reopens a folder that was removed or replaced, or can be written again, while it was open.

    Call it before each transaction; it returns at once if there is nothing to do.
    """

    def __init__(self, context: StoreContext):
        self._context = context
        self._lock = threading.RLock()
        self._reopening = False
        self._missed_at: float | None = None

    def __call__(self) -> None:
        """Raise Vanished until it is missing for `MISSING_S`, or while its disk is not mounted."""
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
