"""The index of runs and checkpoints: rows in SQLite, and finding a prefix in them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.folder import CHECKPOINT, RUN
from mlxcache.types import Tokens

SCHEMA = """
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
"""`found` is a table of its own, so an index of before has only to be given it."""

SHAPES = "SELECT name, tbl_name, sql FROM sqlite_master"

COLUMNS = "id, kind, digest, base, key, start, stop, nbytes, disk, used, parent, previous, owner"
_QUALIFIED = ", ".join(f"file.{name}" for name in COLUMNS.split(", "))
NO_TOKENS: Tokens = np.empty(0, np.int32)
_SIBLINGS = 4096
_VARIABLES = 16384


@dataclass(frozen=True, slots=True)
class Row:
    """One file. A run holds tokens [start, stop); a checkpoint has start = stop, its position.

    `digest` names the prefix up to `stop`, and the file. `base` is the digest of the whole blocks
    before `start`. `key` is what finding looks up: of a run the digest after its first block, of a
    checkpoint its base. `disk`: bytes that the file system counts, or that are set aside for it.
    `used`: seconds since 1970. `parent`: the run that holds the token before `start`. `previous`:
    the checkpoint before this one on its path. `owner`: who is writing the file; None: durable.
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
    """The prefix of some ids that is durable: (run, start, end) ascending, and checkpoints."""

    length: int
    cover: tuple[tuple[Row, int, int], ...]
    checkpoints: tuple[Row, ...]

    def holder(self, position: int) -> Row | None:
        """The run that covers the token before `position`, if one does."""
        for row, start, end in self.cover:
            if start < position <= end:
                return row
        return None


def shapes() -> set[tuple[str, str, str | None]]:
    """What `SHAPES` gives in an index that is as it should be."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    found = set(connection.execute(SHAPES))
    connection.close()
    return found


def lookup(connection: sqlite3.Connection, chain: Chain) -> Match:
    """The longest durable prefix of the chain's ids, to the token, and the checkpoints along it."""
    raw = np.ascontiguousarray(chain.ids, "<i4").tobytes()
    checkpoints: list[Row] = []
    reaches: list[tuple[int, int, Row]] = []
    for row, tokens in _with_keys(connection, chain.whole):
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
    """Differs after files came, went or became durable."""
    query = "SELECT count(*), ifnull(max(id), 0), ifnull(sum(owner IS NULL), 0) FROM file"
    count, newest, durable = connection.execute(query).fetchone()
    return count, newest, durable


def has_checkpoints(connection: sqlite3.Connection, root: bytes) -> bool:
    """Whether any of the newest runs from the digest `root` on holds tokens of a checkpoint."""
    newest = "SELECT id FROM file WHERE base = ? AND kind = 'run' ORDER BY id DESC LIMIT 50"
    query = f"SELECT 1 FROM file WHERE kind = 'checkpoint' AND parent IN ({newest}) LIMIT 1"
    return connection.execute(query, (root,)).fetchone() is not None


def insert(connection: sqlite3.Connection, row: Row) -> int:
    """Add `row`, whose id does not matter; returns its id."""
    names = COLUMNS.removeprefix("id, ")
    values = [getattr(row, name) for name in names.split(", ")]
    marks = ", ".join("?" * len(values))
    cursor = connection.execute(f"INSERT INTO file ({names}) VALUES ({marks})", values)
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def put_tokens(connection: sqlite3.Connection, id: int, tokens: Tokens) -> None:
    """Keep the tokens of run `id`, by which it is found to the token."""
    raw = np.ascontiguousarray(tokens, "<i4").tobytes()
    connection.execute("INSERT INTO tokens VALUES (?, ?)", (id, raw))


def get_tokens(connection: sqlite3.Connection, id: int) -> Tokens:
    """The tokens of run `id`; none if it has no row."""
    found = connection.execute("SELECT ids FROM tokens WHERE file = ?", (id,)).fetchone()
    return _tokens(found[0] if found else b"")


def rows(connection: sqlite3.Connection, where: str = "1", *values: object) -> list[Row]:
    """All rows for which `where` holds."""
    query = f"SELECT {COLUMNS} FROM file WHERE {where}"
    return [Row(*found) for found in connection.execute(query, values)]


def one(connection: sqlite3.Connection, where: str, *values: object) -> Row | None:
    """The row for which `where` holds, if there is one."""
    found = rows(connection, where, *values)
    return found[0] if found else None


def below(connection: sqlite3.Connection, id: int) -> list[Row]:
    """File `id` and all that builds on it, the latest positions first."""
    query = (
        "WITH RECURSIVE tree (id) AS (SELECT ? UNION SELECT file.id FROM file, tree "
        f"WHERE file.parent = tree.id) SELECT {_QUALIFIED} FROM file, tree "
        "WHERE file.id = tree.id ORDER BY file.start DESC, file.kind"
    )
    return [Row(*found) for found in connection.execute(query, (id,))]


def delete(connection: sqlite3.Connection, row: Row) -> None:
    """Forget a file; the checkpoint after it on its path now follows the one before it."""
    connection.execute(
        "UPDATE file SET previous = (SELECT previous FROM file WHERE id = ?1) WHERE previous = ?1",
        (row.id,),
    )
    connection.execute("DELETE FROM file WHERE id = ?", (row.id,))


def touch(connection: sqlite3.Connection, uses: Iterable[tuple[float, int]]) -> None:
    """Note when files were used: (seconds since 1970, id) of each."""
    connection.executemany("UPDATE file SET used = max(used, ?) WHERE id = ?", uses)


def latest_use(connection: sqlite3.Connection) -> float:
    """When any file was used last, in seconds since 1970; 0 where there is none."""
    (used,) = connection.execute("SELECT ifnull(max(used), 0) FROM file").fetchone()
    return float(used)


def count_found(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Count that requests found these files; those that are gone are left out."""
    connection.executemany(
        "INSERT INTO found SELECT id, 1 FROM file WHERE id = ?"
        " ON CONFLICT (file) DO UPDATE SET count = count + 1",
        [(id,) for id in ids],
    )


def found_counts(connection: sqlite3.Connection) -> dict[int, int]:
    """How often each file was found, by its id; those that never were are left out."""
    return dict(connection.execute("SELECT file, count FROM found"))


def _with_keys(
    connection: sqlite3.Connection, keys: Sequence[bytes]
) -> Iterable[tuple[Row, bytes]]:
    for at in range(0, len(keys), _VARIABLES):
        part = keys[at : at + _VARIABLES]
        query = (
            f"SELECT {_QUALIFIED}, tokens.ids FROM file LEFT JOIN tokens ON tokens.file = file.id "
            f"WHERE file.owner IS NULL AND file.key IN ({','.join('?' * len(part))})"
        )
        for *columns, raw in connection.execute(query, part):
            yield Row(*columns), raw or b""


def _cover(reaches: list[tuple[int, int, Row]]) -> tuple[list[tuple[Row, int, int]], int]:
    """The fewest runs that cover from 0 on without a gap, and how far they do."""
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
    """A run of the block in which `cursor` is that shares more of it, and where it parts."""
    block = cursor // BLOCK
    start = block * BLOCK
    wanted = np.ascontiguousarray(chain.ids[start : start + BLOCK], "<i4").tobytes()
    if start + len(wanted) // 4 <= cursor:
        return None
    query = (
        "SELECT file.id, substr(tokens.ids, 1, ?) FROM file JOIN tokens ON tokens.file = file.id "
        "WHERE file.base = ? AND file.kind = ? AND file.owner IS NULL "
        "ORDER BY file.used DESC LIMIT ?"
    )
    best, best_end = None, cursor
    for id, raw in connection.execute(query, (BLOCK * 4, chain.whole[block], RUN, _SIBLINGS)):
        end = start + _common(raw, wanted)
        if end > best_end:
            best, best_end = id, end
    row = one(connection, "id = ?", best) if best is not None else None
    return None if row is None else (row, best_end)


def _common(tokens: bytes, wanted: bytes) -> int:
    """How many tokens two runs of them share, each of 4 bytes, from their beginning."""
    count = min(len(tokens), len(wanted)) // 4
    if tokens[: count * 4] == wanted[: count * 4]:
        return count
    differ = np.frombuffer(tokens, "<i4", count) != np.frombuffer(wanted, "<i4", count)
    return int(differ.argmax())


def _tokens(raw: bytes) -> Tokens:
    return np.frombuffer(raw, "<i4").astype(np.int32, copy=False)
