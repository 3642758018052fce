"""Which checkpoints on disk go, so that they take linear room, and no more than their share."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence

from mlxcache.store import index
from mlxcache.store.eviction import last_uses
from mlxcache.store.folder import CHECKPOINT
from mlxcache.store.index import Match, Row
from mlxcache.store.session_rows import along
from mlxcache.tree.thinning import BUDGET_SHARE, NEWEST, allowed, checkpoints_to_drop
from mlxcache.types import Tokens

LEFT_TOKENS = 1024
"""The end of a reply that is no further from a path that left it may go: so many are fed again."""

LEFT = 2
"""Such ends that stay: a request may still go on with them."""


def unneeded(
    connection: sqlite3.Connection, namespace: str, ids: Tokens, match: Match, limit: int
) -> list[Row]:
    """The checkpoints along `ids` that are not worth their bytes, in a folder of `limit` bytes.

    First ends of replies beside the path go, such as those with a thought that the next prompt
    leaves out; then those of the path itself: see `checkpoints_to_drop`. The newest of other paths
    stay, and that at which a leaf of a session has its last one: a turn's files are there before
    the turn is booked, and a fork may lag behind for good.
    """
    path = match.checkpoints
    if not path:
        return []
    kv_bytes = sum(row.disk * (b - a) // (row.stop - row.start) for row, a, b in match.cover)
    size = max(row.disk for row in path)
    most = allowed(kv_bytes, size, limit) // max(1, size)
    left = _left(connection, path)
    excess = len(path) + len(left) - most
    if excess <= 0:
        return []
    last = _last(path, along(connection, namespace, ids))
    gone = [row for row in left[:-LEFT] if row.previous not in last][:excess]
    positions = [row.start for row in path]
    parted = {row.start for row in path if len(_followers(connection, row.id)) > 1}
    spare = checkpoints_to_drop(positions, max(match.length, positions[-1]), most, parted=parted)
    away = {row.id for row in gone}
    return gone + [
        row
        for row in path
        if row.start in spare and row.id not in last and not _needed(connection, row.id, away)
    ]


def _left(connection: sqlite3.Connection, path: Sequence[Row]) -> list[Row]:
    """Checkpoints a little beside a path that nothing follows, the oldest first."""
    own = {row.id: row.start for row in path}
    found: list[Row] = []
    for id, start in own.items():
        beside = index.rows(connection, "previous = ? AND owner IS NULL", id)
        near = [row for row in beside if row.id not in own and row.start - start < LEFT_TOKENS]
        found += [row for row in near if not _followers(connection, row.id)]
    return sorted(found, key=lambda row: (row.used, row.id))


def _last(path: Sequence[Row], ends: Sequence[int]) -> set[int]:
    """The ids of the last checkpoints before each of `ends`."""
    before = [
        max((row for row in path if row.start <= end), key=_start, default=None) for end in ends
    ]
    return {row.id for row in before if row is not None}


def _start(row: Row) -> int:
    return row.start


def crowded(connection: sqlite3.Connection, coming: int, limit: int) -> list[Row]:
    """The checkpoints that go for `coming` bytes of another, so that they keep to their share.

    The least recently used first; of equal use those between a path's first and its last, then
    the last, and the first, which new conversations share. Pinned ones go when no others are left.
    One counts as used when those after it were.
    """
    query = "SELECT ifnull(sum(disk), 0) FROM file WHERE kind = ?"
    (held,) = connection.execute(query, (CHECKPOINT,)).fetchone()
    need = held + coming - int(limit * BUDGET_SHARE)
    if need <= 0:
        return []
    rows = index.rows(connection, "kind = ? AND owner IS NULL", CHECKPOINT)
    pinned = {id for (id,) in connection.execute("SELECT file FROM pin")}
    followed = {row.previous for row in rows}
    used = last_uses(rows)

    def key(row: Row) -> tuple[bool, float, int, int]:
        rank = 2 if row.previous is None else int(row.id not in followed)
        return (row.id in pinned, used[row.id], rank, -row.start)

    chosen: list[Row] = []
    for row in sorted(rows, key=key):
        if need <= 0:
            break
        chosen.append(row)
        need -= row.disk
    return chosen


def _followers(connection: sqlite3.Connection, id: int) -> list[int]:
    query = "SELECT id FROM file WHERE previous = ?"
    return [found[0] for found in connection.execute(query, (id,))]


def _needed(connection: sqlite3.Connection, id: int, away: Collection[int]) -> bool:
    """Whether a checkpoint is among the newest of some path, when those in `away` have gone."""
    level = [id]
    for _ in range(NEWEST):
        after: list[int] = []
        for each in level:
            following = [one for one in _followers(connection, each) if one not in away]
            if not following:
                return True
            after += following
        level = after
    return False
