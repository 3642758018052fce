"""An index in memory with given rows, to compare its order of eviction with the definition's."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mlxcache.store import index
from mlxcache.store.eviction import files_to_evict
from mlxcache.store.index import Row

NO_REUSES: Mapping[int, int] = {}


@contextmanager
def indexed(rows: Sequence[Row]) -> Iterator[sqlite3.Connection]:
    """Yield a connection to an index of these rows, which keep their ids and links."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("PRAGMA foreign_keys=ON")
    connection.executescript(index.SCHEMA)
    for row in rows:
        put(connection, row)
    try:
        yield connection
    finally:
        connection.close()


def put(connection: sqlite3.Connection, row: Row) -> None:
    """Insert a row with its id; its digests are made of the id."""
    digest = row.id.to_bytes(16, "big")
    named = replace(row, digest=digest, base=digest, key=digest)
    values = [getattr(named, name) for name in index.COLUMNS.split(", ")]
    connection.execute(f"INSERT INTO file VALUES ({', '.join('?' * len(values))})", values)


def evicted(
    rows: Sequence[Row],
    need: int,
    pinned: Collection[int] = (),
    reuses: Mapping[int, int] = NO_REUSES,
) -> list[int] | None:
    """Return the ids of the files that an index of these rows evicts to free `need` bytes."""
    ids = {row.id for row in rows}
    with indexed(rows) as connection:
        connection.executemany(
            "INSERT INTO pin VALUES ('a', ?)", [(id,) for id in set(pinned) & ids]
        )
        connection.executemany(
            "INSERT INTO found VALUES (?, ?)", [one for one in reuses.items() if one[0] in ids]
        )
        chosen = files_to_evict(connection, need)
        return None if chosen is None else [row.id for row in chosen]
