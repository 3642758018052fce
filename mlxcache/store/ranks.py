"""Ranks of files in the order of eviction, kept in the index and updated after each change.

A rank is a row of the table `rank`: the values by which the file is ordered. It depends on related
files: its checkpoints, the runs that continue it, and the reuses of those before it. Triggers note
in the table `changed` which files were used, added or removed, also by a server of an earlier
version. `refresh` computes the ranks of those files anew, and of the files whose rank depends on a
rank that changed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from mlxcache.store.folder import RUN

MOST_REUSES = 7
"""Number of reuses above which further ones do not count, as for eviction in RAM."""

SCHEMA = """
CREATE INDEX IF NOT EXISTS file_used ON file (used);
CREATE INDEX IF NOT EXISTS file_owner ON file (owner) WHERE owner IS NOT NULL;
CREATE INDEX IF NOT EXISTS file_heir ON file (parent, used) WHERE kind = 'run';
CREATE TABLE IF NOT EXISTS rank (
  file INTEGER PRIMARY KEY REFERENCES file (id) ON DELETE CASCADE,
  checkpoint INTEGER NOT NULL,
  evictable INTEGER NOT NULL,
  pinned INTEGER NOT NULL,
  uses INTEGER NOT NULL,
  used REAL NOT NULL,
  head INTEGER NOT NULL,
  last INTEGER NOT NULL,
  stop INTEGER NOT NULL,
  most INTEGER NOT NULL,
  heir INTEGER,
  previous INTEGER
);
CREATE INDEX IF NOT EXISTS rank_order ON rank (pinned, uses, used, head, stop DESC)
WHERE evictable;
CREATE INDEX IF NOT EXISTS rank_checkpoints ON rank (pinned, used, head, last, stop DESC)
WHERE evictable AND checkpoint;
CREATE INDEX IF NOT EXISTS rank_previous_used ON rank (previous, used)
WHERE previous IS NOT NULL;
CREATE INDEX IF NOT EXISTS rank_previous_most ON rank (previous, most)
WHERE previous IS NOT NULL;
CREATE TABLE IF NOT EXISTS changed (file INTEGER PRIMARY KEY);
CREATE TRIGGER IF NOT EXISTS rank_insert AFTER INSERT ON file BEGIN
  INSERT INTO changed SELECT NEW.id WHERE NEW.id NOT IN changed;
  INSERT INTO changed SELECT NEW.parent
    WHERE NEW.parent IS NOT NULL AND NEW.parent NOT IN changed;
  INSERT INTO changed SELECT NEW.previous
    WHERE NEW.previous IS NOT NULL AND NEW.previous NOT IN changed;
END;
CREATE TRIGGER IF NOT EXISTS rank_delete AFTER DELETE ON file BEGIN
  INSERT INTO changed SELECT OLD.parent
    WHERE OLD.parent IS NOT NULL AND OLD.parent NOT IN changed;
  INSERT INTO changed SELECT OLD.previous
    WHERE OLD.previous IS NOT NULL AND OLD.previous NOT IN changed;
  INSERT INTO changed SELECT id FROM file WHERE parent = OLD.id AND id NOT IN changed;
END;
CREATE TRIGGER IF NOT EXISTS rank_link AFTER UPDATE OF parent, previous, owner ON file BEGIN
  INSERT INTO changed SELECT NEW.id WHERE NEW.id NOT IN changed;
  INSERT INTO changed SELECT NEW.parent
    WHERE NEW.parent IS NOT NULL AND NEW.parent NOT IN changed;
  INSERT INTO changed SELECT NEW.previous
    WHERE NEW.previous IS NOT NULL AND NEW.previous NOT IN changed;
  INSERT INTO changed SELECT OLD.parent
    WHERE OLD.parent IS NOT NULL AND OLD.parent NOT IN changed;
  INSERT INTO changed SELECT OLD.previous
    WHERE OLD.previous IS NOT NULL AND OLD.previous NOT IN changed;
END;
CREATE TRIGGER IF NOT EXISTS rank_use AFTER UPDATE OF used ON file
WHEN NEW.used <> OLD.used BEGIN
  INSERT INTO changed SELECT NEW.id WHERE NEW.id NOT IN changed;
  INSERT INTO changed SELECT NEW.parent
    WHERE NEW.kind = 'run' AND NEW.parent IS NOT NULL AND NEW.parent NOT IN changed;
END;
CREATE TRIGGER IF NOT EXISTS rank_found AFTER INSERT ON found BEGIN
  INSERT INTO changed SELECT NEW.file WHERE NEW.file NOT IN changed;
END;
CREATE TRIGGER IF NOT EXISTS rank_found_again AFTER UPDATE ON found
WHEN OLD.count < 7 BEGIN
  INSERT INTO changed SELECT NEW.file WHERE NEW.file NOT IN changed;
END;
CREATE TRIGGER IF NOT EXISTS rank_pin AFTER INSERT ON pin BEGIN
  INSERT INTO changed SELECT NEW.file WHERE NEW.file NOT IN changed;
END;
CREATE TRIGGER IF NOT EXISTS rank_unpin AFTER DELETE ON pin BEGIN
  INSERT INTO changed SELECT OLD.file WHERE OLD.file NOT IN changed;
END;
"""
"""Tables `rank` and `changed`, their indexes and triggers, and further indexes of `file`.

Flags are 0 or 1. `checkpoint`: the file is one, not a run. `evictable`: durable, and no file
continues it (none continues a checkpoint). `uses`: reuses up to `MOST_REUSES`, with those
inherited: the most recently used of the runs that continue one inherits its reuses (it is the
`heir`), and a checkpoint those of the run that contains it. `used`: time of the last use, for a
checkpoint also of later ones on its path; for a run that is not evictable it may be out of date.
`head`: the first checkpoint of a path. `last`: one that no durable checkpoint follows, unless it is
a head. `most`: the greatest `uses` of a checkpoint and of those after it. `stop`, `previous`: as in
`file`.
The triggers do not use `OR IGNORE`, because the clause of the statement that fires them overrides
it.
"""

_RUN = """
SELECT f.stop, f.used, f.owner IS NULL,
  min(7, ifnull((SELECT count FROM found WHERE found.file = f.id), 0)),
  EXISTS (SELECT 1 FROM pin WHERE pin.file = f.id),
  EXISTS (SELECT 1 FROM file WHERE parent = f.id),
  (SELECT id FROM file WHERE parent = f.id AND kind = 'run' ORDER BY used DESC, id DESC LIMIT 1),
  CASE WHEN up.heir = f.id THEN up.uses ELSE 0 END, {own}
FROM file AS f LEFT JOIN rank AS up ON up.file = f.parent LEFT JOIN rank AS own ON own.file = f.id
WHERE f.id = ?
"""

_CHECKPOINT = """
SELECT f.stop, max(f.used, ifnull((SELECT max(used) FROM rank WHERE rank.previous = f.id), 0.0)),
  f.owner IS NULL, min(7, ifnull((SELECT count FROM found WHERE found.file = f.id), 0)),
  EXISTS (SELECT 1 FROM pin WHERE pin.file = f.id),
  EXISTS (SELECT 1 FROM file WHERE previous = f.id AND owner IS NULL),
  f.previous, ifnull((SELECT uses FROM rank WHERE rank.file = f.parent), 0),
  ifnull((SELECT max(most) FROM rank WHERE rank.previous = f.id), 0), {own}
FROM file AS f LEFT JOIN rank AS own ON own.file = f.id WHERE f.id = ?
"""


class _Rank(NamedTuple):
    """Row of the table `rank` without its id; see `SCHEMA`."""

    checkpoint: int
    evictable: int
    pinned: int
    uses: int
    used: float
    head: int
    last: int
    stop: int
    most: int
    heir: int | None
    previous: int | None


_FIELDS = ", ".join(_Rank._fields)
_OWN = ", ".join(f"own.{name}" for name in _Rank._fields)
_RANK_RUN, _RANK_CHECKPOINT = _RUN.format(own=_OWN), _CHECKPOINT.format(own=_OWN)
_INSERT = f"INSERT INTO rank (file, {_FIELDS}) VALUES (?{', ?' * len(_Rank._fields)})"
_UPDATE = f"UPDATE rank SET ({_FIELDS}) = (?{', ?' * (len(_Rank._fields) - 1)}) WHERE file = ?"


Step = Callable[[int, int], None]
"""Callable that gets two numbers of files: those ranked so far, and all."""


def _no_step(done: int, total: int) -> None:
    """Ignore progress: the default of `step`."""


def refresh(connection: sqlite3.Connection, step: Step = _no_step) -> None:
    """Update the ranks of the files in `changed`, and of those that depend on them.

    The table `changed` is empty afterwards. Part of the transaction of `connection`.
    `step(done, total)` is called after each file with the number of files ranked so far, and the
    number of all files to rank, as far as it is known by then.
    """
    query = "SELECT kind, start, id FROM changed JOIN file ON file.id = changed.file"
    changed = connection.execute(query).fetchall()
    work = _Refresh(connection)
    for kind, start, id in changed:
        work.add(kind, start, id)
    work.run(step)
    connection.execute("DELETE FROM changed")


def _read(own: Sequence[Any]) -> _Rank | None:
    """Return the rank that a file has in the index, or None if it has none yet.

    `own`: the values of its row of the table `rank` without the id, which are the last columns of
    the queries `_RANK_RUN` and `_RANK_CHECKPOINT`; all are None without a rank.
    """
    return None if own[0] is None else _Rank(*own)


def _path_of(rank: _Rank) -> tuple[float, int, int | None]:
    """Return the fields of a checkpoint's rank on which the rank of the one before it depends.

    They are (used, most, previous), described at `SCHEMA`.
    """
    return rank.used, rank.most, rank.previous


class _Refresh:
    """Queue of the files whose rank is to be computed.

    Runs come first, in order of position, because a run depends on the run before it; then
    checkpoints in reverse order, because a checkpoint depends on its run and on the checkpoints
    after it. When a file gets its first rank, the files that depend on it are not queued: they have
    no rank yet either, or are in the table `changed` too.
    """

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection
        self._runs: list[tuple[int, int]] = []
        self._checkpoints: list[tuple[int, int]] = []
        self._waiting: set[int] = set()

    def add(self, kind: str, start: int, id: int) -> None:
        """Queue a file by its kind, the column `start` of its index row, and its id.

        Does nothing if it is queued already.
        """
        if id not in self._waiting:
            self._waiting.add(id)
            if kind == RUN:
                heappush(self._runs, (start, id))
            else:
                heappush(self._checkpoints, (-start, id))

    def run(self, step: Step) -> None:
        """Compute the ranks of all queued files, and of the files that depend on a changed rank.

        `step(done, total)` is called after each file with the number of files ranked so far, and
        the number of all files queued until then, those included.
        """
        done = 0
        for files, compute in ((self._runs, self._rank_run), (self._checkpoints, self._rank_state)):
            while files:
                _, id = heappop(files)
                self._waiting.discard(id)
                compute(id)
                done += 1
                step(done, done + len(self._waiting))

    def _rank_run(self, id: int) -> None:
        found = self._connection.execute(_RANK_RUN, (id,)).fetchone()
        stop, used, durable, reuses, pinned, continued, heir, inherited, *own = found
        before = _read(own)
        uses, evictable = max(reuses, inherited), int(durable and not continued)
        if before is not None and not evictable:
            used = before.used  # spares the indexes a change
        rank = _Rank(0, evictable, pinned, uses, used, 0, 0, stop, uses, heir, None)
        self._write(id, rank, before)
        if before is not None and before.heir != heir:
            self._add_all("id IN (?, ?)", heir, before.heir)
        if before is not None and before.uses != uses:
            self._add_all("id = ? OR parent = ? AND kind = 'checkpoint'", heir, id)

    def _rank_state(self, id: int) -> None:
        found = self._connection.execute(_RANK_CHECKPOINT, (id,)).fetchone()
        stop, used, durable, reuses, pinned, followed, previous, inherited, most, *own = found
        before = _read(own)
        uses, head = max(reuses, inherited), int(previous is None)
        most = max(uses, most)
        last = int(not head and not followed)
        rank = _Rank(1, durable, pinned, uses, used, head, last, stop, most, None, previous)
        self._write(id, rank, before)
        if before is not None and _path_of(before) != _path_of(rank):
            self._add_all("id IN (?, ?)", previous, before.previous)

    def _write(self, id: int, rank: _Rank, before: _Rank | None) -> None:
        if before is None:
            self._connection.execute(_INSERT, (id, *rank))
        elif rank != before:
            self._connection.execute(_UPDATE, (*rank, id))

    def _add_all(self, where: str, *values: int | None) -> None:
        """Queue the files for which the SQL condition `where` holds.

        `values`: parameters of the condition.
        """
        query = f"SELECT kind, start, id FROM file WHERE {where}"
        for kind, start, id in self._connection.execute(query, values).fetchall():
            self.add(kind, start, id)
