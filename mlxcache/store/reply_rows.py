"""Rows of replies and of stored responses: SQL on a connection, in the caller's transaction.

A reply belongs to the session in which it was generated. A leaf lists the keys of the replies that
it contains. These may be replies of another session of the same owner, after a fork or if a
conversation continues under another label. A response of OpenAI's Responses API is removed with the
session that its request was a turn of. The columns are described in docs/disk-format.md.
"""

from __future__ import annotations

import hashlib
import sqlite3
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlxcache.errors import NotFound
from mlxcache.types import Tokens, ids_of_bytes

MOST_REPLIES = 8192

KEY_BYTES = 16

MOST_KEYS = 2048

REPLIES = """
CREATE TABLE IF NOT EXISTS replies (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    namespace TEXT NOT NULL, digest BLOB NOT NULL, length INTEGER NOT NULL, tail TEXT NOT NULL,
    history BLOB NOT NULL, ids BLOB NOT NULL, calls INTEGER NOT NULL,
    thinking_open INTEGER NOT NULL, generic_tools INTEGER NOT NULL, stopped TEXT,
    key BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS replies_session ON replies (session);
CREATE INDEX IF NOT EXISTS replies_namespace ON replies (namespace);
"""
_FIELDS = "digest, length, tail, history, ids, calls, thinking_open, generic_tools, stopped"


@dataclass(frozen=True, slots=True, eq=False)
class ReplyRow:
    """A reply as the model generated it, and the prompt that it was generated for.

    `digest`, `length`, `tail`, `history`: the key of the prompt, by which the reply is found; see
    `PromptKey`. `calls`: the reply was parsed for tool calls. `thinking_open`: the prompt ended
    inside a thinking block. `generic_tools`: the template does not support tools. `stopped`: the
    stop string that ended it, or None.
    """

    digest: bytes
    length: int
    tail: str
    history: bytes
    ids: Tokens
    calls: bool
    thinking_open: bool
    generic_tools: bool
    stopped: str | None

    @property
    def key(self) -> bytes:
        """Digest of all fields; equal for equal replies to equal prompts."""
        flags = (self.length, self.tail, self.calls, self.thinking_open, self.generic_tools)
        words = repr((self.digest, self.history, *flags, self.stopped)).encode()
        hasher = hashlib.blake2b(words, digest_size=KEY_BYTES)
        hasher.update(self.ids.tobytes())
        return hasher.digest()


def pack_keys(keys: Iterable[bytes]) -> bytes:
    return b"".join(list(dict.fromkeys(keys))[-MOST_KEYS:])


def unpack_keys(raw: bytes) -> tuple[bytes, ...]:
    return tuple(raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES))


def insert_reply(db: sqlite3.Connection, session: str, namespace: str, reply: ReplyRow) -> None:
    row = (reply.digest, reply.length, reply.tail, reply.history, reply.ids.tobytes())
    how = (reply.calls, reply.thinking_open, reply.generic_tools, reply.stopped)
    made = db.execute(
        f"INSERT INTO replies (session, namespace, {_FIELDS}, key)"
        " VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
        (session, namespace, *row, *how, reply.key),
    )
    db.execute("DELETE FROM replies WHERE id <= ?", ((made.lastrowid or 0) - MOST_REPLIES,))


def read_replies(
    db: sqlite3.Connection, namespace: str, after: int = 0
) -> tuple[dict[str | None, list[ReplyRow]], int]:
    """Return the replies of a namespace with a row id above `after`, and the highest row id.

    The replies are in a dictionary by the owner of their session, oldest first. The highest row id
    is that of all namespaces; pass it as the next `after` to get only newer replies.
    """
    last = int(db.execute("SELECT coalesce(max(id), 0) FROM replies").fetchone()[0])
    found: dict[str | None, list[ReplyRow]] = {}
    if last <= after:
        return found, last
    query = (
        f"SELECT (SELECT owner FROM sessions WHERE sessions.id = session), {_FIELDS}"
        " FROM replies WHERE id > ? AND namespace = ? ORDER BY id"
    )
    for owner, *fields in db.execute(query, (after, namespace)):
        found.setdefault(owner, []).append(_row(fields))
    return found, last


def _row(fields: Sequence[object]) -> ReplyRow:
    digest, length, tail, history, ids, *flags, stopped = fields
    calls, opened, generic = map(bool, flags)
    tokens = ids_of_bytes(ids)  # type: ignore[arg-type]
    return ReplyRow(digest, length, tail, history, tokens, calls, opened, generic, stopped)  # type: ignore[arg-type]


def find_replies(
    db: sqlite3.Connection, namespace: str, owner: str | None, keys: Collection[bytes]
) -> dict[bytes, ReplyRow]:
    """Return an owner's replies with one of `keys`, by key, the newest of each, oldest first."""
    query = (
        "SELECT replies.id, key FROM replies JOIN sessions ON sessions.id = session"
        " WHERE replies.namespace = ? AND owner IS ? ORDER BY replies.id"
    )
    listed = db.execute(query, (namespace, owner)).fetchall() if keys else ()
    newest: dict[bytes, int] = {}
    for id, key in listed:
        if key in keys:
            newest.pop(key, None)
            newest[key] = id
    row = f"SELECT {_FIELDS} FROM replies WHERE id = ?"
    return {key: _row(db.execute(row, (id,)).fetchone()) for key, id in newest.items()}


def read_own(db: sqlite3.Connection, session: str) -> Iterator[ReplyRow]:
    query = f"SELECT {_FIELDS} FROM replies WHERE session = ? ORDER BY id"
    for fields in db.execute(query, (session,)):
        yield _row(fields)


def holds(ids: Tokens, reply: ReplyRow) -> bool:
    """Return whether `ids` contain the token ids of a reply, in order and without a gap.

    The reply's last token may be missing, unless it is the only one: it may be the end of the turn,
    which a template may write differently, or a token that was drawn but never fed to the model.
    """
    sought, within = reply.ids[: max(1, len(reply.ids) - 1)].tobytes(), ids.tobytes()
    at = within.find(sought)
    while at > 0 and at % 4:
        at = within.find(sought, at + 1)
    return at >= 0


def hand_over(db: sqlite3.Connection, leaving: Collection[str]) -> None:
    """Assign replies of sessions about to be removed to sessions of that owner that list them."""
    query = (
        "SELECT owner, leaves.namespace, session, replies FROM leaves"
        " JOIN sessions ON sessions.id = session"
    )
    holders: dict[tuple[str | None, str, bytes], str] = {}
    for owner, namespace, session, packed in db.execute(query):
        if session not in leaving:
            for key in unpack_keys(packed):
                holders[owner, namespace, key] = session
    if not holders:
        return
    for session in leaving:
        owned = db.execute(
            "SELECT replies.id, owner, replies.namespace, key FROM replies"
            " JOIN sessions ON sessions.id = session WHERE session = ?",
            (session,),
        ).fetchall()
        moved = [
            (holders[owner, namespace, key], id)
            for id, owner, namespace, key in owned
            if (owner, namespace, key) in holders
        ]
        db.executemany("UPDATE replies SET session = ? WHERE id = ?", moved)


MOST_RESPONSES, MOST_RESPONSE_BYTES = 4096, 64 << 20
"""Responses kept, and bytes of their packed texts; of more, the oldest are removed."""

MAX_CHAIN = 1024

MAX_CHAIN_BYTES = 256 << 20
"""Most bytes of the texts of one conversation, which are in memory at once."""

RESPONSES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT, session TEXT, previous TEXT, created_at REAL NOT NULL,
    size INTEGER NOT NULL, body BLOB, items BLOB);
CREATE INDEX IF NOT EXISTS responses_session ON responses (session);
CREATE INDEX IF NOT EXISTS responses_age ON responses (created_at, id, size);
CREATE TRIGGER IF NOT EXISTS responses_of_session AFTER DELETE ON sessions
    BEGIN DELETE FROM responses WHERE session = OLD.id; END;
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as the API returned it, and the input items of its request.

    `body`, `items`: JSON, an object and an array. `previous`: the id of the response that it
    continues. `owner`: see `mlxcache.owner`; only requests with that key can read it.
    """

    id: str
    owner: str | None
    previous: str | None
    created_at: float
    body: bytes
    items: bytes


def insert_response(db: sqlite3.Connection, response: StoredResponse) -> None:
    body, items = zlib.compress(response.body, 6), zlib.compress(response.items, 6)
    db.execute(
        "INSERT INTO responses (id, owner, previous, created_at, size, body, items)"
        " VALUES (?1,?2,?3,?4,?5,?6,?7) ON CONFLICT (id) DO UPDATE SET owner = ?2, previous = ?3,"
        " created_at = ?4, size = ?5, body = ?6, items = ?7",
        (
            *(response.id, response.owner, response.previous, response.created_at),
            *(len(body) + len(items), body, items),
        ),
    )
    db.execute(
        "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id,"
        " row_number() OVER newest AS place, sum(size) OVER newest AS total FROM responses"
        " WINDOW newest AS (ORDER BY created_at DESC, id DESC)"
        ") WHERE (place > ? OR total > ?) AND place > 1)",
        (MOST_RESPONSES, MOST_RESPONSE_BYTES),
    )


def link_response(db: sqlite3.Connection, id: str, session: str, at: float) -> None:
    """Record the session of a response, which may be inserted before or later."""
    db.execute(
        "INSERT INTO responses (id, session, created_at, size) VALUES (?1,?2,?3,0)"
        " ON CONFLICT (id) DO UPDATE SET session = ?2",
        (id, session, at),
    )


def read_response(db: sqlite3.Connection, id: str, owner: str | None) -> StoredResponse:
    row = db.execute(
        "SELECT id, owner, previous, created_at, body, items FROM responses"
        " WHERE id = ? AND owner IS ? AND body IS NOT NULL",
        (id, owner),
    ).fetchone()
    if row is None:
        raise NotFound(f"Response with id '{id[:80]}' not found.")
    found, whose, previous, created_at, body, items = row
    unpack = zlib.decompress
    return StoredResponse(found, whose, previous, created_at, unpack(body), unpack(items))


def read_chain(db: sqlite3.Connection, id: str, owner: str | None) -> list[StoredResponse]:
    """Return the stored response `id` and those that it continues, oldest first."""
    found: list[StoredResponse] = []
    size = 0
    at: str | None = id
    while at is not None:
        if len(found) == MAX_CHAIN:
            raise NotFound(f"Response '{id[:80]}' continues more than {MAX_CHAIN} responses.")
        found.append(read_response(db, at, owner))
        size += len(found[-1].body) + len(found[-1].items)
        if size > MAX_CHAIN_BYTES:
            raise NotFound(
                f"Response '{id[:80]}' and those that it continues have more than "
                f"{MAX_CHAIN_BYTES:,} bytes."
            )
        at = found[-1].previous
    return found[::-1]


def delete_response(db: sqlite3.Connection, id: str, owner: str | None) -> None:
    read_response(db, id, owner)
    db.execute("DELETE FROM responses WHERE id = ?", (id,))
