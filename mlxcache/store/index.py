"""Index of runs and checkpoints: rows in SQLite, and the lookup of a prefix."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mlxcache.store import ranks, totals
from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.folder import CHECKPOINT, RUN
from mlxcache.types import Tokens, ids_of_bytes

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
SCHEMA = f"{_FILES}{totals.SCHEMA}{ranks.SCHEMA}"
"""Tables of the index, their indexes and triggers.

What an earlier version lacks is in separate tables, which only need to be added to its index.
"""

SHAPES = "SELECT name, tbl_name, sql FROM sqlite_master"

COLUMNS = "id, kind, digest, base, key, start, stop, nbytes, disk, used, parent, previous, owner"
_QUALIFIED = ", ".join(f"file.{name}" for name in COLUMNS.split(", "))

_MOST_SIBLINGS = 4096
"""Most runs whose first block is compared with a block of a prompt: the last used ones."""

_MOST_VARIABLES = 16384
"""Most variables in one SQL statement."""


@dataclass(frozen=True, slots=True)
class Row:
    """Index row of one file. A run holds tokens [start, stop); a checkpoint has start = stop.

    `digest` identifies the prefix up to `stop` and names the file. `base`: digest of the whole
    blocks before `start`. `key`: digest by which a lookup finds the row; for a run, the digest
    after its first block, for a checkpoint, its base. `nbytes`: size of the file. `disk`: bytes
    that it takes, or that are reserved for it, on disk. `used`: last use in seconds since 1970.
    `parent`: id of the run that holds the token before `start`, or None. `previous`: id of the
    checkpoint before this one on its path, or None. `owner`: name of the process lock of the store
    that is writing the file; None if the file is durable.
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
    """Result of a lookup: the durable prefix of some token ids, and its checkpoints.

    `length`: tokens of the prefix. `cover`: runs that cover it, each as (row, start, end), of which
    the tokens [start, end) are used. `checkpoints`: rows of checkpoints. Both are in order of
    position.
    """

    length: int
    cover: tuple[tuple[Row, int, int], ...]
    checkpoints: tuple[Row, ...]

    def run_before(self, position: int) -> Row | None:
        """Return the run of `cover` with the token before `position`, or None if none has it."""
        for row, start, end in self.cover:
            if start < position <= end:
                return row
        return None


def shapes() -> set[tuple[str, str, str | None]]:
    """Return the tables, indexes and triggers of an undamaged index, as rows of `SHAPES`.

    A row is the name, the name of the table, and the SQL statement that creates it, or None for an
    index that SQLite makes by itself.
    """
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    found = set(connection.execute(SHAPES))
    connection.close()
    return found


def complete(connection: sqlite3.Connection) -> None:
    """Fill the tables `totals` and `changed` if they are new, in an index of an earlier version.

    Counts the files of the index in `totals`, and lists all of them in `changed`, because none has
    a rank. Does nothing if the files are counted already.
    """
    if not totals.are_counted(connection):
        totals.count_files(connection)
        connection.execute("INSERT OR IGNORE INTO changed SELECT id FROM file")


def lookup(connection: sqlite3.Connection, chain: Chain) -> Match:
    """Find the longest durable prefix of the chain's token ids, and its checkpoints.

    The prefix may end inside a block. The checkpoints are those after a prefix of the token ids,
    also beyond the prefix that was found.
    """
    raw = chain.ids.tobytes()
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
    """Return figures of the index that change when a file is added, removed or made durable.

    They are the number of files, the newest id, and the number of durable files. The result is only
    compared with an earlier one.
    """
    (newest,) = connection.execute("SELECT ifnull(max(id), 0) FROM file").fetchone()
    total = totals.read_total(connection)
    return total.files, newest, total.durable


def newest(connection: sqlite3.Connection) -> int:
    """Return the id of the newest file that the index has had; 0 if it never had one."""
    query = "SELECT seq FROM sqlite_sequence WHERE name = 'file'"
    found = connection.execute(query).fetchone()
    return int(found[0]) if found is not None else 0


def sizes(connection: sqlite3.Connection, ids: Iterable[int]) -> dict[int, int]:
    """Return the sizes in bytes of the files with these ids that are in the index, by id."""
    found: dict[int, int] = {}
    wanted = list(ids)
    for at in range(0, len(wanted), _MOST_VARIABLES):
        part = wanted[at : at + _MOST_VARIABLES]
        query = f"SELECT id, nbytes FROM file WHERE id IN ({','.join('?' * len(part))})"
        found.update(connection.execute(query, part).fetchall())
    return found


def has_checkpoints(connection: sqlite3.Connection, root: bytes) -> bool:
    """Return whether a checkpoint lies within one of the 50 newest runs that begin at token 0.

    The newest are those written last. `root`: digest of the empty prefix of the namespace.
    """
    newest = "SELECT id FROM file WHERE base = ? AND kind = 'run' ORDER BY id DESC LIMIT 50"
    query = f"SELECT 1 FROM file WHERE kind = 'checkpoint' AND parent IN ({newest}) LIMIT 1"
    return connection.execute(query, (root,)).fetchone() is not None


def insert(connection: sqlite3.Connection, row: Row) -> int:
    """Insert `row`, ignoring its id, and return the new id."""
    names = COLUMNS.removeprefix("id, ")
    values = [getattr(row, name) for name in names.split(", ")]
    marks = ", ".join("?" * len(values))
    cursor = connection.execute(f"INSERT INTO file ({names}) VALUES ({marks})", values)
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def put_tokens(connection: sqlite3.Connection, id: int, tokens: Tokens) -> None:
    """Insert the token ids of run `id`."""
    connection.execute("INSERT INTO tokens VALUES (?, ?)", (id, tokens.tobytes()))


def get_tokens(connection: sqlite3.Connection, id: int) -> Tokens:
    """Return the token ids of run `id`; empty if the index has none for it."""
    found = connection.execute("SELECT ids FROM tokens WHERE file = ?", (id,)).fetchone()
    return ids_of_bytes(found[0] if found else b"")


def rows(connection: sqlite3.Connection, where: str = "1", *values: object) -> list[Row]:
    """Return all rows of the table `file` for which the SQL condition `where` holds.

    `values`: parameters of the condition.
    """
    query = f"SELECT {COLUMNS} FROM file WHERE {where}"
    return [Row(*found) for found in connection.execute(query, values)]


def one(connection: sqlite3.Connection, where: str, *values: object) -> Row | None:
    """Return a row of the table `file` for which the SQL condition `where` holds, or None.

    Of several, any one is returned. `values`: parameters of the condition.
    """
    found = rows(connection, where, *values)
    return found[0] if found else None


def subtree(connection: sqlite3.Connection, id: int) -> list[Row]:
    """Return the rows of file `id` and of all files that continue it, the last positions first.

    Empty if the index lacks the file.
    """
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
    """Update the last uses of files, given as (seconds since 1970, file id).

    A time before that in the file's row is ignored, and so is an id without a row.
    """
    connection.executemany("UPDATE file SET used = max(used, ?) WHERE id = ?", uses)


def latest_use(connection: sqlite3.Connection) -> float:
    """Return the newest use of any file in seconds since 1970; 0 without files."""
    (used,) = connection.execute("SELECT ifnull(max(used), 0) FROM file").fetchone()
    return float(used)


def pinned(connection: sqlite3.Connection) -> set[int]:
    """Return the ids of all pinned files."""
    return {id for (id,) in connection.execute("SELECT file FROM pin")}


def count_reuses(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Add one reuse to each of these files; ids without a row are ignored."""
    connection.executemany(
        "INSERT INTO found SELECT id, 1 FROM file WHERE id = ?"
        " ON CONFLICT (file) DO UPDATE SET count = count + 1",
        [(id,) for id in ids],
    )


def reuse_counts(connection: sqlite3.Connection) -> dict[int, int]:
    """Return the number of reuses by file id; files that were never reused are left out."""
    return dict(connection.execute("SELECT file, count FROM found"))


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
    and its row. Returns the runs, each as (row, start, end), and `length`.
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

    `cursor`: position up to which the prefix of the chain was found. Only runs are compared that
    begin where that block begins, after the same tokens. Returns the row of the run, of several
    that of the oldest, and the position after the last shared token, or None if no run shares the
    token at `cursor`.
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
    """Return the number of leading tokens that `tokens` and `wanted` share, 4 bytes each."""
    count = min(len(tokens), len(wanted)) // 4
    if tokens[: count * 4] == wanted[: count * 4]:
        return count
    differ = np.frombuffer(tokens, "<i4", count) != np.frombuffer(wanted, "<i4", count)
    return int(differ.argmax())
