"""Rows of the tables of sessions: SQL on a connection, in the caller's transaction."""

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

MOST_LEAVES = 100
"""Most leaves kept per session: the main one, and the most recently used of sub-agents."""

MOST_TITLED = 16

PART_TOKENS = 1024

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, namespace TEXT NOT NULL, model TEXT NOT NULL,
    label TEXT, name TEXT, title TEXT, client TEXT,
    turns INTEGER NOT NULL, pinned INTEGER NOT NULL,
    created_at REAL NOT NULL, last_used_at REAL NOT NULL, owner TEXT);
CREATE INDEX IF NOT EXISTS sessions_label ON sessions (namespace, label);
CREATE INDEX IF NOT EXISTS sessions_title ON sessions (namespace, title);
CREATE INDEX IF NOT EXISTS sessions_used ON sessions (last_used_at);
CREATE INDEX IF NOT EXISTS sessions_owner ON sessions (owner, last_used_at);
CREATE TABLE IF NOT EXISTS leaves (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    namespace TEXT NOT NULL, kind TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    anchor INTEGER NOT NULL, digest BLOB NOT NULL,
    turns INTEGER NOT NULL, last_used_at REAL NOT NULL, replies BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS leaves_session ON leaves (session);
CREATE INDEX IF NOT EXISTS leaves_anchor ON leaves (namespace, anchor, digest);
CREATE TABLE IF NOT EXISTS leaf_tokens (
    leaf INTEGER NOT NULL REFERENCES leaves (id) ON DELETE CASCADE,
    start INTEGER NOT NULL, ids BLOB NOT NULL,
    PRIMARY KEY (leaf, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS session_figures (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    requests INTEGER NOT NULL, first_tokens INTEGER NOT NULL, first_token_s REAL NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    restored_tokens INTEGER NOT NULL, fed_tokens INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL, saved_tokens INTEGER NOT NULL, saved_s REAL NOT NULL,
    drafted_tokens INTEGER NOT NULL, accepted_tokens INTEGER NOT NULL,
    guess_passes INTEGER NOT NULL, guess_saved_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS prefill_times (
    namespace TEXT NOT NULL, range INTEGER NOT NULL, tokens INTEGER NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (namespace, range)) WITHOUT ROWID;
"""

ANY_OWNER = ""


@dataclass(frozen=True, slots=True)
class Session:
    """A session's row; `owner`: see `mlxcache.owner`. Times are in seconds since 1970.

    `label` is given by clients, `name` by the user. `title` is taken from the first user message.
    `model`: its name, for display.
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

    `ids`: token ids of its prompt and reply; the first `prompt_tokens` are the prompt.
    `key_tokens`: length of its conversation key. `head`: number of tokens of tools and system
    prompt. `known`: the `ReplyRow.key` of each earlier reply in its prompt, in order. `response`:
    id of the stored response that the request made. For the other fields see `Session`.
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
        return self.known if self.reply is None else (*self.known, self.reply.key)


@dataclass(frozen=True, slots=True)
class Origin:
    """The session that a conversation has on another server with the same shared remote."""

    id: str
    name: str | None
    created_at: float


SESSION_FIELDS = (
    "id, namespace, model, label, name, title, client, turns, pinned, created_at, last_used_at"
    ", owner"
)
_LEAF_ORDER = "ORDER BY kind = 'main' DESC, last_used_at DESC, id"


def session_from(row: tuple[Any, ...]) -> Session:
    session = Session(*row)
    return replace(session, pinned=bool(session.pinned))


def read_leaves(db: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> list[Leaf]:
    """Return the leaves for which an SQL condition holds: main ones first, then the last used."""
    query = (
        "SELECT kind, prompt_tokens, anchor, turns, last_used_at, replies, id, session FROM leaves"
        f" WHERE {where} {_LEAF_ORDER}"
    )
    return [
        Leaf(read_ids(db, id), kind, prompt, key, turns, used, unpack_keys(replies), id, session)
        for kind, prompt, key, turns, used, replies, id, session in db.execute(
            query, values
        ).fetchall()
    ]


def read_leaf_rows(db: sqlite3.Connection, session: str) -> tuple[LeafRow, ...]:
    found = db.execute(
        "SELECT id, session, kind, ifnull((SELECT start + length(ids) / 4 FROM leaf_tokens"
        " WHERE leaf = leaves.id ORDER BY start DESC LIMIT 1), 0), prompt_tokens, turns,"
        f" last_used_at FROM leaves WHERE session = ? {_LEAF_ORDER}",
        (session,),
    )
    return tuple(LeafRow(*row) for row in found)


def read_ids(db: sqlite3.Connection, leaf: int) -> Tokens:
    rows = db.execute("SELECT ids FROM leaf_tokens WHERE leaf = ? ORDER BY start", (leaf,))
    return ids_of_bytes(b"".join(part for (part,) in rows))


def read_session(db: sqlite3.Connection, id: str, owner: str | None = ANY_OWNER) -> Session:
    query = f"SELECT {SESSION_FIELDS} FROM sessions WHERE id = ?1 AND (?2 = '' OR owner IS ?2)"
    row = db.execute(query, (id, owner)).fetchone()
    if row is None:
        raise NotFound(f"No session has the id {id[:80]!r}.")
    return session_from(row)


def insert_session(db: sqlite3.Connection, session: Session) -> None:
    places = ", ".join("?" * 12)
    db.execute(f"INSERT INTO sessions ({SESSION_FIELDS}) VALUES ({places})", astuple(session))


def new_session(id: str, turn: Turn, origin: Origin | None = None) -> Session:
    """Return the session that begins with `turn`, before its first turn is counted."""
    name, began = None, turn.at
    if origin is not None and origin.id == id:
        name, began = origin.name, min(origin.created_at, began)
    names = (turn.label, name, None, turn.client)
    return Session(id, turn.namespace, turn.model, *names, 0, False, began, turn.at, turn.owner)


def find_labelled(db: sqlite3.Connection, turn: Turn) -> str | None:
    """Return the session with a turn's label; one whose id is the label is preferred."""
    if turn.label is None:
        return None
    row = db.execute(
        "SELECT id FROM sessions WHERE namespace = ?1 AND (label = ?2 OR id = ?2)"
        " AND owner IS ?3 ORDER BY id = ?2 DESC",
        (turn.namespace, turn.label, turn.owner),
    ).fetchone()
    return None if row is None else str(row[0])


def read_candidates(db: sqlite3.Connection, turn: Turn, session: str | None) -> Iterator[Leaf]:
    """Yield the leaves whose conversation key `turn` begins with, of one session or of all."""
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

    If `session` is None, all sessions of the namespace are searched, and titles (the first words
    that the user typed) count too. The main leaf of a session whose title differs from the turn's
    does not match: if the client wrote the first message itself, two conversations can begin alike.
    If no leaf matches, main leaves of sessions with the turn's title are tried, because a client
    may change what it puts before the typed text.
    """
    candidates = read_candidates(db, turn, session)
    if session is not None:
        return find_continued(turn.ids, candidates)
    titles: dict[str, str | None] = {}
    own = (leaf for leaf in candidates if _may_continue(db, leaf, turn, titles))
    leaf = find_continued(turn.ids, own)
    if leaf is not None or turn.title is None:
        return leaf
    titled = (
        "kind = 'main' AND session IN (SELECT id FROM sessions WHERE namespace = ? AND title = ?"
        " AND label IS NULL AND owner IS ? ORDER BY last_used_at DESC LIMIT ?)"
    )
    values = (turn.namespace, turn.title, turn.owner, MOST_TITLED)
    return find_reworded(turn.ids, turn.head, turn.prompt_tokens, read_leaves(db, titled, values))


def _may_continue(
    db: sqlite3.Connection, leaf: Leaf, turn: Turn, titles: dict[str, str | None]
) -> bool:
    """Return False if `leaf` is the main one of a session whose title differs from the turn's.

    If the turn has no tools and no system prompt, a title that only continues the session's does
    not count as different. `titles`: those read already, by session id.
    """
    if leaf.session not in titles:
        query = "SELECT title FROM sessions WHERE id = ?"
        titles[leaf.session] = db.execute(query, (leaf.session,)).fetchone()[0]
    title = titles[leaf.session]
    if leaf.kind != "main" or title is None or turn.title is None or title == turn.title:
        return True
    return not turn.head and turn.title.startswith(title)


def write_leaf(db: sqlite3.Connection, turn: Turn, session: str, leaf: Leaf | None) -> None:
    """Store the tokens of `turn` in `leaf`, or in a new leaf of `session` if `leaf` is None.

    Also decides which leaf is the main one, and removes the least recently used of too many.
    """
    main = next(iter(read_leaves(db, "session = ? AND kind = 'main'", (session,))), None)
    if leaf is None:
        kind: Kind = "agent" if main else "main"
        lengths = (turn.prompt_tokens, turn.key_tokens)
        made = Leaf(turn.ids, kind, *lengths, 1, turn.at, turn.replies, session=session)
        now = insert_leaf(db, turn.namespace, made)
        db.execute(
            "DELETE FROM leaves WHERE id IN (SELECT id FROM leaves WHERE session = ?"
            " ORDER BY kind = 'main' DESC, last_used_at DESC LIMIT -1 OFFSET ?)",
            (session, MOST_LEAVES),
        )
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
    key = min(leaf.key_tokens, len(leaf.ids))
    digest = digest_of(leaf.ids[:key])
    row = db.execute(
        "INSERT INTO leaves (session, namespace, kind, prompt_tokens, anchor, digest, turns,"
        " last_used_at, replies) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(leaf.session, namespace, leaf.kind, leaf.prompt_tokens),
            *(key, digest, leaf.turns, leaf.last_used_at),
            pack_keys(leaf.replies),
        ),
    )
    made = replace(leaf, id=int(row.lastrowid or 0), key_tokens=key)
    _write_ids(db, made.id, made.ids, 0, 0)
    return made


def _write_ids(db: sqlite3.Connection, leaf: int, ids: Tokens, same: int, held: int) -> None:
    """Replace the token ids of a leaf by `ids`, of which the first `same` stay the same.

    `held`: number of token ids that it had before.
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


def trim_sessions(db: sqlite3.Connection) -> None:
    db.execute(
        "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions WHERE NOT pinned"
        " ORDER BY last_used_at DESC LIMIT -1 OFFSET ?)",
        (MOST_SESSIONS,),
    )


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """Sums over the requests of a session, in seconds and tokens.

    `first_tokens`: number of requests that gave a first token, after `first_token_s` seconds in
    total. `saved_tokens`: cached tokens at positions for which the speed of prefill was known.
    `saved_s`: estimated seconds that computing them would have taken. For the last four see
    `types.RequestRecord`.
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
        average = self.first_token_s / self.first_tokens if self.first_tokens else None
        known = bool(self.saved_tokens) or not self.cached_tokens
        found = asdict(self)
        del found["first_tokens"]
        return found | {
            "first_token_s": None if average is None else round(average, 4),
            "saved_s": round(self.saved_s, 3) if known else None,
            "guess_saved_s": round(self.guess_saved_s, 3),
        }


Measured = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Gain:
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
    db.execute(_ADD_FIGURES, {"session": session, **asdict(gain.figures)})
    db.executemany(
        "INSERT INTO prefill_times (namespace, range, tokens, seconds) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (namespace, range) DO UPDATE SET tokens = tokens + excluded.tokens,"
        " seconds = seconds + excluded.seconds",
        [(namespace, where, *measured) for where, measured in gain.measured.items()],
    )


def read_figures(db: sqlite3.Connection, session: str) -> SessionFigures:
    query = f"SELECT {', '.join(_FIGURES)} FROM session_figures WHERE session = ?"
    row = db.execute(query, (session,)).fetchone()
    return SessionFigures(*row) if row is not None else SessionFigures()


def read_prefill_times(db: sqlite3.Connection, namespace: str) -> dict[int, Measured]:
    query = "SELECT range, tokens, seconds FROM prefill_times WHERE namespace = ?"
    rows = db.execute(query, (namespace,)).fetchall()
    return {where: (tokens, seconds) for where, tokens, seconds in rows}
