"""Exchange of generated replies through the remote, so that other servers can replay them.

An object holds the replies to one prompt. Its name is made from a digest of the messages before the
reply, in their canonical form and without the content of earlier replies. So all replies of a
conversation can be looked up at once, from the messages as a client sends them. Whether a reply
belongs to a prompt is checked when it is replayed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Annotated

import msgspec
from xxhash import xxh3_64_digest

from mlxcache.errors import RemoteUnavailable
from mlxcache.lru import LRU
from mlxcache.remote import grid
from mlxcache.remote.figures import Counts
from mlxcache.remote.objects import Objects
from mlxcache.remote.upload import Uploader
from mlxcache.store.reply_rows import KEY_BYTES, ReplyRow
from mlxcache.types import ids_of_bytes

log = logging.getLogger("mlxcache.engine")

VERSION = 1

MOST_REPLIES = 16
"""Most replies to one prompt that an object holds."""

MOST_BYTES = 4 << 20
"""Most bytes of an object of replies."""

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
    """Return the content of an object that holds the replies `rows` to one prompt.

    `rows` are in order, the oldest first; of more than `MOST_REPLIES` (16), the newest are
    included. The content is a checksum, then a version and the rows as msgpack.
    """
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


def decode(data: bytes, vocab_size: int) -> list[ReplyRow]:
    """Return the replies in an object with the content `data`, oldest first.

    `vocab_size`: number of token ids of the model. Returns an empty list if another version of
    mlxcache wrote the object in another format. Raises Damaged if the content is wrong.
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
    """Uploads the replies of one namespace, and fetches those that other servers uploaded.

    Methods may be called on any thread. `vocab_size`: number of token ids of the model. `label`:
    that of the model, for the log.
    """

    def __init__(
        self,
        objects: Objects,
        uploader: Uploader,
        counts: Counts,
        namespace: str,
        vocab_size: int,
        *,
        label: str = "unnamed",
    ):
        self._label = label
        self._objects, self._uploader, self._counts = objects, uploader, counts
        self._namespace, self._vocab_size = namespace, vocab_size
        self._tried: LRU[str, int] = LRU(MOST_TRIED)

    def _name(self, owner: str | None, asked: bytes) -> str:
        words = b"" if owner is None else owner.encode()
        digest = hashlib.blake2b(asked + words, digest_size=KEY_BYTES, person=b"mlxcache reply")
        return f"{grid.VERSION}/{self._namespace}/reply/{digest.hexdigest()}"

    def offer(self, owner: str | None, asked: bytes, row: ReplyRow) -> None:
        """Queue the reply `row` to be uploaded. Does not block.

        `owner`: the owner of the request; None if the server has at most one API key. `asked`:
        digest of the messages before the reply; see `Found.asked` in `prompt.canonical.replies`.
        """
        name = self._name(owner, asked)
        self._tried.put(name, TRIES)
        self._uploader.add_record(f"{name} {row.key.hex()}", lambda: self._put(name, row))

    def _put(self, name: str, row: ReplyRow) -> None:
        """Add the reply `row` to the object `name`, which holds the replies to the same prompt."""
        held = self._decoded(name, self._objects.get(name, most=MOST_BYTES))
        if any(one.key == row.key for one in held):
            return
        data = encode([*held, row])
        if len(data) > MOST_BYTES:
            data = encode([row])
        if len(data) <= MOST_BYTES:
            self._objects.put(name, data)
            self._counts.add("uploaded_objects")
            self._counts.add("uploaded_bytes", len(data))

    def fetch(self, owner: str | None, asked: Sequence[bytes], seconds: float) -> list[ReplyRow]:
        """Return the replies of a conversation that the remote has, for replay.

        `owner`: as in `offer`. `asked`: for each reply to look up, oldest first, the digest of the
        messages before it. A digest is not looked up again once a reply with it was fetched or
        offered, or after `TRIES` (3) lookups. Of more than `MOST_WANTED` (128) others, the newest
        are looked up. Blocks for at most `seconds`; returns an empty list if the remote has not
        answered by then or cannot be read.
        """
        names = [self._name(owner, digest) for digest in asked]
        names = [name for name in names if (self._tried.get(name) or 0) < TRIES][-MOST_WANTED:]
        if not names or seconds <= 0 or not self._objects.available:
            return []
        try:
            found = self._objects.get_many(names, seconds, most=MOST_BYTES)
        except RemoteUnavailable as error:
            log.debug(
                "model %s: %d earlier replies of a prompt could not be read from the remote: %s",
                *(self._label, len(names), error),
            )
            return []
        rows: list[ReplyRow] = []
        for name, data in zip(names, found, strict=True):
            held = self._decoded(name, data)
            self._tried.put(name, TRIES if held else (self._tried.get(name) or 0) + 1)
            rows += held
        self._counts.add("fetched_replies", len(rows))
        return rows

    def _decoded(self, name: str, data: bytes | None) -> list[ReplyRow]:
        if data is None:
            return []
        try:
            return decode(data, self._vocab_size)
        except Damaged as error:
            self._counts.add("corrupt")
            log.warning(
                "model %s: remote object has wrong content, and is not used: %s: %s",
                *(self._label, name, error),
            )
            return []
