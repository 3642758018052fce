"""Small objects that servers exchange: generated replies, and records of sessions.

An object of replies holds those to one prompt, so that other servers can replay them. It is named
after a digest of the messages before the reply, in their canonical form and without the content of
earlier replies. So all replies of a conversation can be looked up at once, from the messages as a
client sends them. Whether a reply belongs to a prompt is checked when it is replayed.

With the record of a session a conversation is the same session on every server. It is named after a
digest of the conversation key, which identifies the conversation in the table of sessions too; see
`store.leaves.conversation_key_tokens`. It is read while the conversation's first request on a
server runs, and no request waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
from xxhash import xxh3_64_digest

from mlxcache.errors import RemoteUnavailable
from mlxcache.lru import LRU
from mlxcache.remote.exchange import Exchange
from mlxcache.remote.upload import Uploader
from mlxcache.store.reply_rows import KEY_BYTES, ReplyRow
from mlxcache.store.session_rows import Origin, Session
from mlxcache.store.sessions import ID
from mlxcache.store.snapshot_format import Name
from mlxcache.typed import decode
from mlxcache.types import ids_of_bytes

log = logging.getLogger("mlxcache.engine")

VERSION = 1

MOST_REPLIES = 16
"""Most replies to one prompt that an object holds."""

MOST_REPLY_BYTES = 4 << 20

MOST_WANTED = 128
"""Most replies that are looked up for one prompt: the newest unknown ones."""

TRIES = 3
"""Number of times that a reply is looked up, if it is not there."""

MOST_TRIED = 1 << 14
"""Most objects whose lookups are counted, to look for each at most `TRIES` times."""

_CHECK_BYTES = 8
_Digest = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    digest: _Digest
    length: _Count
    tail: Annotated[str, msgspec.Meta(max_length=64)]
    history: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]
    ids: bytes
    calls: bool
    thinking_open: bool
    generic_tools: bool
    stopped: str | None


class _Object(msgspec.Struct, frozen=True, array_like=True):
    version: int
    replies: Annotated[list[_Reply], msgspec.Meta(max_length=MOST_REPLIES)]


_DECODER = msgspec.msgpack.Decoder(_Object)


class Damaged(ValueError):
    """Error raised if an object of replies has wrong content. The text says what is wrong."""


def encode(rows: Sequence[ReplyRow]) -> bytes:
    """Return the content of an object with the newest of `rows`: a checksum, then msgpack."""
    replies = [
        _Reply(
            row.digest,
            row.length,
            row.tail,
            row.history,
            row.ids.tobytes(),
            row.calls,
            row.thinking_open,
            row.generic_tools,
            row.stopped,
        )
        for row in rows[-MOST_REPLIES:]
    ]
    body = msgspec.msgpack.encode(_Object(VERSION, replies))
    return xxh3_64_digest(body) + body


def decode_replies(data: bytes, vocab_size: int) -> list[ReplyRow]:
    """Return the replies in an object, oldest first; none if its format has another version.

    Raises Damaged if the content is wrong.
    """
    body = data[_CHECK_BYTES:]
    if xxh3_64_digest(body) != data[:_CHECK_BYTES]:
        raise Damaged("its checksum is wrong")
    try:
        found = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Damaged(str(error)) from error
    if found.version != VERSION:
        return []
    rows = []
    for one in found.replies:
        if not one.ids or len(one.ids) % 4:
            raise Damaged("a reply has no token ids")
        ids = ids_of_bytes(one.ids)
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise Damaged("a reply has token ids that the model does not have")
        flags = (one.calls, one.thinking_open, one.generic_tools)
        rows.append(
            ReplyRow(one.digest, one.length, one.tail, one.history, ids, *flags, one.stopped)
        )
    return rows


class SharedReplies:
    """Uploads the replies of one namespace, and fetches those of other servers. Thread-safe."""

    def __init__(self, exchange: Exchange, uploader: Uploader, vocab_size: int):
        self._exchange, self._uploader = exchange, uploader
        self._vocab_size = vocab_size
        self._tried: LRU[str, int] = LRU(MOST_TRIED)

    def _name(self, owner: str | None, asked: bytes) -> str:
        return self._exchange.record_name("reply", owner, asked)

    def offer(self, owner: str | None, asked: bytes, row: ReplyRow) -> None:
        """Queue a reply to be uploaded. Does not block.

        `asked`: digest of the messages before the reply; see `Found.asked` in
        `prompt.canonical.canonicaliser`.
        """
        name = self._name(owner, asked)
        self._tried.put(name, TRIES)
        self._uploader.add_record(f"{name} {row.key.hex()}", lambda: self._put(name, row))

    def _put(self, name: str, row: ReplyRow) -> None:
        held = self._decoded(name, self._exchange.objects.get(name, most=MOST_REPLY_BYTES))
        if any(one.key == row.key for one in held):
            return
        data = encode([*held, row])
        if len(data) > MOST_REPLY_BYTES:
            data = encode([row])
        if len(data) <= MOST_REPLY_BYTES:
            self._exchange.put(name, data)

    def fetch(self, owner: str | None, asked: Sequence[bytes], seconds: float) -> list[ReplyRow]:
        """Return the replies of a conversation that the remote has, for replay.

        `asked`: for each reply to look up, oldest first, the digest of the messages before it. A
        digest is not looked up again once a reply with it was fetched or offered, or after `TRIES`
        lookups. Blocks for at most `seconds`; returns an empty list if the remote has not answered
        by then or cannot be read.
        """
        names = [self._name(owner, digest) for digest in asked]
        names = [name for name in names if (self._tried.get(name) or 0) < TRIES][-MOST_WANTED:]
        objects = self._exchange.objects
        if not names or seconds <= 0 or not objects.available:
            return []
        try:
            found = objects.get_many(names, seconds, most=MOST_REPLY_BYTES)
        except RemoteUnavailable as error:
            log.debug(
                "model %s: %d earlier replies of a prompt could not be read from the remote: %s",
                *(self._exchange.label, len(names), error),
            )
            return []
        rows: list[ReplyRow] = []
        for name, data in zip(names, found, strict=True):
            held = self._decoded(name, data)
            self._tried.put(name, TRIES if held else (self._tried.get(name) or 0) + 1)
            rows += held
        self._exchange.counts.add(fetched_replies=len(rows))
        return rows

    def _decoded(self, name: str, data: bytes | None) -> list[ReplyRow]:
        if data is None:
            return []
        try:
            return decode_replies(data, self._vocab_size)
        except Damaged as error:
            self._exchange.note_corrupt(name, error)
            return []


MOST_RECORD_BYTES = 1 << 17

MOST_KNOWN = 4096
"""Most conversations that are remembered."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `Session` that servers exchange. `version`: that of the record's format."""

    version: int = VERSION
    id: str
    label: Name | None
    name: Name | None
    title: Name | None
    client: Name | None
    created_at: Annotated[float, msgspec.Meta(ge=0)]


class SharedSessions:
    """Exchange of session records through the remote. Thread-safe; does not block.

    `submit(action)` runs an action on a thread that may block. In all methods, `key` is the digest
    of the conversation key; if the server has several API keys, of its ids as changed by
    `mlxcache.owner.own_ids`.
    """

    def __init__(
        self,
        exchange: Exchange,
        uploader: Uploader,
        submit: Callable[[Callable[[], None]], object],
    ):
        self._exchange, self._uploader = exchange, uploader
        self._submit = submit
        self._uploaded: LRU[str, SessionRecord] = LRU(MOST_KNOWN)
        self._found: LRU[str, tuple[SessionRecord | None]] = LRU(MOST_KNOWN)

    def _name(self, owner: str | None, key: bytes) -> str:
        return self._exchange.record_name("session", owner, key)

    def look_up(self, owner: str | None, key: bytes) -> None:
        """Begin to read the record of a conversation, for `find`, unless that was done before."""
        name = self._name(owner, key)
        if self._found.get(name) is not None or not self._exchange.objects.available:
            return
        self._found.put(name, (None,))
        with suppress(RuntimeError):  # the server is stopping
            self._submit(lambda: self._read(name))

    def _read(self, name: str) -> None:
        try:
            data = self._exchange.objects.get(name, most=MOST_RECORD_BYTES)
        except RemoteUnavailable as error:
            log.debug(
                "model %s: session record could not be read from the remote: %s: %s",
                *(self._exchange.label, name, error),
            )
            self._found.pop(name)
            return
        if data is None:
            return
        try:
            found = decode(SessionRecord, data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self._exchange.note_corrupt(name, error)
            return
        if found.version == VERSION and ID.fullmatch(found.id):
            self._found.put(name, (found,))

    def find(self, owner: str | None, key: bytes) -> Origin | None:
        """Return the session to which a conversation belongs, by its record in the remote."""
        record = (self._found.get(self._name(owner, key)) or (None,))[0]
        return None if record is None else Origin(record.id, record.name, record.created_at)

    def share(self, session: Session, key: bytes) -> None:
        """Queue the record of a session to be uploaded, if it changed since it was last queued."""
        record = SessionRecord(
            id=session.id,
            label=session.label,
            name=session.name,
            title=session.title,
            client=session.client,
            created_at=session.created_at,
        )
        name = self._name(session.owner, key)
        if self._uploaded.get(name) == record:
            return
        self._uploaded.put(name, record)
        self._found.put(name, (record,))
        data = msgspec.json.encode(record)
        self._uploader.add_record(name, lambda: self._exchange.put(name, data))
