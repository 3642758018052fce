"""Format of snapshots: the description in the header, its limits, and checks before use.

Every size is checked before memory is allocated for it. See docs/snapshots.md.
"""

from __future__ import annotations

import re
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
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.types import NO_TOKENS, Tokens, ids_of_bytes, join_ids

FORMAT, VERSION = "mlxcache-snapshot", 1

TOKENS, CHECKSUMS = "tokens", "checksums"
"""Names of two tensors: the token ids of all leaves, and the checksums.

The checksums are xxh3-64 of each block, of each checkpoint, and of the rest.
"""

MOST_LEAVES = 256
MOST_TOKENS = 1 << 24
"""Most leaves of a snapshot, and most tokens of all its leaves together."""

MOST_TEXT = 100_000
MOST_PATH = 4096
MOST_CHECKPOINTS = 4096
MOST_STATE_TENSORS = 1 << 14
MOST_STATE_BYTES = 1 << 30
"""Most bytes of one checkpoint, which is read as a whole."""

Spec = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensors that a model caches: dtype and shape per token, by name."""

Progress = Callable[[int, int], None]
"""Callable that gets the bytes done and the total bytes."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


@dataclass(frozen=True, slots=True, eq=False)
class LeafInfo:
    """One conversation of a session as a snapshot contains it.

    The fields have the same meaning as in `leaves.Leaf`.
    """

    ids: Tokens
    kind: Literal["main", "agent"] = "main"
    prompt_tokens: int = 0
    key_tokens: int = 0
    turns: int = 0
    last_used_at: float = 0.0
    replies: tuple[bytes, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SessionInfo:
    """A session as a snapshot contains it, the main leaf first. Times are in seconds since 1970.

    `model`: the model's name, for display only; `namespace` identifies the model. `label` is given
    by clients, `name` by the user. `replies`: the replies that its leaves contain, oldest first.
    For the other fields see `session_rows.Session`.
    """

    id: str
    namespace: str
    model: str
    leaves: tuple[LeafInfo, ...]
    label: str | None = None
    name: str | None = None
    title: str | None = None
    client: str | None = None
    turns: int = 0
    created_at: float = 0.0
    last_used_at: float = 0.0
    replies: tuple[ReplyRow, ...] = ()


CARRIED = tuple(one.name for one in fields(SessionInfo) if one.name not in ("leaves", "replies"))
"""Fields that `Session`, `SessionInfo` and `Description` have in common."""


def block_seed(leaf: int, block: int) -> int:
    """Return the checksum seed of a block, different for each, so that blocks cannot be swapped.

    `leaf`: index of the leaf. `block`: index of the block among those of the leaf's exported KV.
    """
    return leaf << 32 | block


def state_name(index: int, name: str) -> str:
    """Return the name that a tensor of a checkpoint has in the snapshot file.

    `index`: index of the checkpoint in `Description.checkpoints`. `name`: the tensor's name in the
    store's file of that checkpoint.
    """
    return f"checkpoint.{index}.{name}"


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf in the description of a snapshot: the tokens that it does not share with its parent.

    `parent`: index of an earlier leaf with the same first `start` tokens; None, with `start` 0, if
    there is none. `start` is a multiple of 64. The snapshot contains the ids of the leaf's own
    tokens, [start, start + tokens), and the KV of the first `rows` of them; an importer computes
    the rest. The other fields have the same meaning as in `LeafInfo`. `key_tokens` is called
    `anchor` in the file.
    """

    parent: Count | None
    start: Count
    tokens: Count
    rows: Count
    kind: Literal["main", "agent"]
    prompt_tokens: Count
    key_tokens: Count = msgspec.field(name="anchor")
    turns: Count
    last_used_at: Time


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint in the description of a snapshot.

    It is the state after the first `position` tokens of the leaf with index `leaf`, those that it
    shares with its parent included.
    """

    leaf: Count
    position: Count


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a snapshot, as JSON in its header: the session, its leaves and checkpoints.

    The token ids, the KV and the states of the checkpoints are tensors of the file, and replies are
    other entries of its header. For the fields of the session see `SessionInfo`.
    """

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
    leaves: Annotated[tuple[Leaf, ...], msgspec.Meta(min_length=1, max_length=MOST_LEAVES)]
    checkpoints: Annotated[tuple[Checkpoint, ...], msgspec.Meta(max_length=MOST_CHECKPOINTS)]

    @classmethod
    def decode(cls, text: str) -> Description:
        """Decode a description from JSON and check it for consistency. Raises SnapshotRefused."""
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

    def encode(self) -> str:
        """Encode the description as JSON."""
        return msgspec.json.encode(self).decode()

    def session(self) -> SessionInfo:
        """Return the described session; the `ids` of its leaves are empty, see `with_tokens`."""
        leaves = tuple(
            LeafInfo(NO_TOKENS, x.kind, x.prompt_tokens, x.key_tokens, x.turns, x.last_used_at)
            for x in self.leaves
        )
        return SessionInfo(leaves=leaves, **{name: getattr(self, name) for name in CARRIED})


def _checked_length(index: int, leaf: Leaf, lengths: list[int]) -> int:
    """Return the number of tokens of a leaf, those shared with its parent included.

    `index`: index of the leaf. `lengths`: numbers of tokens of the leaves before it. Raises
    SnapshotRefused if the leaf's fields contradict each other or these lengths, if it has no tokens
    of its own, or if it has more than `MOST_TOKENS` tokens.
    """
    length = leaf.start + leaf.tokens
    shared = 0 if leaf.parent is None else lengths[leaf.parent] if leaf.parent < index else -1
    if leaf.start > shared or leaf.start % 64 or leaf.rows > leaf.tokens or length > MOST_TOKENS:
        raise SnapshotRefused(f"Leaf {index} of the snapshot is inconsistent.")
    if leaf.prompt_tokens > length or leaf.key_tokens > length or not leaf.tokens:
        raise SnapshotRefused(f"Leaf {index} of the snapshot is inconsistent.")
    return length


def with_tokens(session: SessionInfo, ids: list[Tokens]) -> SessionInfo:
    """Return a copy of `session` with the token ids of its leaves set to `ids`, one per leaf."""
    leaves = tuple(replace(a, ids=b) for a, b in zip(session.leaves, ids, strict=True))
    return replace(session, leaves=leaves)


_MOST_ROW = 16 << 20  # bytes of one token's KV
_KV = re.compile(r"kv\.(0|[1-9][0-9]{0,4})\.[0-9]")


def detect_format(path: Path) -> Literal["mlxcache", "mlx-lm"]:
    """Detect the format of a file by its header.

    Raises SnapshotRefused for any other format, and if the file cannot be read or is damaged.
    """
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
    """Read the header of an open file and check its checksum.

    Raises SnapshotRefused if the header is damaged or incomplete, and OSError.
    """
    try:
        return read_foreign_header(fd, own=True)
    except Malformed as error:
        raise SnapshotRefused(f"This is not a complete snapshot: {error}.") from error


def read_description(header: Header) -> Description:
    """Return the description of a snapshot from its header.

    Raises SnapshotRefused for a file of another format, for another version of the format, and for
    a damaged description.
    """
    if header.metadata.get("format") != FORMAT:
        raise SnapshotRefused("This is not a snapshot of mlxcache.")
    version = header.metadata.get("version")
    if version != str(VERSION):
        raise SnapshotRefused(
            f"The snapshot has version {version} of the format, and this mlxcache reads {VERSION}: "
            "update mlxcache."
        )
    return Description.decode(header.metadata.get("description", ""))


def check_model(description: Description, namespace: str | None, model: str | None) -> None:
    """Raise SnapshotRefused unless the snapshot was made with the model of `namespace`.

    `model`: name of that model, for the message. Nothing is checked if `namespace` is None.
    """
    if namespace is None or description.namespace == namespace:
        return
    here = f"{model} ({namespace[:8]})" if model else namespace[:8]
    raise wrong_model(description.model, description.namespace, [here])


def wrong_model(model: str, namespace: str, here: Sequence[str]) -> SnapshotRefused:
    """Return the error for a snapshot that was made with another model than those `here`.

    `model` and `namespace`: those of the snapshot. `here`: texts that name the models of this
    server, such as "name (first 8 characters of the namespace)".
    """
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
    """Check the tensors of a snapshot; return those of the KV, and those of each checkpoint.

    The file must also have one tensor of token ids and one of checksums. Raises SnapshotRefused
    for a missing or an unknown tensor, for a shape that contradicts the description, and for more
    bytes of a checkpoint, or of one token's KV, than the format allows.
    """
    places = {place.name: place for place in header.places}
    rows = sum(leaf.rows for leaf in description.leaves)
    _check(places.pop(TOKENS, None), "I32", sum(leaf.tokens for leaf in description.leaves))
    blocks = sum(-(-leaf.rows // BLOCK) for leaf in description.leaves)
    _check(places.pop(CHECKSUMS, None), "U64", blocks + len(description.checkpoints) + 1)
    states: list[list[Place]] = [[] for _ in description.checkpoints]
    kv = []
    for name, place in places.items():
        index = _state_index(name, len(states))
        if index is not None:
            states[index].append(place)
        elif _KV.fullmatch(name) and len(place.shape) > 1 and place.shape[0] == rows > 0:
            kv.append(place)
        else:
            raise SnapshotRefused(
                f"The snapshot holds a tensor {name[:40]!r} that is not part of the format."
            )
    if not all(0 < sum(p.nbytes for p in state) <= MOST_STATE_BYTES for state in states):
        raise SnapshotRefused("A checkpoint of the snapshot is empty or too large.")
    if bool(kv) != bool(rows) or sum(p.nbytes // rows for p in kv) > _MOST_ROW:
        raise SnapshotRefused("The snapshot's KV contradicts its description.")
    return tuple(kv), tuple(tuple(state) for state in states)


def _check(place: Place | None, dtype: str, length: int) -> None:
    if place is None or place.dtype != dtype or place.shape != (length,):
        raise SnapshotRefused("The snapshot's tokens or checksums contradict its description.")


def _state_index(name: str, count: int) -> int | None:
    """Return the index of the checkpoint to which the tensor `name` belongs.

    `count`: number of checkpoints. None if the tensor belongs to none of them.
    """
    _, _, rest = name.partition(".")
    digits, _, _ = rest.partition(".")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 6):
        return None
    index = int(digits)
    return index if index < count and name.startswith(state_name(index, "")) else None


def check_spec(kv: tuple[Place, ...], spec: Spec | None) -> None:
    """Raise SnapshotRefused unless the KV has the names, dtypes and shapes that the model caches.

    `spec`: dtype and shape of one token's KV, by name of a tensor. Nothing is checked if `spec` is
    None or `kv` is empty.
    """
    if spec is None or not kv:
        return
    if {place.name: (place.dtype, place.shape[1:]) for place in kv} != dict(spec):
        raise SnapshotRefused("The snapshot's KV does not have the shapes that this model caches.")


def read_leaf_ids(
    raw: memoryview, description: Description, vocab_size: int | None
) -> list[Tokens]:
    """Return the token ids of each leaf, from token 0.

    `raw`: content of the tensor `TOKENS`, little-endian int32. `vocab_size`: number of the model's
    token ids, or None if it is not known. Raises SnapshotRefused for ids that the model does not
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
