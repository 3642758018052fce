"""Export of a session from the store into one streamed file; see docs/snapshots.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

import mlxcache
from mlxcache.common_prefix import common_length
from mlxcache.errors import Corrupt, Gone, StoreError
from mlxcache.owner import plain_ids
from mlxcache.safetensors import (
    ITEM_BYTES,
    Place,
    compose,
    is_foreign_size,
)
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Found, Piece, Saved
from mlxcache.store.kv_files import update_blocks
from mlxcache.store.snapshot_format import (
    CARRIED,
    CHECKSUMS,
    FORMAT,
    MOST_LEAVES,
    MOST_STATE_BYTES,
    MOST_STATE_TENSORS,
    MOST_TEXT,
    MOST_TOKENS,
    TOKENS,
    VERSION,
    Checkpoint,
    Description,
    Leaf,
    LeafInfo,
    SessionInfo,
    block_seed,
    state_name,
)
from mlxcache.store.snapshot_kv import CHUNK_BYTES
from mlxcache.store.snapshot_replies import describe_replies
from mlxcache.store.store import Store
from mlxcache.types import Tokens

MOST_STATES = 64
"""Most checkpoints exported of one leaf: its first one and the newest."""

_MOST_LOOKS = 1000


@dataclass(frozen=True, slots=True)
class LeafPart:
    """The part of one leaf that the leaves before it in the snapshot do not contain.

    `info`: the whole leaf. `parent`: index of the leaf that shares its first `start` tokens, or
    None. `rows`: number of tokens from `start` on whose KV is exported. `pieces`, `states`: the
    runs with that KV, and the checkpoints to export.
    """

    parent: int | None
    start: int
    info: LeafInfo
    rows: int
    pieces: tuple[Piece, ...]
    states: tuple[Saved, ...]

    def tokens(self, owner: str | None) -> Tokens:
        """Return the token ids of the part, as the model is fed them.

        `owner`: owner of the session. The cache stores an owner's tokens under other ids, which are
        converted back; see `own_ids`.
        """
        return plain_ids(self.info.ids, owner)[self.start :]

    @property
    def end(self) -> int:
        """Position in the leaf after the part's exported KV."""
        return self.start + self.rows

    def describe(self) -> Leaf:
        """Return the part's entry in the snapshot's description."""
        info = self.info
        return Leaf(
            parent=self.parent,
            start=self.start,
            tokens=len(info.ids) - self.start,
            rows=self.rows,
            kind=info.kind,
            prompt_tokens=min(info.prompt_tokens, len(info.ids)),
            key_tokens=min(info.key_tokens, len(info.ids)),
            turns=info.turns,
            last_used_at=info.last_used_at,
        )


def within_limits(leaves: tuple[LeafInfo, ...]) -> list[LeafInfo]:
    """Return the leaves that a snapshot can contain, in their order.

    A leaf is left out if it has no tokens, if `MOST_LEAVES` leaves before it are included, or if it
    and all leaves before it together have more than `MOST_TOKENS` tokens. Raises StoreError if none
    is left.
    """
    kept: list[LeafInfo] = []
    tokens = 0
    for leaf in leaves:
        tokens += len(leaf.ids)
        if len(leaf.ids) and tokens <= MOST_TOKENS and len(kept) < MOST_LEAVES:
            kept.append(leaf)
    if not kept:
        raise StoreError("The session has no tokens to make a snapshot of.")
    return kept


def find_parts(store: Store, leaves: list[LeafInfo]) -> list[LeafPart]:
    """Find the files of the tokens that each leaf adds to the leaves before it, and verify them.

    Returns a part for each leaf, in order. Raises StoreError if a file cannot be read, or if files
    are evicted again and again in the meantime.
    """
    found = _all_verified(store, leaves)
    parts: list[LeafPart] = []
    for leaf, on_disk in zip(leaves, found, strict=True):
        parts.append(_part_of(leaf, on_disk, parts))
    return parts


def _all_verified(store: Store, leaves: list[LeafInfo]) -> list[Found]:
    sound: set[tuple[Path, int, int]] = set()
    for _ in range(_MOST_LOOKS):
        try:
            return [_verified(store, leaf.ids, sound) for leaf in leaves]
        except (Corrupt, Gone):
            continue  # the store dropped that file and finds less now
    raise StoreError(
        "The session's files are evicted faster than a snapshot can be made of them: raise --disk, "
        "or try again when the server is idle."
    )


def _verified(store: Store, ids: Tokens, sound: set[tuple[Path, int, int]]) -> Found:
    """Find `ids` on disk and verify the files.

    `sound`: files that were verified before and are skipped, each as its path and the token range
    [start, end) that was checked. Newly verified ones are added to it.

    Raises Corrupt or Gone at the first file that is damaged or was deleted. The store has then
    removed it from its index, so another call finds less.
    """
    found = store.find(ids)
    for piece in found.pieces:
        if (piece.path, piece.start, piece.end) not in sound:
            store.verify(piece, ids)
            sound.add((piece.path, piece.start, piece.end))
    for saved in found.checkpoints:
        if (saved.path, 0, saved.position) not in sound:
            store.verify_checkpoint(saved, ids)
            sound.add((saved.path, 0, saved.position))
    return found


def _part_of(leaf: LeafInfo, found: Found, before: list[LeafPart]) -> LeafPart:
    shares = [common_length(leaf.ids, other.info.ids) for other in before]
    shared = max(shares, default=0)
    start = min(shared, len(leaf.ids) - 1) // BLOCK * BLOCK
    parent = shares.index(shared) if start else None
    joined = parent is None or before[parent].end >= start
    rows = max(0, found.length - start) if joined else 0
    return LeafPart(
        parent,
        start,
        leaf,
        rows,
        tuple(p for p in found.pieces if p.end > start) if rows else (),
        _newest([s for s in found.checkpoints if parent is None or s.position > shared]),
    )


def _newest(states: list[Saved]) -> tuple[Saved, ...]:
    return (*states[:1], *states[1:][-(MOST_STATES - 1) :])


def _bounded(text: str | None) -> str | None:
    """Cut `text` to the length that a snapshot may contain, and replace invalid characters.

    None stays None.
    """
    if text is None:
        return None
    return text[:MOST_TEXT].encode(errors="replace").decode()


def describe_session(
    session: SessionInfo, parts: list[LeafPart], states: list[tuple[int, Saved]]
) -> Description:
    """Make the description of a session for the snapshot's header.

    `parts`: the parts of its leaves; see `find_parts`. `states`: its checkpoints, each with the
    index of its leaf.
    """
    own = {name: getattr(session, name) for name in CARRIED}
    own |= {name: _bounded(own[name]) for name in ("label", "name", "title", "client")}
    return Description(
        **own,
        leaves=tuple(own.describe() for own in parts),
        checkpoints=tuple(Checkpoint(leaf, saved.position) for leaf, saved in states),
    )


class SnapshotExport:
    """A snapshot of `session` with its KV on disk; iterate once for its `nbytes` bytes.

    The session's replies are included as far as the header has room. Construction reads and
    verifies the files, and iteration reads them again; both block. KV that construction finds
    damaged or evicted is left out, and the importing server computes it again; the token ids are
    always complete. `owner`: owner of the session. The cache stores an owner's tokens under other
    ids, which are converted back; see `own_ids`. Construction raises StoreError, and Unsupported
    (see `Store.snapshot_kv`). Iteration raises StoreError, for example if a file is evicted before
    it was read; the snapshot is then incomplete, is recognised by its length and cannot be
    imported.
    """

    def __init__(self, store: Store, session: SessionInfo, owner: str | None = None):
        self._owner = owner
        leaves = within_limits(session.leaves)
        self._parts = find_parts(store, leaves)
        self._from = store.snapshot_kv()
        self._states = _exportable(
            [
                (k, saved, self._from.state_places(own.info.ids, saved))
                for k, own in enumerate(self._parts)
                for saved in own.states
            ]
        )
        self._blocks = [-(-own.rows // BLOCK) for own in self._parts]
        self._kv = self._kv_places()
        session = replace(session, namespace=self._from.namespace)
        words = describe_session(
            session, self._parts, [state[:2] for state in self._states]
        ).encode()
        self._words = xxh3_64(words.encode())
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "mlxcache": mlxcache.__version__,
            "description": words,
        }
        places = self._places()
        self._head = compose(metadata | describe_replies(session.replies, leaves), places)
        if not is_foreign_size(self._head):
            self._head = compose(metadata, places)
        self.nbytes = len(self._head) + sum(place.nbytes for place in places)

    def _places(self) -> list[Place]:
        """Return the tensors of the file, in order; their offsets are 0."""
        count = sum(self._blocks) + len(self._states) + 1
        return [
            _place(
                TOKENS,
                "I32",
                (sum(len(own.info.ids) - own.start for own in self._parts),),
            ),
            *self._kv,
            *(
                _place(state_name(i, place.name), place.dtype, place.shape)
                for i, (_, _, places) in enumerate(self._states)
                for place in places
            ),
            _place(CHECKSUMS, "U64", (count,)),
        ]

    def _kv_places(self) -> list[Place]:
        """Return one tensor for each array of the KV, over the rows of all leaves, with offset 0.

        Raises Corrupt if the files on disk hold different arrays, and StoreError.
        """
        rows = sum(own.rows for own in self._parts)
        kinds = self._from.row_kinds([piece for own in self._parts for piece in own.pieces])
        return [_place(name, dtype, (rows, *shape)) for name, dtype, shape in kinds]

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for own in self._parts:
            raw = own.tokens(self._owner).tobytes()
            self._words.update(raw)
            yield from (raw[at : at + CHUNK_BYTES] for at in range(0, len(raw), CHUNK_BYTES))
        blocks = [
            [xxh3_64(seed=block_seed(leaf, block)) for block in range(count)]
            for leaf, count in enumerate(self._blocks)
        ]
        for index in range(len(self._kv)):
            for own, sums in zip(self._parts, blocks, strict=True):
                yield from self._kv_bytes(index, own, sums)
        states = [xxh3_64(seed=i) for i in range(len(self._states))]
        for (leaf, saved, _), state in zip(self._states, states, strict=True):
            for part in self._from.state_bytes(self._parts[leaf].info.ids, saved):
                state.update(part)
                yield part
        sums = [one for leaf in blocks for one in leaf]
        yield b"".join(one.digest()[::-1] for one in [*sums, *states, self._words])

    def _kv_bytes(self, index: int, own: LeafPart, sums: list[xxh3_64]) -> Iterator[bytes]:
        """Yield the bytes of the KV tensor with the index `index` for the rows of the part `own`.

        They are also added to `sums`, one hash for each block of these rows. Raises StoreError.
        """
        row, at = self._kv[index].nbytes // max(1, self._kv[index].shape[0]), 0
        if not own.rows:
            return
        name, ids = self._kv[index].name, own.info.ids
        for part in self._from.rows(ids, own.pieces, name, own.start, own.end):
            update_blocks(sums, BLOCK * row, at, memoryview(part))
            at += len(part)
            yield part


def _place(name: str, dtype: str, shape: tuple[int, ...]) -> Place:
    return Place(name, dtype, shape, 0, int(np.prod(shape, dtype=object)) * ITEM_BYTES[dtype])


State = tuple[int, Saved, Sequence[Place]]
"""Index of a leaf, one of its checkpoints, and the tensors of that checkpoint."""


def _exportable(states: list[State]) -> list[State]:
    """Return those of `states` that a snapshot may contain.

    Its format limits the bytes of each to `MOST_STATE_BYTES`, and the number of tensors of all of
    them to `MOST_STATE_TENSORS`.
    """
    kept, tensors = [], 0
    for state in states:
        places = state[2]
        tensors += len(places)
        nbytes = sum(place.nbytes for place in places)
        if nbytes <= MOST_STATE_BYTES and tensors <= MOST_STATE_TENSORS:
            kept.append(state)
    return kept
