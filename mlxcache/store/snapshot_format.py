"""Format of snapshots: description and replies in the header, limits, and checks before use.

Every size is checked before memory is allocated for it. See docs/disk-format.md.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from mlxcache import typed
from mlxcache.errors import SnapshotRefused
from mlxcache.names import MAX_NAME
from mlxcache.safetensors import Header, Malformed, Place, read_foreign_header
from mlxcache.store.digests import BLOCK
from mlxcache.store.kv_files import open_file
from mlxcache.store.leaves import Kind, Leaf
from mlxcache.store.reply_rows import KEY_BYTES, MOST_KEYS, ReplyRow
from mlxcache.types import Tokens, ids_of_bytes, join_ids

FORMAT, VERSION = "mlxcache-snapshot", 1

TOKENS, CHECKSUMS = "tokens", "checksums"
"""Names of two tensors: the token ids of all leaves, and the checksums.

The checksums are xxh3-64 of each block, of each checkpoint, and of the rest.
"""

MOST_LEAVES = 256
MOST_TOKENS = 1 << 24

MOST_TEXT = 100_000
MOST_PATH = 4096
MOST_CHECKPOINTS = 4096
MOST_STATE_TENSORS = 1 << 14
MOST_STATE_BYTES = 1 << 30

Spec = Mapping[str, tuple[str, tuple[int, ...]]]

Progress = Callable[[int, int], None]


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


@dataclass(frozen=True, slots=True, eq=False)
class SessionInfo:
    """A session as a snapshot contains it, the main leaf first.

    `model`: the model's name, for display only; `namespace` identifies the model. `replies`: those
    that its leaves contain, oldest first. For the other fields see `session_rows.Session`.
    """

    id: str
    namespace: str
    model: str
    leaves: tuple[Leaf, ...]
    label: str | None = None
    name: str | None = None
    title: str | None = None
    client: str | None = None
    turns: int = 0
    created_at: float = 0.0
    last_used_at: float = 0.0
    replies: tuple[ReplyRow, ...] = ()


CARRIED = tuple(one.name for one in fields(SessionInfo) if one.name not in ("leaves", "replies"))


def block_seed(leaf: int, block: int) -> int:
    """Return the checksum seed of a leaf's block; different, so that none can be swapped."""
    return leaf << 32 | block


def state_name(index: int, name: str) -> str:
    return f"checkpoint.{index}.{name}"


class LeafEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf in the description of a snapshot: the tokens that it does not share with its parent.

    `parent`: index of an earlier leaf with the same first `start` tokens; None, with `start` 0, if
    there is none. `start` is a multiple of 64. The snapshot contains the ids of the leaf's own
    tokens, [start, start + tokens), and the KV of the first `rows` of them; an importer computes
    the rest. For the other fields see `Leaf`.
    """

    parent: Count | None
    start: Count
    tokens: Count
    rows: Count
    kind: Kind
    prompt_tokens: Count
    key_tokens: Count = msgspec.field(name="anchor")
    turns: Count
    last_used_at: Time


class Checkpoint(msgspec.Struct, frozen=True):
    leaf: Count
    position: Count


class Description(msgspec.Struct, frozen=True, kw_only=True):
    id: Name
    namespace: Name
    model: Annotated[str, msgspec.Meta(max_length=MOST_PATH)]
    label: Name | None
    name: Name | None
    title: Name | None
    client: Name | None
    turns: Count
    created_at: Time
    last_used_at: Time
    leaves: Annotated[tuple[LeafEntry, ...], msgspec.Meta(min_length=1, max_length=MOST_LEAVES)]
    checkpoints: Annotated[tuple[Checkpoint, ...], msgspec.Meta(max_length=MOST_CHECKPOINTS)]

    @classmethod
    def decode(cls, text: str) -> Description:
        try:
            found = typed.decode(cls, text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise SnapshotRefused(f"The snapshot's description is damaged: {error}.") from error
        lengths: list[int] = []
        for index, leaf in enumerate(found.leaves):
            lengths.append(_checked_length(index, leaf, lengths))
        if sum(lengths) > MOST_TOKENS:
            raise SnapshotRefused(f"The snapshot has more than {MOST_TOKENS} tokens.")
        for checkpoint in found.checkpoints:
            if checkpoint.leaf >= len(lengths) or checkpoint.position > lengths[checkpoint.leaf]:
                raise SnapshotRefused("A checkpoint of the snapshot lies outside its leaf.")
        return found

    def session(self, ids: Sequence[Tokens]) -> SessionInfo:
        leaves = tuple(
            Leaf(own, x.kind, x.prompt_tokens, x.key_tokens, x.turns, x.last_used_at)
            for own, x in zip(ids, self.leaves, strict=True)
        )
        return SessionInfo(leaves=leaves, **{name: getattr(self, name) for name in CARRIED})


def _checked_length(index: int, leaf: LeafEntry, lengths: list[int]) -> int:
    """Return the number of tokens of a leaf. `lengths`: those of the leaves before it."""
    length = leaf.start + leaf.tokens
    shared = 0 if leaf.parent is None else lengths[leaf.parent] if leaf.parent < index else -1
    if leaf.start > shared or leaf.start % 64 or leaf.rows > leaf.tokens or length > MOST_TOKENS:
        raise SnapshotRefused(f"Leaf {index} of the snapshot is inconsistent.")
    if leaf.prompt_tokens > length or leaf.key_tokens > length or not leaf.tokens:
        raise SnapshotRefused(f"Leaf {index} of the snapshot is inconsistent.")
    return length


_MOST_ROW = 16 << 20  # bytes of one token's KV
_KV = re.compile(r"kv\.(0|[1-9][0-9]{0,4})\.[0-9]")
_HEADS = re.compile(r"heads\.[0-9a-f]{8}\.[0-9]")
_STATE = re.compile(r"checkpoint\.(0|[1-9][0-9]{0,4})\.")


def is_optional(name: str) -> bool:
    """Return whether `name` is that of KV of a model's heads, which a file need not have."""
    return _HEADS.fullmatch(name) is not None


def is_kv(name: str) -> bool:
    return is_optional(name) or _KV.fullmatch(name) is not None


def detect_format(path: Path) -> Literal["mlxcache", "mlx-lm"]:
    """Detect the format of a file by its header. Raises SnapshotRefused for any other."""
    try:
        with open_file(path, links=True) as fd:
            metadata = read_foreign_header(fd, own=False).metadata
    except (Malformed, OSError) as error:
        raise SnapshotRefused(f"This is not a complete snapshot: {error}.") from error
    if metadata.get("format") == FORMAT:
        return "mlxcache"
    if "1.0" in metadata:  # the class of the first layer's cache
        return "mlx-lm"
    raise SnapshotRefused(
        "This is neither a snapshot nor a prompt cache of mlx-lm: choose a file that mlxcache or "
        "mlx-lm wrote."
    )


def read_snapshot_header(fd: int) -> Header:
    try:
        return read_foreign_header(fd, own=True)
    except Malformed as error:
        raise SnapshotRefused(f"This is not a complete snapshot: {error}.") from error


def read_description(header: Header) -> Description:
    if header.metadata.get("format") != FORMAT:
        raise SnapshotRefused("This is not a snapshot of mlxcache.")
    version = header.metadata.get("version")
    if version != str(VERSION):
        raise SnapshotRefused(
            f"The snapshot has version {version} of the format, and this mlxcache reads {VERSION}: "
            "update mlxcache."
        )
    return Description.decode(header.metadata.get("description", ""))


def wrong_model(model: str, namespace: str, here: Sequence[str]) -> SnapshotRefused:
    ours = f"the one here is {here[0]}" if len(here) == 1 else f"those here are {', '.join(here)}"
    return SnapshotRefused(
        f"The snapshot was made with the model {model} ({namespace[:8]}), and {ours}. "
        "The digests stand for weights, configuration, adapter, "
        "KV's dtype and mlx-lm's version: KV can be used only if all of these are equal.",
        code="wrong_model",
    )


def check_tensors(
    header: Header, description: Description
) -> tuple[tuple[Place, ...], tuple[tuple[Place, ...], ...]]:
    places = {place.name: place for place in header.places}
    rows = sum(leaf.rows for leaf in description.leaves)
    _check(places.pop(TOKENS, None), "I32", sum(leaf.tokens for leaf in description.leaves))
    blocks = sum(-(-leaf.rows // BLOCK) for leaf in description.leaves)
    _check(places.pop(CHECKSUMS, None), "U64", blocks + len(description.checkpoints) + 1)
    states: list[list[Place]] = [[] for _ in description.checkpoints]
    kv = []
    for name, place in places.items():
        state = _STATE.match(name)
        if state is not None and int(state[1]) < len(states):
            states[int(state[1])].append(place)
        elif is_kv(name) and len(place.shape) > 1 and place.shape[0] == rows > 0:
            kv.append(place)
        else:
            raise SnapshotRefused(
                f"The snapshot holds a tensor {name[:40]!r} that is not part of the format."
            )
    if not all(0 < sum(p.nbytes for p in own) <= MOST_STATE_BYTES for own in states):
        raise SnapshotRefused("A checkpoint of the snapshot is empty or too large.")
    if bool(kv) != bool(rows) or sum(p.nbytes // rows for p in kv) > _MOST_ROW:
        raise SnapshotRefused("The snapshot's KV contradicts its description.")
    return tuple(kv), tuple(map(tuple, states))


def _check(place: Place | None, dtype: str, length: int) -> None:
    if place is None or place.dtype != dtype or place.shape != (length,):
        raise SnapshotRefused("The snapshot's tokens or checksums contradict its description.")


def check_spec(kv: tuple[Place, ...], spec: Spec | None) -> None:
    if spec is None or not kv:
        return
    found = {place.name: (place.dtype, place.shape[1:]) for place in kv}
    if {name: kind for name, kind in found.items() if not is_optional(name)} != dict(spec):
        raise SnapshotRefused("The snapshot's KV does not have the shapes that this model caches.")


def read_leaf_ids(
    raw: memoryview, description: Description, vocab_size: int | None
) -> list[Tokens]:
    """Return the token ids of each leaf, from token 0.

    `raw`: content of the tensor `TOKENS`. Raises SnapshotRefused for ids that the model does not
    have. Negative ids are allowed, because they stand for images and are never fed to a model.
    """
    own = ids_of_bytes(raw)
    if vocab_size and own.max(initial=0) >= vocab_size:
        raise SnapshotRefused("The snapshot holds token ids that the model does not have.")
    found: list[Tokens] = []
    at = 0
    for leaf in description.leaves:
        head = found[leaf.parent][: leaf.start] if leaf.parent is not None else own[:0]
        found.append(join_ids(head, own[at : at + leaf.tokens]))
        at += leaf.tokens
    return found


REPLIES, REPLY_IDS = "replies", "reply_ids"
"""Keys of the header's entries with the replies.

`replies` is JSON that describes each reply. `reply_ids` has the token ids of all, one after
another, compressed with deflate and encoded in base64.
"""

_REPLIES_VERSION = 1

MOST_REPLY_TOKENS = 1 << 19

_MOST_TAIL = 64
_Digest = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    digest: _Digest
    length: Count
    tail: Annotated[str, msgspec.Meta(max_length=_MOST_TAIL)]
    history: _Digest | None
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLY_TOKENS)]
    calls: bool
    thinking_open: bool
    generic_tools: bool
    stopped: Text | None


class _Replies(msgspec.Struct, frozen=True, kw_only=True):
    """All replies of a snapshot, oldest first.

    `leaves`: for each leaf of the snapshot, the indices of the replies that it contains.
    """

    version: int
    replies: Annotated[tuple[_Reply, ...], msgspec.Meta(max_length=MOST_KEYS)]
    leaves: Annotated[tuple[tuple[Count, ...], ...], msgspec.Meta(max_length=MOST_LEAVES)]


class _Version(msgspec.Struct, frozen=True):
    version: int


def describe_replies(replies: Sequence[ReplyRow], leaves: Sequence[Leaf]) -> dict[str, str]:
    kept = _newest_replies(replies)
    if not kept:
        return {}
    number = {reply.key: n for n, reply in enumerate(kept)}
    held = (leaf.replies for leaf in leaves)
    described = _Replies(
        version=_REPLIES_VERSION,
        replies=tuple(map(_describe_reply, kept)),
        leaves=tuple(tuple(number[key] for key in keys if key in number) for keys in held),
    )
    ids = join_ids(*(reply.ids for reply in kept)).tobytes()
    packed = base64.b64encode(zlib.compress(ids, 6)).decode()
    return {REPLIES: msgspec.json.encode(described).decode(), REPLY_IDS: packed}


def _newest_replies(replies: Sequence[ReplyRow]) -> list[ReplyRow]:
    kept: list[ReplyRow] = []
    tokens = 0
    readable = [reply for reply in replies if len(reply.stopped or "") <= MOST_TEXT]
    for reply in reversed(readable[-MOST_KEYS:]):
        tokens += len(reply.ids)
        if tokens > MOST_REPLY_TOKENS:
            break
        kept.append(reply)
    return kept[::-1]


def _describe_reply(reply: ReplyRow) -> _Reply:
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

    Those of a later version of the format are left out. Raises SnapshotRefused if the replies are
    damaged, contradict the leaves of `session`, or have token ids that the model does not have.
    """
    if REPLIES not in metadata:
        return session
    try:
        if typed.decode(_Version, metadata[REPLIES]).version > _REPLIES_VERSION:
            return session
        found = typed.decode(_Replies, metadata[REPLIES])
        ids = _read_reply_ids(metadata.get(REPLY_IDS, ""), sum(one.tokens for one in found.replies))
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
        replies.append(_reply_row(one, ids[at : at + one.tokens]))
        at += one.tokens
    keys = [reply.key for reply in replies]
    leaves = tuple(
        replace(leaf, replies=tuple(keys[index] for index in held))
        for leaf, held in zip(session.leaves, found.leaves, strict=True)
    )
    return replace(session, leaves=leaves, replies=tuple(replies))


def _read_reply_ids(packed: str, tokens: int) -> Tokens:
    if tokens > MOST_REPLY_TOKENS:
        raise ValueError(f"they have more than {MOST_REPLY_TOKENS} tokens")
    inflate = zlib.decompressobj()
    raw = inflate.decompress(base64.b64decode(packed, validate=True), 4 * tokens + 1)
    if len(raw) != 4 * tokens or not inflate.eof or inflate.unused_data:
        raise ValueError("their token ids are not those described")
    return ids_of_bytes(raw)


def _reply_row(one: _Reply, ids: Tokens) -> ReplyRow:
    flags = (one.calls, one.thinking_open, one.generic_tools)
    return ReplyRow(one.digest, one.length, one.tail, one.history or b"", ids, *flags, one.stopped)
