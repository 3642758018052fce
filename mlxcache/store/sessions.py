"""The table of sessions: named conversations, each with one or more leaves.

It is in the database of the disk tier's index, or in a database in memory. The token ids of a leaf
are in rows of bounded size, so that a turn writes only the rows that change.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from mlxcache.errors import BadRequest, NotFound, StoreError
from mlxcache.names import clean_name
from mlxcache.store import reply_rows
from mlxcache.store import session_rows as rows
from mlxcache.store.database import Database
from mlxcache.store.leaves import Leaf, LeafRow
from mlxcache.store.listing import Held, Listed
from mlxcache.store.reply_rows import ReplyRow, StoredResponse
from mlxcache.store.session_rows import ANY_OWNER, Session, Turn
from mlxcache.store.snapshot_format import CARRIED, SessionInfo
from mlxcache.types import Tokens

__all__ = ["ANY_OWNER", "Session", "Sessions", "Turn", "id_of", "new_id"]


ID = re.compile(r"ses_[0-9A-Za-z]{1,64}")
"""Pattern of session ids accepted from a file. An id is in headers and file names."""


def id_of(namespace: str, label: str, owner: str | None = None) -> str:
    """Return the id of a new session with a label: the same everywhere, if it is free."""
    own = "" if owner is None else f"\0{owner}"
    text = f"{namespace}\0{label}{own}".encode(errors="surrogatepass")
    return "ses_" + hashlib.blake2b(text, digest_size=6).hexdigest()


def new_id() -> str:
    return f"ses_{secrets.token_hex(6)}"


class LeafChanged(StoreError):
    """Error raised if a leaf has other token ids than when its row was read."""


class Sessions:
    """Table of sessions in `database`, which several servers may share.

    Every method is one transaction, may be called on any thread, and may raise StoreError; with an
    id, NotFound if the owner has no such session. An `owner` of None stands for sessions made by
    servers without API keys, or with only one, and `ANY_OWNER` for those of all owners.
    """

    def __init__(self, database: Database):
        self._database = database
        for schema in (rows.SCHEMA, reply_rows.REPLIES, reply_rows.RESPONSES):
            database.create(schema)

    def copy(self) -> Sessions:
        """Return a copy in memory; the caller must call its `close`."""
        return Sessions(self._database.copy())

    def close(self) -> None:
        self._database.close()

    def patience(self, seconds: float) -> AbstractContextManager[None]:
        return self._database.patience(seconds)

    # -- reading -----------------------------------------------------------------------------

    def all(
        self, limit: int | None = None, owner: str | None = ANY_OWNER, label: str | None = None
    ) -> list[Session]:
        wanted: dict[str, str | None] = {} if owner == ANY_OWNER else {"owner IS ?": owner}
        if label is not None:
            wanted["label = ?"] = label
        where = f"WHERE {' AND '.join(wanted)}" if wanted else ""  # no OR: it would use no index
        query = (
            f"SELECT {rows.SESSION_FIELDS} FROM sessions {where}"
            " ORDER BY last_used_at DESC, id LIMIT ?"
        )
        with self._database.read() as db:
            found = db.execute(query, (*wanted.values(), -1 if limit is None else limit)).fetchall()
        return [rows.session_from(row) for row in found]

    def listed(self, sessions: Sequence[Session]) -> list[Listed]:
        with self._database.read() as db:
            found = [
                (one, rows.read_leaf_rows(db, one.id), rows.read_figures(db, one.id))
                for one in sessions
            ]
        return [
            Listed(one, leaves, Held.nothing(leaves), Held.nothing(leaves), figures)
            for one, leaves, figures in found
        ]

    def related(self, session: Session) -> list[Session]:
        if session.label is None:
            return []
        alike = self.all(None, session.owner, session.label)
        return [one for one in alike if one.id != session.id]

    def count(self) -> int:
        with self._database.read() as db:
            return int(db.execute("SELECT count(*) FROM sessions").fetchone()[0])

    def get(self, id: str, owner: str | None = ANY_OWNER) -> Session:
        with self._database.read() as db:
            return rows.read_session(db, id, owner)

    def leaves(self, id: str) -> list[Leaf]:
        with self._database.read() as db:
            return rows.read_leaves(db, "session = ?", (id,))

    def prefill_times(self, namespace: str) -> dict[int, rows.Measured]:
        with self._database.read() as db:
            return rows.read_prefill_times(db, namespace)

    def pinned(self) -> list[str]:
        with self._database.read() as db:
            return [str(id) for (id,) in db.execute("SELECT id FROM sessions WHERE pinned")]

    def sharing(self, namespace: str, ids: Tokens) -> dict[int, int]:
        """Return how many leading tokens each leaf of a namespace shares with `ids`, by its id."""
        query = "SELECT id FROM leaves WHERE namespace = ?"
        with self._database.read() as db:
            held = db.execute(query, (namespace,)).fetchall()
            found = {leaf: rows.count_shared(db, leaf, ids) for (leaf,) in held}
        return {leaf: shared for leaf, shared in found.items() if shared}

    def ids(self, leaf: int) -> Tokens:
        with self._database.read() as db:
            return rows.read_ids(db, leaf)

    def ids_of(self, leaf: LeafRow) -> Tokens:
        """Return the token ids of a leaf. Raises LeafChanged if its row is no longer `leaf`."""
        with self._database.read() as db:
            if leaf not in rows.read_leaf_rows(db, leaf.session):
                raise LeafChanged(f"The session {leaf.session} changed meanwhile: try again.")
            return rows.read_ids(db, leaf.id)

    def replies(
        self, namespace: str, after: int = 0
    ) -> tuple[dict[str | None, list[ReplyRow]], int]:
        with self._database.read() as db:
            return reply_rows.read_replies(db, namespace, after)

    def response(self, id: str, owner: str | None) -> StoredResponse:
        with self._database.read() as db:
            return reply_rows.read_response(db, id, owner)

    def response_chain(self, id: str, owner: str | None) -> list[StoredResponse]:
        with self._database.read() as db:
            return reply_rows.read_chain(db, id, owner)

    # -- changing ----------------------------------------------------------------------------

    def save_response(self, response: StoredResponse) -> None:
        with self._database.write() as db:
            reply_rows.insert_response(db, response)

    def delete_response(self, id: str, owner: str | None) -> None:
        with self._database.write() as db:
            reply_rows.delete_response(db, id, owner)

    def record_turn(
        self, turn: Turn, id: str | None = None, origin: rows.Origin | None = None
    ) -> str:
        """Record a finished request; return the id of the session to which it belongs.

        That is the session with the turn's label; without a label, the session of the conversation
        that the turn continues. If there is none, a new session is inserted. Its id is `id`, or
        that derived from the label (see `id_of`), or that of `origin`, the conversation's session
        on another server. If none of these is given, or the id is in use already, a random one is
        made.
        """
        with self._database.write() as db:
            session = rows.find_labelled(db, turn)
            leaf = None
            if session is not None or turn.label is None:
                leaf = rows.find_leaf(db, turn, session)
            if leaf is not None:
                session = leaf.session
            if session is None:
                session = self._id_for(db, turn, id, origin)
                rows.insert_session(db, rows.new_session(session, turn, origin))
                rows.trim_sessions(db)
            rows.write_leaf(db, turn, session, leaf)
            if turn.reply is not None:
                reply_rows.insert_reply(db, session, turn.namespace, turn.reply)
            if turn.response is not None:
                reply_rows.link_response(db, turn.response, session, turn.at)
            if turn.gain is not None:
                rows.add_gain(db, session, turn.namespace, turn.gain)
            db.execute(
                "UPDATE sessions SET turns = turns + 1, last_used_at = max(last_used_at, ?),"
                " client = coalesce(?, client), model = ? WHERE id = ?",
                (turn.at, turn.client, turn.model, session),
            )
        return session

    def _id_for(
        self, db: sqlite3.Connection, turn: Turn, id: str | None, origin: rows.Origin | None
    ) -> str:
        if id is None and turn.label:
            id = id_of(turn.namespace, turn.label, turn.owner)
        if id is None and origin is not None:
            id = origin.id
        taken = "SELECT 1 FROM sessions WHERE id = ?"
        return new_id() if id is None or db.execute(taken, (id,)).fetchone() else id

    def update(
        self,
        id: str,
        *,
        name: str | None = None,
        pinned: bool | None = None,
        owner: str | None = ANY_OWNER,
    ) -> None:
        """Rename a session, or mark it as pinned or not; a `name` of "" removes its name."""
        with self._database.write() as db:
            rows.read_session(db, id, owner)
            if name is not None:
                db.execute(
                    "UPDATE sessions SET name = ? WHERE id = ?", (clean_name(name) or None, id)
                )
            if pinned is not None:
                db.execute("UPDATE sessions SET pinned = ? WHERE id = ?", (pinned, id))

    def delete(self, id: str) -> None:
        with self._database.write() as db:
            rows.read_session(db, id)
            reply_rows.hand_over(db, {id})
            db.execute("DELETE FROM sessions WHERE id = ?", (id,))

    def clear(self, *, pinned: bool = False) -> int:
        """Remove all sessions, but pinned ones only if `pinned`; their KV stays."""
        gone = "FROM sessions WHERE ? OR NOT pinned"
        with self._database.write() as db:
            leaving = {id for (id,) in db.execute(f"SELECT id {gone}", (pinned,))}
            reply_rows.hand_over(db, leaving)
            return db.execute(f"DELETE {gone}", (pinned,)).rowcount

    def fork(self, id: str, at: float, name: str | None = None, tokens: int | None = None) -> str:
        """Insert a session with the first `tokens` tokens of the main leaf of `id`, or all."""
        with self._database.write() as db:
            source = rows.read_session(db, id)
            main = next(iter(rows.read_leaves(db, "session = ? AND kind = 'main'", (id,))), None)
            if main is None:
                raise NotFound(f"The session {id} has no tokens to fork from.")
            end = len(main.ids) if tokens is None else tokens
            if not 1 <= end <= len(main.ids):
                raise BadRequest(
                    f"`at_tokens` must be from 1 to {len(main.ids)}, not {end}.", param="at_tokens"
                )
            fork = replace(
                source,
                id=new_id(),
                label=None,
                name=clean_name(name or "") or None,
                turns=main.turns,
                pinned=False,
                created_at=at,
                last_used_at=at,
            )
            rows.insert_session(db, fork)
            leaf = replace(
                main,
                session=fork.id,
                ids=main.ids[:end],
                prompt_tokens=min(main.prompt_tokens, end),
                last_used_at=at,
            )
            if end < len(main.ids):
                leaf = replace(leaf, replies=_held(db, source, leaf))
            rows.insert_leaf(db, source.namespace, leaf)
        return fork.id

    def info(self, id: str, owner: str | None = ANY_OWNER) -> SessionInfo:
        with self._database.read() as db:
            session = rows.read_session(db, id, owner)
            leaves = rows.read_leaves(db, "session = ?", (id,))
            leaves, replies = _with_replies(db, session, leaves)
        own = {name: getattr(session, name) for name in CARRIED}
        return SessionInfo(leaves=tuple(leaves), replies=replies, **own)

    def adopt(
        self, info: SessionInfo, at: float, name: str | None = None, owner: str | None = None
    ) -> str:
        """Insert a session from a snapshot, used last `at` that time, and return its id.

        It loses its label if another session of its namespace and owner has the same one. The id is
        that of the label, as the requests of the session are logged; without one its own, or for an
        `owner` a new one, because its own could be that of another owner's session. It is a new one
        too if that is malformed or in use. Replies that the owner already has are not inserted
        again.
        """
        with self._database.write() as db:
            own = {field: getattr(info, field) for field in CARRIED}
            made = Session(pinned=False, owner=owner, **own)
            made = replace(made, last_used_at=at, name=clean_name(name or info.name or "") or None)
            taken = "SELECT 1 FROM sessions WHERE namespace = ? AND label = ? AND owner IS ?"
            if db.execute(taken, (made.namespace, made.label, owner)).fetchone():
                made = replace(made, label=None)
            if made.label is not None:
                made = replace(made, id=id_of(made.namespace, made.label, owner))
            elif owner is not None:
                made = replace(made, id=new_id())
            held = db.execute("SELECT 1 FROM sessions WHERE id = ?", (made.id,)).fetchone()
            if held or not ID.fullmatch(made.id):
                made = replace(made, id=new_id())
            rows.insert_session(db, made)
            for leaf in info.leaves:
                rows.insert_leaf(db, made.namespace, replace(leaf, session=made.id))
            new = {reply.key: reply for reply in info.replies}
            known = reply_rows.find_replies(db, made.namespace, owner, new.keys())
            for key, reply in new.items():
                if key not in known:
                    reply_rows.insert_reply(db, made.id, made.namespace, reply)
        return made.id


def _with_replies(
    db: sqlite3.Connection, session: Session, leaves: list[Leaf]
) -> tuple[list[Leaf], tuple[ReplyRow, ...]]:
    """Return a session's leaves with `replies` set to the keys of their replies, and these replies.

    A reply that was generated in the session and is listed by none of its leaves, as without the
    rules for replay, is in a leaf whose token ids contain its own in one piece.
    """
    own = {reply.key: reply for reply in reply_rows.read_own(db, session.id)}
    listed = {key for leaf in leaves for key in leaf.replies}
    found = reply_rows.find_replies(db, session.namespace, session.owner, listed)
    held: list[Leaf] = []
    for leaf in leaves:
        keys = [key for key in leaf.replies if key in found]
        keys += [k for k, one in own.items() if k not in listed and reply_rows.holds(leaf.ids, one)]
        held.append(replace(leaf, replies=tuple(dict.fromkeys(keys))))
    found |= {key: own[key] for leaf in held for key in leaf.replies if key not in found}
    return held, tuple(found.values())


def _held(db: sqlite3.Connection, session: Session, leaf: Leaf) -> tuple[bytes, ...]:
    listed = leaf.replies
    found = reply_rows.find_replies(db, session.namespace, session.owner, set(listed))
    return tuple(k for k in listed if k in found and reply_rows.holds(leaf.ids, found[k]))
