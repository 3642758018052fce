"""Choice of checkpoints to remove from disk, so that they stay within a share of the limit.

Their bytes also stay proportional to those of the KV.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing

from mlxcache.store import index
from mlxcache.store.folder import CHECKPOINT
from mlxcache.store.index import Match, Row
from mlxcache.store.ranks import refresh
from mlxcache.store.session_rows import shared_lengths
from mlxcache.store.totals import Totals, read_totals
from mlxcache.tree.thinning import BUDGET_SHARE, NEWEST, allowed, checkpoints_to_drop
from mlxcache.types import Tokens

SIDE_TOKENS = 1024
"""Tokens after a path's checkpoint within which one beside the path may be removed as surplus.

Such a checkpoint is at the end of a reply that later prompts do not contain as it was generated.
"""

SIDE_KEPT = 2
"""Number of checkpoints beside a path that stay, because a request may continue from them.

They are the most recently used ones.
"""


def surplus_checkpoints(
    connection: sqlite3.Connection, namespace: str, ids: Tokens, match: Match, limit: int
) -> list[Row]:
    """Choose checkpoints of the path `ids` to remove, because there are more than it may have.

    `tree.thinning.allowed` gives the bytes that they may take. `limit`: limit of the folder in
    bytes. `match`: the part of `ids` on disk. First in the result come checkpoints beside the path:
    those at the ends of replies that later prompts do not contain as they were generated, for
    example because a template leaves out thinking. Then come those on the path that
    `checkpoints_to_drop` chooses, in order of position.

    Two kinds of checkpoints on the path are never chosen. One kind is the `NEWEST` last ones of any
    path that contains them: the session of that path may not be recorded yet, because the files of
    a turn are written first. The other is the last one that each recorded conversation with the
    same head and first message shares with the path, even a fork that was not continued. Beside the
    path, those that directly follow one of the second kind are never chosen, nor the `SIDE_KEPT`
    most recently used.
    """
    path = match.checkpoints
    if not path:
        return []
    kv_bytes = sum(row.disk * (b - a) // (row.stop - row.start) for row, a, b in match.cover)
    size = max(row.disk for row in path)
    most = allowed(kv_bytes, size, limit) // max(1, size)
    beside = _beside(connection, path)
    excess = len(path) + len(beside) - most
    if excess <= 0:
        return []
    last = _last(path, shared_lengths(connection, namespace, ids))
    gone = [row for row in beside[:-SIDE_KEPT] if row.previous not in last][:excess]
    positions = [row.start for row in path]
    parted = {row.start for row in path if len(_followers(connection, row.id)) > 1}
    drop = checkpoints_to_drop(positions, max(match.length, positions[-1]), most, parted=parted)
    away = {row.id for row in gone}
    return gone + [
        row
        for row in path
        if row.start in drop and row.id not in last and not _is_newest(connection, row.id, away)
    ]


def _beside(connection: sqlite3.Connection, path: Sequence[Row]) -> list[Row]:
    """Return the checkpoints of short side branches of a path, least recently used first.

    `path`: the checkpoints on that path. A checkpoint outside of `path` is returned if the one
    before it is in `path`, less than `SIDE_TOKENS` tokens away, and no other checkpoint follows it.
    """
    own = {row.id: row.start for row in path}
    found: list[Row] = []
    for id, start in own.items():
        after = index.rows(connection, "previous = ? AND owner IS NULL", id)
        near = [row for row in after if row.id not in own and row.start - start < SIDE_TOKENS]
        found += [row for row in near if not _followers(connection, row.id)]
    return sorted(found, key=lambda row: (row.used, row.id))


def _last(path: Sequence[Row], ends: Sequence[int]) -> set[int]:
    """Return the row ids of the last checkpoint of `path` at or before each position of `ends`.

    Positions before the first checkpoint are left out.
    """
    before = [
        max((row for row in path if row.start <= end), key=_start, default=None) for end in ends
    ]
    return {row.id for row in before if row is not None}


def _start(row: Row) -> int:
    return row.start


def checkpoints_over_share(connection: sqlite3.Connection, coming: int, limit: int) -> list[Row]:
    """Choose checkpoints to remove so that another of `coming` bytes fits into their share.

    `limit`: limit of the folder in bytes, of which `BUDGET_SHARE` is the share. The least recently
    used are chosen first; a checkpoint counts as used whenever a later one on its path was. Of
    equally old ones, those between a path's first and last are chosen first, then the last, then
    the first, which new conversations share. Pinned ones are chosen only when no others are left.
    """
    held = read_totals(connection).get(CHECKPOINT, Totals()).disk
    need = held + coming - int(limit * BUDGET_SHARE)
    if need <= 0:
        return []
    refresh(connection)
    query = (
        "SELECT file FROM rank WHERE evictable AND checkpoint"
        " ORDER BY pinned, used, head, last, stop DESC"
    )
    chosen: list[Row] = []
    with closing(connection.execute(query)) as oldest:
        for (id,) in oldest:
            chosen += index.rows(connection, "id = ?", id)
            need -= chosen[-1].disk
            if need <= 0:
                break
    return chosen


def _followers(connection: sqlite3.Connection, id: int) -> list[int]:
    query = "SELECT id FROM file WHERE previous = ?"
    return [found[0] for found in connection.execute(query, (id,))]


def _is_newest(connection: sqlite3.Connection, id: int, away: Collection[int]) -> bool:
    """Return whether a checkpoint is one of the last `NEWEST` of any path that contains it.

    `id`: id of its row. Checkpoints with an id in `away` are about to be removed and do not count.
    """
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
