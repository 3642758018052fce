"""Rows of the table of replies: SQL on a connection, in the caller's transaction.

A reply belongs to the session in which it was generated. A leaf lists the keys of the replies that
it contains. These may be replies of another session of the same owner, after a fork or if a
conversation continues under another label. The columns are described in docs/disk-format.md.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlxcache.types import Tokens, ids_of_bytes

MOST_REPLIES = 8192

KEY_BYTES = 16

MOST_KEYS = 2048

SCHEMA = """
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
    """Join the keys of a leaf's newest replies, oldest first, into one value for its row."""
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
    """Return the replies of an owner with one of `keys`, by key, oldest first.

    Of replies with the same key the newest is returned.
    """
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
