"""Rows of the store's files in SQLite: how they are found, their totals, and their ranks.

A rank has the values by which a file is ordered for eviction. Triggers update the totals with each
change, and note in the table `changed` which files were used, added or removed; `update_ranks`
computes their ranks anew, and those of the files whose rank depends on them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.folder import CHECKPOINT, RUN
from mlxcache.types import Tokens, ids_of_bytes

MOST_REUSES = 7
"""Number of reuses above which further ones do not count."""

_FILES = """
CREATE TABLE IF NOT EXISTS file (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  kind TEXT NOT NULL CHECK (kind IN ('run', 'checkpoint')),
  digest BLOB NOT NULL CHECK (typeof(digest) = 'blob' AND length(digest) = 16),
  base BLOB NOT NULL CHECK (typeof(base) = 'blob' AND length(base) = 16),
  key BLOB NOT NULL,
  start INTEGER NOT NULL CHECK (typeof(start) = 'integer' AND start >= 0),
  stop INTEGER NOT NULL CHECK (typeof(stop) = 'integer' AND stop >= start),
  nbytes INTEGER NOT NULL CHECK (typeof(nbytes) = 'integer' AND nbytes > 0),
  disk INTEGER NOT NULL CHECK (typeof(disk) = 'integer' AND disk >= 0),
  used REAL NOT NULL CHECK (typeof(used) = 'real'),
  parent INTEGER,
  previous INTEGER,
  owner TEXT,
  UNIQUE (kind, digest)
);
CREATE INDEX IF NOT EXISTS file_key ON file (key);
CREATE INDEX IF NOT EXISTS file_base ON file (base);
CREATE INDEX IF NOT EXISTS file_parent ON file (parent);
CREATE INDEX IF NOT EXISTS file_previous ON file (previous);
CREATE TABLE IF NOT EXISTS tokens (
  file INTEGER PRIMARY KEY REFERENCES file (id) ON DELETE CASCADE,
  ids BLOB NOT NULL CHECK (typeof(ids) = 'blob' AND length(ids) % 4 = 0)
);
CREATE TABLE IF NOT EXISTS pin (
  name TEXT NOT NULL,
  file INTEGER NOT NULL REFERENCES file (id) ON DELETE CASCADE,
  PRIMARY KEY (name, file)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pin_file ON pin (file);
CREATE TABLE IF NOT EXISTS found (
  file INTEGER PRIMARY KEY REFERENCES file (id) ON DELETE CASCADE,
  count INTEGER NOT NULL
);
"""
_TOTALS = """
CREATE TABLE IF NOT EXISTS totals (
  kind TEXT PRIMARY KEY,
  files INTEGER NOT NULL,
  durable INTEGER NOT NULL,
  disk INTEGER NOT NULL,
  durable_disk INTEGER NOT NULL,
  pinned_disk INTEGER NOT NULL,
  tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS totals_insert AFTER INSERT ON file BEGIN
  UPDATE totals SET files = files + 1, durable = durable + (NEW.owner IS NULL),
    disk = disk + NEW.disk, durable_disk = durable_disk + NEW.disk * (NEW.owner IS NULL),
    tokens = tokens + NEW.stop - NEW.start
  WHERE kind = NEW.kind;
END;
CREATE TRIGGER IF NOT EXISTS totals_delete BEFORE DELETE ON file BEGIN
  UPDATE totals SET files = files - 1, durable = durable - (OLD.owner IS NULL),
    disk = disk - OLD.disk, durable_disk = durable_disk - OLD.disk * (OLD.owner IS NULL),
    pinned_disk = pinned_disk - OLD.disk * EXISTS (SELECT 1 FROM pin WHERE file = OLD.id),
    tokens = tokens - OLD.stop + OLD.start
  WHERE kind = OLD.kind;
END;
CREATE TRIGGER IF NOT EXISTS totals_update AFTER UPDATE OF disk, owner, start, stop ON file BEGIN
  UPDATE totals SET durable = durable - (OLD.owner IS NULL) + (NEW.owner IS NULL),
    disk = disk - OLD.disk + NEW.disk,
    durable_disk = durable_disk - OLD.disk * (OLD.owner IS NULL)
      + NEW.disk * (NEW.owner IS NULL),
    pinned_disk = pinned_disk
      + (NEW.disk - OLD.disk) * EXISTS (SELECT 1 FROM pin WHERE file = NEW.id),
    tokens = tokens - OLD.stop + OLD.start + NEW.stop - NEW.start
  WHERE kind = NEW.kind;
END;
CREATE TRIGGER IF NOT EXISTS totals_pin AFTER INSERT ON pin
WHEN (SELECT count(*) FROM pin WHERE file = NEW.file) = 1 BEGIN
  UPDATE totals SET pinned_disk = pinned_disk + (SELECT disk FROM file WHERE id = NEW.file)
  WHERE kind = (SELECT kind FROM file WHERE id = NEW.file);
END;
CREATE TRIGGER IF NOT EXISTS totals_unpin AFTER DELETE ON pin
WHEN NOT EXISTS (SELECT 1 FROM pin WHERE file = OLD.file) BEGIN
  UPDATE totals SET pinned_disk = pinned_disk - (SELECT disk FROM file WHERE id = OLD.file)
  WHERE kind = (SELECT kind FROM file WHERE id = OLD.file);
END;
INSERT OR IGNORE INTO totals VALUES ('run', 0, 0, 0, 0, 0, 0), ('checkpoint', 0, 0, 0, 0, 0, 0);
"""
"""The pins of a deleted file are deleted after it, so `totals_unpin` then changes nothing."""


_RANKS = """
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
  INSERT INTO changed SELECT NEW.id WHERE NEW.id NOT IN changed
    AND NOT EXISTS (SELECT 1 FROM rank WHERE file = NEW.id AND NOT evictable AND NOT checkpoint);
  INSERT INTO changed SELECT NEW.parent
    WHERE NEW.kind = 'run' AND NEW.parent IS NOT NULL AND NEW.parent NOT IN changed
    AND NOT EXISTS (SELECT 1 FROM rank WHERE file = NEW.parent AND heir = NEW.id);
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
"""Flags are 0 or 1.

`checkpoint`: the file is one, not a run. `evictable`: durable, and no file continues it (none
continues a checkpoint). `uses`: reuses up to `MOST_REUSES`, with those inherited: the most recently
used of the runs that continue one inherits its reuses (it is the `heir`), and a checkpoint those of
the run that contains it. `used`: time of the last use, for a checkpoint also of later ones on its
path; for a run that is not evictable it may be out of date. `head`: the first checkpoint of a path.
`last`: one that no durable checkpoint follows, unless it is a head. `most`: the greatest `uses` of
a checkpoint and of those after it. The triggers do not use `OR IGNORE`, because the clause of the
statement that fires them overrides it.
"""

SCHEMA = f"{_FILES}{_TOTALS}{_RANKS}"

SHAPES = "SELECT name, tbl_name, sql FROM sqlite_master"

COLUMNS = "id, kind, digest, base, key, start, stop, nbytes, disk, used, parent, previous, owner"
_QUALIFIED = ", ".join(f"file.{name}" for name in COLUMNS.split(", "))

_MOST_SIBLINGS = 4096
"""Most runs whose first block is compared with a block of a prompt: the last used ones."""

_MOST_VARIABLES = 16384


@dataclass(frozen=True, slots=True)
class Row:
    """Index row of one file. A run holds tokens [start, stop); a checkpoint has start = stop.

    `digest` identifies the prefix up to `stop` and names the file. `base`: digest of the whole
    blocks before `start`. `key`: digest by which a lookup finds the row. `disk`: bytes that it
    takes, or that are reserved for it. `parent`: id of the run that holds the token before `start`.
    `previous`: id of the checkpoint before this one on its path. `owner`: name of the process lock
    of the store that is writing the file; None if it is durable.
    """

    id: int
    kind: str
    digest: bytes
    base: bytes
    key: bytes
    start: int
    stop: int
    nbytes: int
    disk: int
    used: float
    parent: int | None
    previous: int | None
    owner: str | None


@dataclass(frozen=True, slots=True)
class Match:
    """The durable prefix of some token ids, and its checkpoints, in order of position.

    `length`: tokens of the prefix. `cover`: runs that cover it, each as (row, start, end), of which
    the tokens [start, end) are used.
    """

    length: int
    cover: tuple[tuple[Row, int, int], ...]
    checkpoints: tuple[Row, ...]

    @property
    def rows(self) -> list[Row]:
        return [*(row for row, _, _ in self.cover), *self.checkpoints]

    def run_before(self, position: int) -> Row | None:
        for row, start, end in self.cover:
            if start < position <= end:
                return row
        return None


def shapes() -> set[tuple[str, str, str | None]]:
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    found = set(connection.execute(SHAPES))
    connection.close()
    return found


def lookup(connection: sqlite3.Connection, chain: Chain) -> Match:
    """Find the longest durable prefix of the chain's token ids, and its checkpoints.

    The checkpoints are those after a prefix of the token ids, also beyond the prefix that was
    found.
    """
    return lookup_among(connection, chain, chain.whole)


def lookup_among(connection: sqlite3.Connection, chain: Chain, keys: Sequence[bytes]) -> Match:
    """Do what `lookup` does, if no other digests of the chain than `keys` are keys of files."""
    raw = chain.ids.tobytes()
    checkpoints: list[Row] = []
    reaches: list[tuple[int, int, Row]] = []
    for row, tokens in _with_keys(connection, keys):
        if row.kind == CHECKPOINT:
            if row.start <= len(chain.ids) and row.digest == chain.at(row.start):
                checkpoints.append(row)
        else:
            wanted = raw[row.start * 4 : row.start * 4 + len(tokens)]
            reaches.append((row.start, row.start + _common(tokens, wanted), row))
    cover, cursor = _cover(reaches)
    last = _sibling(connection, chain, cursor)
    if last is not None:
        row, end = last
        cover.append((row, cursor, end))
        cursor = end
    checkpoints.sort(key=lambda row: row.start)
    return Match(cursor, tuple(cover), tuple(checkpoints))


def version(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Return figures that change when a file is added, removed or made durable."""
    (newest,) = connection.execute("SELECT ifnull(max(id), 0) FROM file").fetchone()
    total = read_totals(connection)
    return total.files, newest, total.durable


def newest(connection: sqlite3.Connection) -> int:
    query = "SELECT seq FROM sqlite_sequence WHERE name = 'file'"
    found = connection.execute(query).fetchone()
    return int(found[0]) if found is not None else 0


def sizes(connection: sqlite3.Connection, ids: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    wanted = list(ids)
    for at in range(0, len(wanted), _MOST_VARIABLES):
        part = wanted[at : at + _MOST_VARIABLES]
        query = f"SELECT id, nbytes FROM file WHERE id IN ({','.join('?' * len(part))})"
        found.update(connection.execute(query, part).fetchall())
    return found


def has_checkpoints(connection: sqlite3.Connection, root: bytes) -> bool:
    """Return whether a checkpoint lies within one of the 50 runs written last at token 0."""
    newest = "SELECT id FROM file WHERE base = ? AND kind = 'run' ORDER BY id DESC LIMIT 50"
    query = f"SELECT 1 FROM file WHERE kind = 'checkpoint' AND parent IN ({newest}) LIMIT 1"
    return connection.execute(query, (root,)).fetchone() is not None


def insert(connection: sqlite3.Connection, row: Row) -> int:
    names = COLUMNS.removeprefix("id, ")
    values = [getattr(row, name) for name in names.split(", ")]
    marks = ", ".join("?" * len(values))
    cursor = connection.execute(f"INSERT INTO file ({names}) VALUES ({marks})", values)
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def put_tokens(connection: sqlite3.Connection, id: int, tokens: Tokens) -> None:
    connection.execute("INSERT INTO tokens VALUES (?, ?)", (id, tokens.tobytes()))


def get_tokens(connection: sqlite3.Connection, id: int) -> Tokens:
    found = connection.execute("SELECT ids FROM tokens WHERE file = ?", (id,)).fetchone()
    return ids_of_bytes(found[0] if found else b"")


def rows(connection: sqlite3.Connection, where: str = "1", *values: object) -> list[Row]:
    query = f"SELECT {COLUMNS} FROM file WHERE {where}"
    return [Row(*found) for found in connection.execute(query, values)]


def one(connection: sqlite3.Connection, where: str, *values: object) -> Row | None:
    found = rows(connection, where, *values)
    return found[0] if found else None


def subtree(connection: sqlite3.Connection, id: int) -> list[Row]:
    """Return the rows of a file and of all that continue it, the last positions first."""
    query = (
        "WITH RECURSIVE tree (id) AS (SELECT ? UNION SELECT file.id FROM file, tree "
        f"WHERE file.parent = tree.id) SELECT {_QUALIFIED} FROM file, tree "
        "WHERE file.id = tree.id ORDER BY file.start DESC, file.kind"
    )
    return [Row(*found) for found in connection.execute(query, (id,))]


def delete(connection: sqlite3.Connection, row: Row) -> None:
    """Delete a file's row, and link the checkpoint after it to the one before it."""
    connection.execute(
        "UPDATE file SET previous = (SELECT previous FROM file WHERE id = ?1) WHERE previous = ?1",
        (row.id,),
    )
    connection.execute("DELETE FROM file WHERE id = ?", (row.id,))


def touch(connection: sqlite3.Connection, uses: Iterable[tuple[float, int]]) -> None:
    """Update the last uses of files, given as (seconds since 1970, file id), to later ones."""
    connection.executemany("UPDATE file SET used = max(used, ?) WHERE id = ?", uses)


def latest_use(connection: sqlite3.Connection) -> float:
    (used,) = connection.execute("SELECT ifnull(max(used), 0) FROM file").fetchone()
    return float(used)


def pinned(connection: sqlite3.Connection) -> set[int]:
    return {id for (id,) in connection.execute("SELECT file FROM pin")}


def count_reuses(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    connection.executemany(
        "INSERT INTO found SELECT id, 1 FROM file WHERE id = ?"
        " ON CONFLICT (file) DO UPDATE SET count = count + 1",
        [(id,) for id in ids],
    )


def _with_keys(
    connection: sqlite3.Connection, keys: Sequence[bytes]
) -> Iterable[tuple[Row, bytes]]:
    for at in range(0, len(keys), _MOST_VARIABLES):
        part = keys[at : at + _MOST_VARIABLES]
        query = (
            f"SELECT {_QUALIFIED}, tokens.ids FROM file LEFT JOIN tokens ON tokens.file = file.id "
            f"WHERE file.owner IS NULL AND file.key IN ({','.join('?' * len(part))})"
        )
        for *columns, raw in connection.execute(query, part):
            yield Row(*columns), raw or b""


def _cover(reaches: list[tuple[int, int, Row]]) -> tuple[list[tuple[Row, int, int]], int]:
    """Choose the fewest runs that cover [0, length) without a gap, for the greatest length.

    `reaches`: for each run its start, the end of the tokens that it has in common with the prompt,
    and its row.
    """
    reaches.sort(key=lambda reach: reach[:2])
    cover: list[tuple[Row, int, int]] = []
    cursor = at = 0
    best: tuple[int, Row] | None = None
    while True:
        while at < len(reaches) and reaches[at][0] <= cursor:
            _, end, row = reaches[at]
            if best is None or end > best[0]:
                best = (end, row)
            at += 1
        if best is None or best[0] <= cursor:
            return cover, cursor
        cover.append((best[1], cursor, best[0]))
        cursor = best[0]


def _sibling(connection: sqlite3.Connection, chain: Chain, cursor: int) -> tuple[Row, int] | None:
    """Find the run that extends the found prefix farthest within the block of token `cursor`.

    Only runs are compared that begin where that block begins, after the same tokens; of several the
    oldest is returned, with the position after the last shared token.
    """
    block = cursor // BLOCK
    start = block * BLOCK
    wanted = chain.ids[start : start + BLOCK].tobytes()
    if start + len(wanted) // 4 <= cursor:
        return None
    query = (
        "SELECT file.id, substr(tokens.ids, 1, ?) FROM file JOIN tokens ON tokens.file = file.id "
        "WHERE file.base = ? AND file.kind = ? AND file.owner IS NULL "
        "ORDER BY file.used DESC LIMIT ?"
    )
    found = connection.execute(query, (BLOCK * 4, chain.whole[block], RUN, _MOST_SIBLINGS))
    ends = ((start + _common(raw, wanted), -id) for id, raw in found)
    end, id = max(ends, default=(0, 0))
    row = one(connection, "id = ?", -id) if end > cursor else None
    return None if row is None else (row, end)


def _common(tokens: bytes, wanted: bytes) -> int:
    count = min(len(tokens), len(wanted)) // 4
    if tokens[: count * 4] == wanted[: count * 4]:
        return count
    differ = np.frombuffer(tokens, "<i4", count) != np.frombuffer(wanted, "<i4", count)
    return int(differ.argmax())


@dataclass(frozen=True, slots=True)
class Totals:
    files: int = 0
    durable: int = 0
    disk: int = 0
    durable_disk: int = 0
    pinned_disk: int = 0
    tokens: int = 0


def read_totals(connection: sqlite3.Connection, kind: str | None = None) -> Totals:
    sums = ", ".join(f"ifnull(sum({one.name}), 0)" for one in fields(Totals))
    query = f"SELECT {sums} FROM totals WHERE ?1 IS NULL OR kind = ?1"
    return Totals(*connection.execute(query, (kind,)).fetchone())


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


def update_ranks(connection: sqlite3.Connection) -> None:
    query = "SELECT kind, start, id FROM changed JOIN file ON file.id = changed.file"
    changed = connection.execute(query).fetchall()
    ranking = _Ranking(connection)
    for kind, start, id in changed:
        ranking.add(kind, start, id)
    ranking.run()
    connection.execute("DELETE FROM changed")


class _Ranking:
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
        if id not in self._waiting:
            self._waiting.add(id)
            if kind == RUN:
                heappush(self._runs, (start, id))
            else:
                heappush(self._checkpoints, (-start, id))

    def run(self) -> None:
        for files, compute in ((self._runs, self._rank_run), (self._checkpoints, self._rank_state)):
            while files:
                _, id = heappop(files)
                self._waiting.discard(id)
                compute(id)

    def _rank_run(self, id: int) -> None:
        found = self._connection.execute(_RANK_RUN, (id,)).fetchone()
        stop, used, durable, reuses, pinned, continued, heir, inherited, *own = found
        before = _own_rank(own)
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
        before = _own_rank(own)
        uses, head = max(reuses, inherited), int(previous is None)
        most = max(uses, most)
        last = int(not head and not followed)
        rank = _Rank(1, durable, pinned, uses, used, head, last, stop, most, None, previous)
        self._write(id, rank, before)
        if before is None:
            return
        if (before.used, before.most, before.previous) != (used, most, previous):
            self._add_all("id IN (?, ?)", previous, before.previous)

    def _write(self, id: int, rank: _Rank, before: _Rank | None) -> None:
        if before is None:
            self._connection.execute(_INSERT, (id, *rank))
        elif rank != before:
            self._connection.execute(_UPDATE, (*rank, id))

    def _add_all(self, where: str, *values: int | None) -> None:
        query = f"SELECT kind, start, id FROM file WHERE {where}"
        for kind, start, id in self._connection.execute(query, values).fetchall():
            self.add(kind, start, id)


def _own_rank(columns: Sequence[Any]) -> _Rank | None:
    return None if columns[0] is None else _Rank(*columns)
