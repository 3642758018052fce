"""Replies as rows, so that a server that starts finds again what an earlier one wrote."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import numpy as np

from mlxcache.types import Tokens

MOST_REPLIES = 8192
"""Replies kept of all models; beyond them the oldest go."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    namespace TEXT NOT NULL, digest BLOB NOT NULL, length INTEGER NOT NULL, tail TEXT NOT NULL,
    history BLOB NOT NULL, ids BLOB NOT NULL, calls INTEGER NOT NULL,
    thinking_open INTEGER NOT NULL, generic_tools INTEGER NOT NULL, stopped TEXT);
CREATE INDEX IF NOT EXISTS replies_session ON replies (session);
CREATE INDEX IF NOT EXISTS replies_namespace ON replies (namespace);
"""
_FIELDS = "digest, length, tail, history, ids, calls, thinking_open, generic_tools, stopped"


@dataclass(frozen=True, slots=True, eq=False)
class ReplyRow:
    """A reply's ids, shape (n,), and by what `prompt.replies` finds and reads it."""

    digest: bytes
    length: int
    tail: str
    history: bytes
    ids: Tokens
    calls: bool
    thinking_open: bool
    generic_tools: bool
    stopped: str | None


def insert(db: sqlite3.Connection, session: str, namespace: str, reply: ReplyRow) -> None:
    """Add a session's reply; the oldest ones of all go where they are too many."""
    ids = np.asarray(reply.ids, "<i4").tobytes()
    row = (reply.digest, reply.length, reply.tail, reply.history, ids)
    how = (reply.calls, reply.thinking_open, reply.generic_tools, reply.stopped)
    made = db.execute(
        f"INSERT INTO replies (session, namespace, {_FIELDS}) VALUES (?,?,?,?,?,?,?,?,?,?,?)",
        (session, namespace, *row, *how),
    )
    db.execute("DELETE FROM replies WHERE id <= ?", ((made.lastrowid or 0) - MOST_REPLIES,))


def replies(
    db: sqlite3.Connection, namespace: str, after: int = 0, owner: str | None = None
) -> tuple[list[ReplyRow], int]:
    """The replies of a namespace that came after a row, the oldest first, and the last row now.

    Those of one owner's sessions alone.
    """
    query = (
        f"SELECT {_FIELDS} FROM replies WHERE id > ? AND namespace = ?"
        " AND session IN (SELECT id FROM sessions WHERE owner IS ?) ORDER BY id"
    )
    last = db.execute("SELECT coalesce(max(id), 0) FROM replies").fetchone()[0]
    found = [
        ReplyRow(
            *(digest, length, tail, history, np.frombuffer(ids, "<i4").astype(np.int32)),
            *(bool(calls), bool(opened), bool(generic), stopped),
        )
        for digest, length, tail, history, ids, calls, opened, generic, stopped in db.execute(
            query, (after, namespace, owner)
        )
    ]
    return found, int(last)
