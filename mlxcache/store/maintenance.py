"""Maintenance of a whole store folder on request: check, prune, clear."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from mlxcache.errors import DiskFull
from mlxcache.safetensors import Malformed
from mlxcache.store import index
from mlxcache.store.context import StoreContext
from mlxcache.store.database import store_errors
from mlxcache.store.eviction import files_to_evict
from mlxcache.store.folder import KINDS, TEMP_SUFFIX, remove
from mlxcache.store.found import Problem
from mlxcache.store.index import Row
from mlxcache.store.kv_files import check_whole
from mlxcache.store.lock import is_alive
from mlxcache.store.totals import read_total

Progress = Callable[[int, int], None]
"""Callable that gets the number of files read and the number to read."""


def evict_excess(context: StoreContext) -> None:
    """Evict files until the folder is within its size limit. Raises StoreError."""
    if context.space.limit is not None:
        with context.database.write() as connection:
            context.count("evicted", len(context.space.shrink(connection, context.space.limit)))


def check(context: StoreContext, progress: Progress) -> list[Problem]:
    """Return the problems of the folder; see `Store.check`."""
    return [problem for problem, _ in _problems(context, progress)]


def _problems(context: StoreContext, progress: Progress) -> Iterator[tuple[Problem, Row | None]]:
    """Yield each problem of the folder with the index row of its file, or None if it has no row.

    Files that another process removes in the meantime are not reported.
    """
    with store_errors(context.folder.path):
        with context.database.steady() as connection:  # no file is added or removed while listing
            context.check_present()
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            rows = {
                context.folder.file(row.kind, row.digest): row for row in index.rows(connection)
            }
            present = [Path(entry.path) for _, entry in context.folder.files()]
        if verdict != "ok":
            yield Problem(context.folder.index, f"is damaged: {verdict}"), None
        for path in present:
            if path not in rows and (what := _stray_problem(context, path)):
                yield Problem(path, what), None
        ids = {row.id for row in rows.values()}
        for number, (path, row) in enumerate(rows.items(), start=1):
            context.database.check_open()  # a closing server does not wait for this
            if what := _row_problem(context, path, row, ids):
                yield Problem(path, what), row
            progress(number, len(rows))


def _remove_problems(context: StoreContext, progress: Progress) -> None:
    """Remove everything that `check` reports, except the index.

    A file with a row is moved to quarantine; its row, and the files that continue it with their
    rows, are removed. A file without a row is removed.
    """
    for problem, row in list(_problems(context, progress)):
        if row is not None:
            context.remove_file(row.id, corrupt=True)
        elif problem.path != context.folder.index:
            with context.database.write() as connection:
                if not _has_row(context, connection, problem.path):
                    remove(problem.path)


def _has_row(context: StoreContext, connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether the index now has a row for the file at `path`.

    Another process may have added the row since the problems were listed.
    """
    try:
        digest = bytes.fromhex(path.stem)
    except ValueError:
        return False  # its name is not that of a file of the store
    rows = index.rows(connection, "kind IN (?, ?) AND digest = ?", *KINDS, digest)
    return any(context.folder.file(row.kind, row.digest) == path for row in rows)


def _stray_problem(context: StoreContext, path: Path) -> str | None:
    """Return the problem of a file without an index row, or None if it is being written.

    The problem is a predicate, as in `Problem.what`.
    """
    if not path.name.endswith(TEMP_SUFFIX):
        return "is not in the index"
    if is_alive(context.folder.locks, path.name[1:].rpartition("-")[0]):
        return None
    return "was left by a process that ended"


def _row_problem(context: StoreContext, path: Path, row: Row, ids: Collection[int]) -> str | None:
    """Read the file of an index row; return the problem of the file or the row, or None.

    The problem is a clause without its subject, such as "builds on a run that is missing". `path`:
    the file. `ids`: ids of all rows of the index.
    """
    if row.owner is not None:
        if is_alive(context.folder.locks, row.owner):
            return None
        return "was left unfinished by a process that ended"
    if row.parent is not None and row.parent not in ids:
        return "builds on a run that is missing"
    try:
        check_whole(path, row)
    except FileNotFoundError:
        with context.database.read() as connection:
            there = index.one(connection, "id = ?", row.id)
        return None if there is None else "is in the index but missing"
    except (Malformed, OSError) as error:
        return f"is damaged: {error}"
    return None


def prune(context: StoreContext, limit: int | None, progress: Progress) -> int:
    """Remove damaged files and the quarantine, then evict files down to `limit` bytes.

    If `limit` is None, nothing is evicted. Returns the number of bytes freed, without those of the
    files that were removed because they continue a damaged one. See `Store.prune`.
    """
    _remove_problems(context, progress)
    with store_errors(context.folder.path):
        with context.database.write() as connection:
            context.check_present()
            context.write_uses(connection)
            before = context.space.used(connection)
            context.folder.trim_quarantine(0, keep=0)
            if limit is not None:
                context.count("evicted", len(context.space.shrink(connection, limit)))
        return _freed(context, before)


def clear(context: StoreContext, pinned: bool) -> int:
    """Remove every run and checkpoint, pinned ones only if `pinned`, and the quarantine.

    Files that are being written stay, and without `pinned` also those that a pinned file continues.
    Returns the number of bytes freed.
    """
    with store_errors(context.folder.path):
        with context.database.write() as connection:
            context.check_present()
            before = context.space.used(connection)
            context.folder.trim_quarantine(0, keep=0)
            kept = index.pinned(connection)
            everything = read_total(connection).disk + 1
            every = files_to_evict(connection, everything, partly=True) or []
            going = takewhile(lambda row: pinned or row.id not in kept, every)
            context.space.remove(connection, list(going))
        return _freed(context, before)


def _freed(context: StoreContext, before: int) -> int:
    with suppress(DiskFull):  # the pages stay in the index, and are used again
        context.database.empty_log()
        context.database.shrink()
    with context.database.read() as connection:
        return max(0, before - context.space.used(connection))
