"""Rows of the table of stored responses: SQL on a connection, in the caller's transaction.

A response of OpenAI's Responses API is removed with the session that its request was a turn of.
"""

from __future__ import annotations

import sqlite3
import zlib
from dataclasses import dataclass

from mlxcache.errors import NotFound

MOST_RESPONSES, MOST_BYTES = 4096, 64 << 20
"""Responses kept, and bytes of their packed texts; of more, the oldest are removed."""

MAX_CHAIN = 1024

MAX_CHAIN_BYTES = 256 << 20
"""Most bytes of the texts of one conversation, which are in memory at once."""

SCHEMA = """
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
        (MOST_RESPONSES, MOST_BYTES),
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
    """Return the stored response `id` and those that it continues, oldest first.

    Raises NotFound if one of them is missing or does not belong to `owner`, or if they are too
    many.
    """
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
