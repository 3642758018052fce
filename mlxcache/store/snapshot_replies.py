"""Replies in the header of a snapshot: two metadata entries, which older readers ignore.

`replies` is JSON that describes each reply. `reply_ids` contains the token ids of all replies, one
after another, compressed with deflate and encoded in base64. See docs/snapshots.md.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import msgspec

from mlxcache import typed
from mlxcache.errors import SnapshotRefused
from mlxcache.store.reply_rows import KEY_BYTES, MOST_KEYS, ReplyRow
from mlxcache.store.snapshot_format import (
    MOST_LEAVES,
    MOST_TEXT,
    Count,
    LeafInfo,
    SessionInfo,
    Text,
)
from mlxcache.types import Tokens, ids_of_bytes, join_ids

REPLIES, REPLY_IDS = "replies", "reply_ids"
"""Keys of the two metadata entries."""

VERSION = 1

MOST_TOKENS = 1 << 19
"""Most tokens of all replies of a snapshot together."""

_MOST_TAIL = 64
_Digest = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply with `tokens` token ids; the other fields are those of `ReplyRow`."""

    digest: _Digest
    length: Count
    tail: Annotated[str, msgspec.Meta(max_length=_MOST_TAIL)]
    history: _Digest | None
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    calls: bool
    thinking_open: bool
    generic_tools: bool
    stopped: Text | None


class _Replies(msgspec.Struct, frozen=True, kw_only=True):
    """All replies of a snapshot, oldest first.

    `leaves`: for each leaf of the snapshot, the indices of the replies that it contains. `version`:
    version of the format of these entries, `VERSION` when they are written.
    """

    version: int
    replies: Annotated[tuple[_Reply, ...], msgspec.Meta(max_length=MOST_KEYS)]
    leaves: Annotated[tuple[tuple[Count, ...], ...], msgspec.Meta(max_length=MOST_LEAVES)]


class _Version(msgspec.Struct, frozen=True):
    version: int


def describe_replies(replies: Sequence[ReplyRow], leaves: Sequence[LeafInfo]) -> dict[str, str]:
    """Return the metadata entries for the newest of `replies`, as many as the format allows.

    They have the keys `REPLIES` and `REPLY_IDS`, and tell for each of `leaves` which of these
    replies it contains. Empty without replies. `replies`: oldest first.
    """
    kept = _newest(replies)
    if not kept:
        return {}
    number = {reply.key: n for n, reply in enumerate(kept)}
    held = (leaf.replies or () for leaf in leaves)
    described = _Replies(
        version=VERSION,
        replies=tuple(map(_describe, kept)),
        leaves=tuple(tuple(number[key] for key in keys if key in number) for keys in held),
    )
    ids = join_ids(*(reply.ids for reply in kept)).tobytes()
    packed = base64.b64encode(zlib.compress(ids, 6)).decode()
    return {REPLIES: msgspec.json.encode(described).decode(), REPLY_IDS: packed}


def _newest(replies: Sequence[ReplyRow]) -> list[ReplyRow]:
    kept: list[ReplyRow] = []
    tokens = 0
    readable = [reply for reply in replies if len(reply.stopped or "") <= MOST_TEXT]
    for reply in reversed(readable[-MOST_KEYS:]):
        tokens += len(reply.ids)
        if tokens > MOST_TOKENS:
            break
        kept.append(reply)
    return kept[::-1]


def _describe(reply: ReplyRow) -> _Reply:
    return _Reply(
        digest=reply.digest,
        length=reply.length,
        tail=reply.tail,
        history=reply.history or None,
        tokens=len(reply.ids),
        calls=reply.calls,
        thinking_open=reply.thinking_open,
        generic_tools=reply.generic_tools,
        stopped=reply.stopped,
    )


def with_replies(
    session: SessionInfo, metadata: Mapping[str, str], vocab_size: int | None
) -> SessionInfo:
    """Return a copy of `session` with the replies in `metadata`, that of a snapshot's header.

    `session` is returned unchanged if `metadata` has no replies, or those of a later version of the
    format. `vocab_size`: number of token ids of the model; None if it is not known. Raises
    SnapshotRefused if the replies are damaged, contradict the leaves of `session`, or have token
    ids that the model does not have.
    """
    if REPLIES not in metadata:
        return session
    try:
        if typed.decode(_Version, metadata[REPLIES]).version > VERSION:
            return session
        found = typed.decode(_Replies, metadata[REPLIES])
        ids = _read_ids(metadata.get(REPLY_IDS, ""), sum(one.tokens for one in found.replies))
    except (msgspec.MsgspecError, binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise SnapshotRefused(f"The snapshot's replies are damaged: {error}.") from error
    if ids.min(initial=0) < 0 or (vocab_size and ids.max(initial=0) >= vocab_size):
        raise SnapshotRefused("The snapshot's replies hold token ids that the model does not have.")
    if len(found.leaves) != len(session.leaves) or any(
        index >= len(found.replies) for leaf in found.leaves for index in leaf
    ):
        raise SnapshotRefused("The snapshot's replies contradict its description.")
    replies, at = [], 0
    for one in found.replies:
        replies.append(_row(one, ids[at : at + one.tokens]))
        at += one.tokens
    keys = [reply.key for reply in replies]
    leaves = tuple(
        replace(leaf, replies=tuple(keys[index] for index in held))
        for leaf, held in zip(session.leaves, found.leaves, strict=True)
    )
    return replace(session, leaves=leaves, replies=tuple(replies))


def _read_ids(packed: str, tokens: int) -> Tokens:
    """Unpack the token ids of all replies, shape (tokens,).

    `packed`: the entry `reply_ids`. Decompresses at most one byte more than `tokens` ids take.
    Raises ValueError for another number of ids or more than `MOST_TOKENS`, and zlib.error.
    """
    if tokens > MOST_TOKENS:
        raise ValueError(f"they have more than {MOST_TOKENS} tokens")
    inflate = zlib.decompressobj()
    raw = inflate.decompress(base64.b64decode(packed, validate=True), 4 * tokens + 1)
    if len(raw) != 4 * tokens or not inflate.eof or inflate.unused_data:
        raise ValueError("their token ids are not those described")
    return ids_of_bytes(raw)


def _row(one: _Reply, ids: Tokens) -> ReplyRow:
    flags = (one.calls, one.thinking_open, one.generic_tools)
    return ReplyRow(one.digest, one.length, one.tail, one.history or b"", ids, *flags, one.stopped)
