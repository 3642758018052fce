"""Which checkpoints of a path are kept, so that they take linear room."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from mlxcache.store.index import Row

NEWEST = 4
STRIDE = 4096
"""Tokens. The first checkpoint in each stretch of so many is kept."""


def superseded(connection: sqlite3.Connection, path: Sequence[Row]) -> list[Row]:
    """Those of `path`, all checkpoints along it in order of position, that are not needed.

    Kept: the first, the newest 4 of every path that goes through, one per 4096 tokens, and those
    where paths part.
    """
    found = []
    before = path[0] if path else None
    for row in path[1:-NEWEST]:
        assert before is not None
        if row.start // STRIDE != before.start // STRIDE or _needed(connection, row):
            before = row
        else:
            found.append(row)
    return found


def _needed(connection: sqlite3.Connection, row: Row) -> bool:
    """Whether paths part at `row`, or it is among the newest of one."""
    level = [row.id]
    for depth in range(NEWEST):
        after: list[int] = []
        for id in level:
            query = "SELECT id FROM file WHERE previous = ?"
            next_ones = [found[0] for found in connection.execute(query, (id,))]
            if not next_ones or (depth == 0 and len(next_ones) > 1):
                return True
            after += next_ones
        level = after
    return False
