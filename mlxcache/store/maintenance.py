"""Looking through a whole folder, and making it smaller, as a person asks for."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator
from itertools import takewhile
from pathlib import Path

from mlxcache.safetensors import Malformed
from mlxcache.store import index
from mlxcache.store.context import StoreContext
from mlxcache.store.database import translated
from mlxcache.store.eviction import victims
from mlxcache.store.folder import TEMP_SUFFIX, remove
from mlxcache.store.found import Problem
from mlxcache.store.index import Row
from mlxcache.store.kv_files import check_whole
from mlxcache.store.lock import alive

Progress = Callable[[int, int], None]
"""Called with the files that were read and those there are to read."""


def evict_excess(context: StoreContext) -> None:
    """Evict what exceeds the cap. Raises StoreError."""
    if context.space.limit is not None:
        with context.database.write() as connection:
            context.count("evicted", len(context.space.shrink(connection, context.space.limit)))


def check(context: StoreContext, progress: Progress) -> list[Problem]:
    """See `Store.check`."""
    return [problem for problem, _ in _problems(context, progress)]


def _problems(context: StoreContext, progress: Progress) -> Iterator[tuple[Problem, Row | None]]:
    """What is wrong, and the row of a file that has one.

    Files that another process removes meanwhile are no problem.
    """
    with translated(context.folder.path):
        with context.database.write() as connection:  # so that nothing comes or goes while listing
            context.check_present()
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            rows = {
                context.folder.file(row.kind, row.digest): row for row in index.rows(connection)
            }
            present = [Path(entry.path) for _, entry in context.folder.files()]
        if verdict != "ok":
            yield Problem(context.folder.index, f"is damaged: {verdict}"), None
        for path in present:
            if path not in rows and (what := _stray(context, path)):
                yield Problem(path, what), None
        ids = {row.id for row in rows.values()}
        for number, (path, row) in enumerate(rows.items(), start=1):
            context.database.check_open()  # a server that ends does not wait for this
            if what := _wrong(context, path, row, ids):
                yield Problem(path, what), row
            progress(number, len(rows))


def _mend(context: StoreContext, progress: Progress) -> None:
    """Take out all that `check` names, but for the index itself: what is damaged, and its rows."""
    for problem, row in list(_problems(context, progress)):
        if row is not None:
            context.remove_file(row.id, corrupt=True)
        elif problem.path != context.folder.index:
            with context.database.write() as connection:
                if not _has_row(context, connection, problem.path):
                    remove(problem.path)


def _has_row(context: StoreContext, connection: sqlite3.Connection, path: Path) -> bool:
    """Whether somebody entered the file meanwhile."""
    rows = index.rows(connection, "lower(hex(digest)) = ?", path.stem)
    return any(context.folder.file(row.kind, row.digest) == path for row in rows)


def _stray(context: StoreContext, path: Path) -> str | None:
    """What is wrong with a file that has no row."""
    if not path.name.endswith(TEMP_SUFFIX):
        return "is not in the index"
    if alive(context.folder, path.name[1:].rpartition("-")[0]):
        return None
    return "was left by a process that is gone"


def _wrong(context: StoreContext, path: Path, row: Row, ids: Collection[int]) -> str | None:
    """What is wrong with a row or its file, which is read."""
    if row.owner is not None:
        if alive(context.folder, row.owner):
            return None
        return "was left half by a process that is gone"
    if row.parent is not None and row.parent not in ids:
        return "builds on a run that is not there"
    try:
        check_whole(path, row)
    except FileNotFoundError:
        with context.database.read() as connection:
            there = index.one(connection, "id = ?", row.id)
        return None if there is None else "is in the index and not there"
    except (Malformed, OSError) as error:
        return f"is damaged: {error}"
    return None


def prune(context: StoreContext, limit: int | None, progress: Progress) -> int:
    """See `Store.prune`."""
    _mend(context, progress)
    with translated(context.folder.path):
        with context.database.write() as connection:
            context.check_present()
            context.write_uses(connection)
            before = context.space.used(connection)
            context.folder.trim_quarantine(0, keep=0)
            if limit is not None:
                context.count("evicted", len(context.space.shrink(connection, limit)))
        return _freed(context, before)


def clear(context: StoreContext, pinned: bool) -> int:
    """See `Store.clear`."""
    with translated(context.folder.path):
        with context.database.write() as connection:
            context.check_present()
            before = context.space.used(connection)
            context.folder.trim_quarantine(0, keep=0)
            kept = {id for (id,) in connection.execute("SELECT file FROM pin")}
            rows = index.rows(connection)
            every = victims(rows, sum(row.disk for row in rows) + 1, kept, partly=True) or []
            going = takewhile(lambda row: pinned or row.id not in kept, every)
            context.space.remove(connection, list(going))
        return _freed(context, before)


def _freed(context: StoreContext, before: int) -> int:
    context.database.shrink()
    with context.database.read() as connection:
        return max(0, before - context.space.used(connection))
