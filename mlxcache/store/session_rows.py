"""Rows of the tables of sessions: SQL on a connection, in the caller's transaction.

The tables contain sessions, their leaves with token ids, and their figures. The columns are
described in docs/disk-format.md.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Any

from mlxcache.common_prefix import common_length
from mlxcache.errors import NotFound
from mlxcache.store.leaves import (
    Kind,
    Leaf,
    LeafRow,
    digest_of,
    digests_at,
    find_continued,
    find_reworded,
    replaces_main,
)
from mlxcache.store.reply_rows import ReplyRow, pack_keys, unpack_keys
from mlxcache.types import Tokens, ids_of_bytes

MOST_SESSIONS = 10_000
"""Most sessions kept; the least recently used that are not pinned are removed."""

MOST_LEAVES = 100
"""Most leaves kept per session: the main one, and the most recently used of sub-agents."""

MOST_TITLED = 16
"""Most sessions of one title that are searched for the conversation that a request continues."""

PART_TOKENS = 1024
"""Most token ids in one row of a leaf."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, namespace TEXT NOT NULL, model TEXT NOT NULL,
    label TEXT, name TEXT, title TEXT, client TEXT,
    turns INTEGER NOT NULL, pinned INTEGER NOT NULL,
    created_at REAL NOT NULL, last_used_at REAL NOT NULL, owner TEXT);
CREATE INDEX IF NOT EXISTS sessions_label ON sessions (namespace, label);
CREATE INDEX IF NOT EXISTS sessions_title ON sessions (namespace, title);
CREATE INDEX IF NOT EXISTS sessions_used ON sessions (last_used_at);
CREATE TABLE IF NOT EXISTS leaves (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    namespace TEXT NOT NULL, kind TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    anchor INTEGER NOT NULL, digest BLOB NOT NULL,
    turns INTEGER NOT NULL, last_used_at REAL NOT NULL, replies BLOB);
CREATE INDEX IF NOT EXISTS leaves_session ON leaves (session);
CREATE INDEX IF NOT EXISTS leaves_anchor ON leaves (namespace, anchor, digest);
CREATE TABLE IF NOT EXISTS leaf_tokens (
    leaf INTEGER NOT NULL REFERENCES leaves (id) ON DELETE CASCADE,
    start INTEGER NOT NULL, ids BLOB NOT NULL,
    PRIMARY KEY (leaf, start)) WITHOUT ROWID;
"""
"""Tables of sessions and leaves.

Token ids of a leaf are little-endian int32, in rows of `PART_TOKENS`.
"""

ANY_OWNER = ""
"""Value that stands for every owner."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session's row.

    `label` is given by clients, `name` by the user. `title` is taken from the first user message.
    `client`: name of the client program. `model`: name of the model, for display. `turns`: number
    of finished requests. Times are in seconds since 1970. `owner`: see `mlxcache.owner`; None for a
    session made by a server without API keys, or with only one, given by `--api-key`.
    """

    id: str
    namespace: str
    model: str
    label: str | None
    name: str | None
    title: str | None
    client: str | None
    turns: int
    pinned: bool
    created_at: float
    last_used_at: float
    owner: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A finished request to record in its session.

    `ids`: token ids of its prompt and reply, shape (n,); the first `prompt_tokens` are the prompt.
    `key_tokens`: length of its conversation key. `head`: number of tokens of tools and system
    prompt. `at`: seconds since 1970. `reply`: its reply for replay, or None. `gain`: its times and
    counts of tokens. `known`: of each earlier reply in its prompt, the digest that identifies it
    (`ReplyRow.key`), in order. `response`: id of the stored response of OpenAI's Responses API that
    the request made. For the other fields see `Session`.
    """

    namespace: str
    model: str
    ids: Tokens
    prompt_tokens: int
    key_tokens: int
    head: int
    at: float
    label: str | None = None
    client: str | None = None
    title: str | None = None
    reply: ReplyRow | None = None
    gain: Gain | None = None
    owner: str | None = None
    known: tuple[bytes, ...] = ()
    response: str | None = None

    @property
    def replies(self) -> tuple[bytes, ...]:
        """Keys of the replies in the turn's prompt, followed by the key of the turn's own reply.

        A key is the digest that identifies a reply; see `ReplyRow.key`.
        """
        return self.known if self.reply is None else (*self.known, self.reply.key)


@dataclass(frozen=True, slots=True)
class Origin:
    """The session that a conversation has on another server with the same shared remote.

    It is read from the remote. For the fields see `Session`.
    """

    id: str
    name: str | None
    created_at: float


SESSION_FIELDS = (
    "id, namespace, model, label, name, title, client, turns, pinned, created_at, last_used_at"
    ", owner"
)
_LEAF_FIELDS = "id, session, kind, prompt_tokens, anchor, turns, last_used_at, replies"
_LEAF_ORDER = "ORDER BY kind = 'main' DESC, last_used_at DESC, id"


def session_from(row: tuple[Any, ...]) -> Session:
    """Convert a database row with the columns `SESSION_FIELDS`."""
    session = Session(*row)
    return replace(session, pinned=bool(session.pinned))


def read_leaves(db: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> list[Leaf]:
    """Return the leaves whose rows in the table `leaves` satisfy the SQL condition `where`.

    Main leaves come first, then the most recently used. `values`: values for the `?` in `where`.
    """
    found = db.execute(
        f"SELECT {_LEAF_FIELDS} FROM leaves WHERE {where} {_LEAF_ORDER}",
        values,
    )
    return [_leaf(db, row) for row in found.fetchall()]


def _leaf(db: sqlite3.Connection, row: tuple[Any, ...]) -> Leaf:
    id, session, kind, prompt, key, turns, used, replies = row
    ids = read_ids(db, id)
    return Leaf(id, session, kind, ids, prompt, key, turns, used, unpack_keys(replies))


def read_leaf_rows(db: sqlite3.Connection, session: str) -> tuple[LeafRow, ...]:
    """Return the leaves of a session in the order of `read_leaves`, without their token ids."""
    found = db.execute(
        "SELECT id, session, kind, ifnull((SELECT start + length(ids) / 4 FROM leaf_tokens"
        " WHERE leaf = leaves.id ORDER BY start DESC LIMIT 1), 0), prompt_tokens, turns,"
        f" last_used_at FROM leaves WHERE session = ? {_LEAF_ORDER}",
        (session,),
    )
    return tuple(LeafRow(*row) for row in found)


def read_ids(db: sqlite3.Connection, leaf: int) -> Tokens:
    """Return the token ids of the leaf with the id `leaf`; empty if there is no such leaf."""
    rows = db.execute("SELECT ids FROM leaf_tokens WHERE leaf = ? ORDER BY start", (leaf,))
    return ids_of_bytes(b"".join(part for (part,) in rows))


_LATER_COLUMNS = (
    ("sessions", "owner", "TEXT"),
    ("leaves", "replies", "BLOB"),
    ("replies", "key", "BLOB"),
    ("session_figures", "drafted_tokens", "INTEGER NOT NULL DEFAULT 0"),
    ("session_figures", "accepted_tokens", "INTEGER NOT NULL DEFAULT 0"),
    ("session_figures", "guess_passes", "INTEGER NOT NULL DEFAULT 0"),
    ("session_figures", "guess_saved_s", "REAL NOT NULL DEFAULT 0"),
)


def add_later_columns(db: sqlite3.Connection) -> None:
    """Add the columns that are missing if an earlier version of mlxcache created the tables.

    These are the tables `sessions`, `leaves`, `replies` and `session_figures`; all must exist.
    """
    for table, column, kind in _LATER_COLUMNS:
        columns = {name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")}
        if column not in columns:
            db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
    db.execute("CREATE INDEX IF NOT EXISTS sessions_owner ON sessions (owner, last_used_at)")


def read_session(db: sqlite3.Connection, id: str, owner: str | None = ANY_OWNER) -> Session:
    """Return the session `id` of `owner`, or of any owner if that is `ANY_OWNER`.

    Raises NotFound if it does not exist or belongs to another owner.
    """
    query = f"SELECT {SESSION_FIELDS} FROM sessions WHERE id = ?1 AND (?2 = '' OR owner IS ?2)"
    row = db.execute(query, (id, owner)).fetchone()
    if row is None:
        raise NotFound(f"No session has the id {id[:80]!r}.")
    return session_from(row)


def insert_session(db: sqlite3.Connection, session: Session) -> None:
    """Insert the row of a session, without leaves."""
    places = ", ".join("?" * 12)
    db.execute(f"INSERT INTO sessions ({SESSION_FIELDS}) VALUES ({places})", astuple(session))


def new_session(id: str, turn: Turn, origin: Origin | None = None) -> Session:
    """Return the session that begins with `turn`, before its first turn is counted.

    `origin`: the conversation's session on another server, or None. If it has the same `id`, the
    new session gets its name, and its time of creation if that is earlier.
    """
    name, began = None, turn.at
    if origin is not None and origin.id == id:
        name, began = origin.name, min(origin.created_at, began)
    names = (turn.label, name, None, turn.client)
    return Session(id, turn.namespace, turn.model, *names, 0, False, began, turn.at, turn.owner)


def find_labelled(db: sqlite3.Connection, turn: Turn) -> str | None:
    """Return the id of the session with a turn's label, namespace and owner, or None.

    A session whose id is the turn's label is found too, and preferred. None if the turn has no
    label.
    """
    if turn.label is None:
        return None
    row = db.execute(
        "SELECT id FROM sessions WHERE namespace = ?1 AND (label = ?2 OR id = ?2)"
        " AND owner IS ?3 ORDER BY id = ?2 DESC",
        (turn.namespace, turn.label, turn.owner),
    ).fetchone()
    return None if row is None else str(row[0])


def read_candidates(db: sqlite3.Connection, turn: Turn, session: str | None) -> Iterator[Leaf]:
    """Yield the leaves that `turn` may continue: its token ids begin with their conversation key.

    Of the leaves with the same key, only the `MOST_LEAVES` last used are read. `session`: id of the
    session to search, or None for all sessions of the turn's namespace.
    """
    column, value = ("session", session) if session else ("namespace", turn.namespace)
    keys = db.execute(f"SELECT DISTINCT anchor FROM leaves WHERE {column} = ?", (value,))
    for key, digest in digests_at(turn.ids, (n for (n,) in keys.fetchall())).items():
        newest = (
            f"id IN (SELECT id FROM leaves WHERE {column} = ? AND anchor = ? AND digest = ?"
            " ORDER BY last_used_at DESC LIMIT ?)"
        )
        yield from read_leaves(db, newest, (value, key, digest, MOST_LEAVES))


def find_leaf(db: sqlite3.Connection, turn: Turn, session: str | None) -> Leaf | None:
    """Find the leaf that a turn continues, or None if it begins a conversation.

    `session`: id of the session to search, or None for all sessions of the turn's namespace. With
    None, titles (the first words that the user typed) count too. The main leaf of a session whose
    title differs from the turn's does not match: if the client wrote the first message itself, two
    conversations can begin alike. If no leaf matches, main leaves of sessions with the turn's title
    are tried, because a client may change what it puts before the typed text; see
    `leaves.find_reworded`.
    """
    candidates = read_candidates(db, turn, session)
    if session is not None:
        return find_continued(turn.ids, candidates)
    titles: dict[str, str | None] = {}
    own = (leaf for leaf in candidates if _may_continue(db, leaf, turn, titles))
    leaf = find_continued(turn.ids, own)
    if leaf is not None or turn.title is None:
        return leaf
    return find_reworded(turn.ids, turn.head, turn.prompt_tokens, _read_titled(db, turn))


def _may_continue(
    db: sqlite3.Connection, leaf: Leaf, turn: Turn, titles: dict[str, str | None]
) -> bool:
    """Return False if `leaf` is the main one of a session whose title differs from the turn's.

    Otherwise, and if one of the two has no title, return True. If the turn has no tools and no
    system prompt, a title that only continues the session's does not count as different. `titles`:
    titles read already, by session id; that of the leaf's session is added.
    """
    if leaf.session not in titles:
        query = "SELECT title FROM sessions WHERE id = ?"
        titles[leaf.session] = db.execute(query, (leaf.session,)).fetchone()[0]
    title = titles[leaf.session]
    if leaf.kind != "main" or title is None or turn.title is None or title == turn.title:
        return True
    return not turn.head and turn.title.startswith(title)


def _read_titled(db: sqlite3.Connection, turn: Turn) -> Iterator[Leaf]:
    """Yield the main leaves of the sessions that have the title of `turn` and no label.

    Only sessions of the turn's namespace and owner are read, and of these only the `MOST_TITLED`
    used last.
    """
    newest = (
        "kind = 'main' AND session IN (SELECT id FROM sessions WHERE namespace = ? AND title = ?"
        " AND label IS NULL AND owner IS ? ORDER BY last_used_at DESC LIMIT ?)"
    )
    values = (turn.namespace, turn.title, turn.owner, MOST_TITLED)
    yield from read_leaves(db, newest, values)


def write_leaf(db: sqlite3.Connection, turn: Turn, session: str, leaf: Leaf | None) -> None:
    """Store the tokens of `turn` in `leaf`, or in a new leaf of `session` if `leaf` is None.

    Also decides which leaf of the session is the main one, and removes the least recently used of
    more than `MOST_LEAVES` leaves. `session`: id of the session.
    """
    main = next(iter(read_leaves(db, "session = ? AND kind = 'main'", (session,))), None)
    if leaf is None:
        kind: Kind = "agent" if main else "main"
        lengths = (turn.prompt_tokens, turn.key_tokens)
        made = Leaf(0, session, kind, turn.ids, *lengths, 1, turn.at, turn.replies)
        now = insert_leaf(db, turn.namespace, made)
        _trim_leaves(db, session)
    else:
        now = replace(leaf, ids=turn.ids, turns=leaf.turns + 1)
        db.execute(
            "UPDATE leaves SET prompt_tokens = ?, turns = ?, last_used_at = ?, replies = ?"
            " WHERE id = ?",
            (turn.prompt_tokens, now.turns, turn.at, pack_keys(turn.replies), now.id),
        )
        shared = common_length(leaf.ids, turn.ids)
        if shared < leaf.key_tokens:  # its first message was changed
            key = (turn.key_tokens, digest_of(turn.ids[: turn.key_tokens]), now.id)
            db.execute("UPDATE leaves SET anchor = ?, digest = ? WHERE id = ?", key)
        _write_ids(db, now.id, turn.ids, shared, len(leaf.ids))
    first = leaf is not None and turn.prompt_tokens > leaf.prompt_tokens and _is_first(db, leaf)
    if main and main.id != now.id and replaces_main(now, main, turn.head, first=first):
        db.execute("UPDATE leaves SET kind = 'agent' WHERE id = ?", (main.id,))
        db.execute("UPDATE leaves SET kind = 'main' WHERE id = ?", (now.id,))
        db.execute("UPDATE sessions SET title = NULL WHERE id = ?", (session,))
        main = None
    if main is None or main.id == now.id:
        db.execute(
            "UPDATE sessions SET title = coalesce(title, ?) WHERE id = ?", (turn.title, session)
        )


def _is_first(db: sqlite3.Connection, leaf: Leaf) -> bool:
    query = "SELECT min(id) FROM leaves WHERE session = ?"
    return bool(db.execute(query, (leaf.session,)).fetchone()[0] == leaf.id)


def insert_leaf(db: sqlite3.Connection, namespace: str, leaf: Leaf) -> Leaf:
    """Insert a new leaf, ignoring its `id`, and return it with its new id."""
    key = min(leaf.key_tokens, len(leaf.ids))
    digest = digest_of(leaf.ids[:key])
    row = db.execute(
        "INSERT INTO leaves (session, namespace, kind, prompt_tokens, anchor, digest, turns,"
        " last_used_at, replies) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(leaf.session, namespace, leaf.kind, leaf.prompt_tokens),
            *(key, digest, leaf.turns, leaf.last_used_at),
            None if leaf.replies is None else pack_keys(leaf.replies),
        ),
    )
    made = replace(leaf, id=int(row.lastrowid or 0), key_tokens=key)
    _write_ids(db, made.id, made.ids, 0, 0)
    return made


def _write_ids(db: sqlite3.Connection, leaf: int, ids: Tokens, same: int, held: int) -> None:
    """Replace the token ids of a leaf by `ids`.

    `leaf`: id of its row. `held`: number of token ids that it had before. `same`: number of leading
    ones that stay the same; the rows that hold only such ids are not written again.
    """
    if same == len(ids) == held:
        return
    first = same // PART_TOKENS * PART_TOKENS
    db.execute("DELETE FROM leaf_tokens WHERE leaf = ? AND start >= ?", (leaf, first))
    parts = (
        (leaf, start, ids[start : start + PART_TOKENS].tobytes())
        for start in range(first, len(ids), PART_TOKENS)
    )
    db.executemany("INSERT INTO leaf_tokens (leaf, start, ids) VALUES (?, ?, ?)", parts)


def count_shared(db: sqlite3.Connection, leaf: int, ids: Tokens) -> int:
    """Return the number of leading tokens that the leaf with the id `leaf` and `ids` share.

    Stops reading at the first difference. Returns 0 if there is no such leaf.
    """
    most = 0
    rows = db.execute("SELECT ids FROM leaf_tokens WHERE leaf = ? ORDER BY start", (leaf,))
    for (raw,) in rows:
        part = ids_of_bytes(raw)
        same = common_length(part, ids[most:])
        most += same
        if same < len(part):
            break
    return most


def shared_lengths(db: sqlite3.Connection, namespace: str, ids: Tokens) -> list[int]:
    """Return, for each leaf of a namespace, how many leading tokens it shares with `ids`.

    The order is arbitrary. Only leaves are included whose conversation key is at the beginning of
    `ids`. Empty if the database has no tables of sessions.
    """
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'leaves'").fetchone():
        return []
    query = "SELECT DISTINCT anchor FROM leaves WHERE namespace = ?"
    keys = [key for (key,) in db.execute(query, (namespace,))]
    found: list[int] = []
    for key, digest in digests_at(ids, keys).items():
        same = "SELECT id FROM leaves WHERE namespace = ? AND anchor = ? AND digest = ?"
        leaf_ids = db.execute(same, (namespace, key, digest)).fetchall()
        found += [count_shared(db, leaf, ids) for (leaf,) in leaf_ids]
    return found


def _trim_leaves(db: sqlite3.Connection, session: str) -> None:
    db.execute(
        "DELETE FROM leaves WHERE id IN (SELECT id FROM leaves WHERE session = ?"
        " ORDER BY kind = 'main' DESC, last_used_at DESC LIMIT -1 OFFSET ?)",
        (session, MOST_LEAVES),
    )


def trim_sessions(db: sqlite3.Connection) -> None:
    """Keep the `MOST_SESSIONS` last used of the sessions that are not pinned; remove the others.

    The sessions of all owners are counted together.
    """
    db.execute(
        "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions WHERE NOT pinned"
        " ORDER BY last_used_at DESC LIMIT -1 OFFSET ?)",
        (MOST_SESSIONS,),
    )


FIGURES_SCHEMA = """
CREATE TABLE IF NOT EXISTS session_figures (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    requests INTEGER NOT NULL, first_tokens INTEGER NOT NULL, first_token_s REAL NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    restored_tokens INTEGER NOT NULL, fed_tokens INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL, saved_tokens INTEGER NOT NULL, saved_s REAL NOT NULL,
    drafted_tokens INTEGER NOT NULL DEFAULT 0, accepted_tokens INTEGER NOT NULL DEFAULT 0,
    guess_passes INTEGER NOT NULL DEFAULT 0, guess_saved_s REAL NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS prefill_times (
    namespace TEXT NOT NULL, range INTEGER NOT NULL, tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (namespace, range)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """Sums over the requests of a session, in seconds and tokens.

    `first_tokens`: number of requests that gave a first token, after `first_token_s` seconds in
    total. `saved_tokens`: cached tokens at positions for which the speed of prefill was known.
    `saved_s`: estimated seconds that computing `saved_tokens` would have taken. `drafted_tokens`,
    `accepted_tokens`, `guess_passes`, `guess_saved_s`: see `types.RequestRecord`.
    """

    requests: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    fed_tokens: int = 0
    generated_tokens: int = 0
    saved_tokens: int = 0
    saved_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    guess_passes: int = 0
    guess_saved_s: float = 0.0

    def as_object(self) -> dict[str, Any]:
        """Return the figures as the JSON object `figures` of a session in the API.

        Its keys are the names of the fields, without `first_tokens`. `first_token_s` is the average
        instead of the sum, None if no request gave a token. `saved_s` is None if it is not known.
        """
        average = self.first_token_s / self.first_tokens if self.first_tokens else None
        known = bool(self.saved_tokens) or not self.cached_tokens
        return {
            "requests": self.requests,
            "first_token_s": None if average is None else round(average, 4),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "restored_tokens": self.restored_tokens,
            "fed_tokens": self.fed_tokens,
            "generated_tokens": self.generated_tokens,
            "saved_tokens": self.saved_tokens,
            "saved_s": round(self.saved_s, 3) if known else None,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "guess_passes": self.guess_passes,
            "guess_saved_s": round(self.guess_saved_s, 3),
        }


Measured = tuple[int, float]
"""Prefill tokens, and the seconds that they took."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Figures of one request to add to its session, and prefill times not stored yet.

    `measured`: tokens fed and the seconds that they took, by the number of a range of positions.
    Range 0 has the first 1024 positions of a prompt, range 1 the next 1024, and each further range
    twice as many as the one before; see `scheduling.cost.range_of`.
    """

    figures: SessionFigures
    measured: Mapping[int, Measured] = field(default_factory=dict)


_FIGURES = tuple(one.name for one in fields(SessionFigures))
_ADD_FIGURES = (
    f"INSERT INTO session_figures (session, {', '.join(_FIGURES)})"
    f" VALUES (:session, {', '.join(':' + name for name in _FIGURES)})"
    f" ON CONFLICT (session) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in _FIGURES)
)


def add_gain(db: sqlite3.Connection, session: str, namespace: str, gain: Gain) -> None:
    """Add a request's figures to those of its session, and its prefill times to the namespace's."""
    db.execute(_ADD_FIGURES, {"session": session, **asdict(gain.figures)})
    db.executemany(
        "INSERT INTO prefill_times (namespace, range, tokens, seconds) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (namespace, range) DO UPDATE SET tokens = tokens + excluded.tokens,"
        " seconds = seconds + excluded.seconds",
        [(namespace, where, *measured) for where, measured in gain.measured.items()],
    )


def read_figures(db: sqlite3.Connection, session: str) -> SessionFigures:
    """Return the figures of a session; all zero if it has no row."""
    query = f"SELECT {', '.join(_FIGURES)} FROM session_figures WHERE session = ?"
    row = db.execute(query, (session,)).fetchone()
    return SessionFigures(*row) if row is not None else SessionFigures()


def read_prefill_times(db: sqlite3.Connection, namespace: str) -> dict[int, Measured]:
    """Return the tokens fed in a namespace and the seconds that they took, by range of positions.

    Each value is a pair (tokens, seconds). The keys are numbers of ranges; see `Gain.measured`.
    """
    query = "SELECT range, tokens, seconds FROM prefill_times WHERE namespace = ?"
    rows = db.execute(query, (namespace,)).fetchall()
    return {where: (tokens, seconds) for where, tokens, seconds in rows}
