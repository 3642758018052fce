"""Looking through a whole folder, and making it smaller, as a person asks for."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator
from itertools import takewhile
from pathlib import Path

from mlxcache.store import index, quarantine, verify
from mlxcache.store.core import Core
from mlxcache.store.database import translated
from mlxcache.store.evict import victims
from mlxcache.store.folder import TEMP_SUFFIX, remove
from mlxcache.store.found import Problem
from mlxcache.store.index import Row
from mlxcache.store.owner import alive
from mlxcache.store.safetensors import Malformed

Step = Callable[[int, int], None]
"""Called with the files that were read and those there are to read."""


def fit(core: Core) -> None:
    """Evict what exceeds the cap. Raises StoreError."""
    if core.space.limit is not None:
        with core.database.write() as connection:
            core.count("evicted", len(core.space.shrink(connection, core.space.limit)))


def check(core: Core, step: Step) -> list[Problem]:
    """See `Store.check`."""
    return [problem for problem, _ in _problems(core, step)]


def _problems(core: Core, step: Step) -> Iterator[tuple[Problem, Row | None]]:
    """What is wrong, and the row of a file that has one.

    Files that another process removes meanwhile are no problem.
    """
    with translated(core.folder.path):
        with core.database.write() as connection:  # so that nothing comes or goes while listing
            core.check_there()
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            rows = {core.folder.file(row.kind, row.digest): row for row in index.rows(connection)}
            present = [Path(entry.path) for _, entry in core.folder.files()]
        if verdict != "ok":
            yield Problem(core.folder.index, f"is damaged: {verdict}"), None
        for path in present:
            if path not in rows and (what := _stray(core, path)):
                yield Problem(path, what), None
        ids = {row.id for row in rows.values()}
        for number, (path, row) in enumerate(rows.items(), start=1):
            core.database.check_open()  # a server that ends does not wait for this
            if what := _wrong(core, path, row, ids):
                yield Problem(path, what), row
            step(number, len(rows))


def _mend(core: Core, step: Step) -> None:
    """Take out all that `check` names, but for the index itself: what is damaged, and its rows."""
    for problem, row in list(_problems(core, step)):
        if row is not None:
            core.drop(row.id, corrupt=True)
        elif problem.path != core.folder.index:
            with core.database.write() as connection:
                if not _has_row(core, connection, problem.path):
                    remove(problem.path)


def _has_row(core: Core, connection: sqlite3.Connection, path: Path) -> bool:
    """Whether somebody entered the file meanwhile."""
    rows = index.rows(connection, "lower(hex(digest)) = ?", path.stem)
    return any(core.folder.file(row.kind, row.digest) == path for row in rows)


def _stray(core: Core, path: Path) -> str | None:
    """What is wrong with a file that has no row."""
    if not path.name.endswith(TEMP_SUFFIX):
        return "is not in the index"
    if alive(core.folder, path.name[1:].rpartition("-")[0]):
        return None
    return "was left by a process that is gone"


def _wrong(core: Core, path: Path, row: Row, ids: Collection[int]) -> str | None:
    """What is wrong with a row or its file, which is read."""
    if row.owner is not None:
        return None if alive(core.folder, row.owner) else "was left half by a process that is gone"
    if row.parent is not None and row.parent not in ids:
        return "builds on a run that is not there"
    try:
        verify.whole(path, row)
    except FileNotFoundError:
        with core.database.read() as connection:
            there = index.one(connection, "id = ?", row.id)
        return None if there is None else "is in the index and not there"
    except (Malformed, OSError) as error:
        return f"is damaged: {error}"
    return None


def prune(core: Core, limit: int | None, step: Step) -> int:
    """See `Store.prune`."""
    _mend(core, step)
    with translated(core.folder.path):
        with core.database.write() as connection:
            core.check_there()
            core.note_uses(connection)
            before = core.space.used(connection)
            quarantine.trim(core.folder, 0, keep=0)
            if limit is not None:
                core.count("evicted", len(core.space.shrink(connection, limit)))
        return _freed(core, before)


def clear(core: Core, pinned: bool) -> int:
    """See `Store.clear`."""
    with translated(core.folder.path):
        with core.database.write() as connection:
            core.check_there()
            before = core.space.used(connection)
            quarantine.trim(core.folder, 0, keep=0)
            kept = {id for (id,) in connection.execute("SELECT file FROM pin")}
            rows = index.rows(connection)
            every = victims(rows, sum(row.disk for row in rows) + 1, kept, partly=True) or []
            going = takewhile(lambda row: pinned or row.id not in kept, every)
            core.space.remove(connection, list(going))
        return _freed(core, before)


def _freed(core: Core, before: int) -> int:
    core.database.shrink()
    with core.database.read() as connection:
        return max(0, before - core.space.used(connection))
