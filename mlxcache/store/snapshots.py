"""Snapshots: the export of a session from a store into one streamed file, and the import of one.

An import checks everything in the file. Sizes are checked against the file before memory is
allocated, only the description and the token ids are held in RAM, and the KV is read in pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_64

import mlxcache
from mlxcache.common_prefix import common_length
from mlxcache.errors import Corrupt, DiskFull, Gone, SnapshotRefused, StoreError
from mlxcache.owner import own_ids, plain_ids
from mlxcache.safetensors import (
    ITEM_BYTES,
    Header,
    Malformed,
    Place,
    Tensor,
    compose,
    is_foreign_size,
    read_foreign_header,
    read_header,
)
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Found, RunPart, Saved
from mlxcache.store.kv_files import is_finite, is_place_finite, open_file, update_blocks
from mlxcache.store.leaves import Leaf
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
    LeafEntry,
    Progress,
    SessionInfo,
    Spec,
    block_seed,
    check_spec,
    check_tensors,
    describe_replies,
    is_optional,
    read_description,
    read_leaf_ids,
    read_snapshot_header,
    state_name,
    with_replies,
    wrong_model,
)
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.store.store import Store

CHUNK_BYTES = 2 << 20
MOST_HELD = 128
"""Files that an export keeps open, so that it has their KV although they are evicted meanwhile."""

RowKind = tuple[str, str, tuple[int, ...]]


class SnapshotKV:
    """Reads KV from `store` to export a snapshot, or writes the KV of a snapshot into `store`.

    A subclass converts it from and for the store of a rank, which has only a part of each layer or
    only some layers. `namespace`: that of the model, as the snapshot states it. Use one object for
    one export or import. All methods block, and raise StoreError.
    """

    def __init__(self, store: Store, namespace: str | None = None):
        self.store = store
        self.namespace = store.namespace if namespace is None else namespace
        self._headers: dict[Path, Header] = {}
        self._held: dict[Path, FileIO] = {}

    # -- for an export -----------------------------------------------------------------------------

    def row_kinds(self, pieces: Sequence[RunPart]) -> list[RowKind]:
        """Return the tensors that all runs have, in the snapshot's order.

        Raises Corrupt if they differ in others than those of heads.
        """
        common: list[RowKind] | None = None
        for piece in pieces:
            places = self._header(piece.path).places
            kinds = [(place.name, place.dtype, place.shape[1:]) for place in places]
            common = kinds if common is None else common
            if not all(is_optional(name) for name, _, _ in set(kinds) ^ set(common)):
                raise Corrupt(f"{piece.path} holds other tensors than the rest of its session.")
            common = [kind for kind in common if kind in kinds]
        return common or []

    def rows(
        self, ids: Tokens, pieces: Sequence[RunPart], name: str, start: int, end: int
    ) -> Iterator[bytes]:
        for piece in pieces:
            first, last = max(piece.start, start), min(piece.end, end)
            if first < last:
                place = next(p for p in self._header(piece.path).places if p.name == name)
                row = place.nbytes // place.shape[0]
                begin = place.offset + (first - piece.first) * row
                yield from self._read(piece.path, begin, begin + (last - first) * row)

    def state_places(self, ids: Tokens, saved: Saved) -> Sequence[Place]:
        return self._header(saved.path).places

    def state_bytes(
        self, ids: Tokens, saved: Saved, first: int = 0, last: int | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes [first, last) of all tensors of the checkpoint `saved` in a row."""
        at = 0
        for place in self._header(saved.path).places:
            begin = max(first - at, 0)
            end = place.nbytes if last is None else min(last - at, place.nbytes)
            if begin < end:
                yield from self._read(saved.path, place.offset + begin, place.offset + end)
            at += place.nbytes

    def _header(self, path: Path) -> Header:
        if path not in self._headers:
            with _open_stored(path) as fd:
                self._headers[path] = read_header(fd)
                if len(self._held) < MOST_HELD:
                    self._held[path] = FileIO(os.dup(fd))  # closed with this object
        return self._headers[path]

    def _read(self, path: Path, begin: int, end: int) -> Iterator[bytes]:
        if (held := self._held.get(path)) is not None:
            yield from _read_file(held.fileno(), path, begin, end)
            return
        with _open_stored(path) as fd:
            yield from _read_file(fd, path, begin, end)

    # -- for an import -----------------------------------------------------------------------------

    def write_run(self, ids: Tokens, start: int, tensors: Sequence[Tensor]) -> None:
        self.store.write_run(ids, start, tensors)

    def write_checkpoint(self, ids: Tokens, tensors: Sequence[Tensor]) -> None:
        self.store.write_checkpoint(ids, tensors)


def _read_file(fd: int, path: Path, begin: int, end: int) -> Iterator[bytes]:
    while begin < end:
        part = os.pread(fd, min(CHUNK_BYTES, end - begin), begin)
        if not part:
            raise Corrupt(f"{path} is cut off.")
        begin += len(part)
        yield part


@contextmanager
def _open_stored(path: Path) -> Iterator[int]:
    try:
        with open_file(path) as fd:
            yield fd
    except FileNotFoundError as error:
        raise Gone(f"{path} was evicted.") from error
    except Malformed as error:
        raise Corrupt(f"{path}: {error}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


MOST_STATES = 64

_MOST_LOOKS = 1000


@dataclass(frozen=True, slots=True)
class _Part:
    """A leaf with what is on disk of the tokens that the leaves before it do not contain."""

    leaf: LeafEntry
    ids: Tokens
    pieces: tuple[RunPart, ...]
    states: tuple[Saved, ...]

    @property
    def end(self) -> int:
        return self.leaf.start + self.leaf.rows


def _within_limits(leaves: Sequence[Leaf]) -> list[Leaf]:
    kept: list[Leaf] = []
    tokens = 0
    for leaf in leaves:
        tokens += len(leaf.ids)
        if len(leaf.ids) and tokens <= MOST_TOKENS and len(kept) < MOST_LEAVES:
            kept.append(leaf)
    if not kept:
        raise StoreError("The session has no tokens to make a snapshot of.")
    return kept


def _find_verified(store: Store, leaves: Sequence[Leaf]) -> list[Found]:
    sound: set[RunPart | Saved] = set()
    for _ in range(_MOST_LOOKS):
        found = [store.find(leaf.ids) for leaf in leaves]
        try:
            for leaf, on_disk in zip(leaves, found, strict=True):
                for piece in on_disk.pieces:
                    if piece not in sound:
                        store.verify(piece, leaf.ids)
                        sound.add(piece)
                for saved in on_disk.checkpoints:
                    if saved not in sound:
                        store.verify_checkpoint(saved, leaf.ids)
                        sound.add(saved)
        except (Corrupt, Gone):
            continue  # the store dropped that file and finds less now
        return found
    raise StoreError(
        "The session's files are evicted faster than a snapshot can be made of them: raise --disk, "
        "or try again when the server is idle."
    )


def _part_of(info: Leaf, found: Found, before: list[_Part]) -> _Part:
    length = len(info.ids)
    shares = [common_length(info.ids, other.ids) for other in before]
    shared = max(shares, default=0)
    start = min(shared, length - 1) // BLOCK * BLOCK
    parent = shares.index(shared) if start else None
    joined = parent is None or before[parent].end >= start
    rows = max(0, found.length - start) if joined else 0
    states = [s for s in found.checkpoints if parent is None or s.position > shared]
    leaf = LeafEntry(
        parent=parent,
        start=start,
        tokens=length - start,
        rows=rows,
        kind=info.kind,
        prompt_tokens=min(info.prompt_tokens, length),
        key_tokens=min(info.key_tokens, length),
        turns=info.turns,
        last_used_at=info.last_used_at,
    )
    pieces = tuple(p for p in found.pieces if p.end > start) if rows else ()
    return _Part(leaf, info.ids, pieces, (*states[:1], *states[1:][-(MOST_STATES - 1) :]))


class SnapshotExport:
    """A snapshot of `session` with its KV on disk; iterate once for its `nbytes` bytes.

    The session's replies are included as far as the header has room. Construction reads and
    verifies the files, and iteration reads them again; both block. KV that construction finds
    damaged or evicted is left out, and the importing server computes it again; the token ids are
    always complete. Construction raises StoreError, and Unsupported (see `Store.snapshot_kv`).
    Iteration raises StoreError, for example if a file beyond the first `MOST_HELD` is evicted; the
    snapshot is then incomplete, is recognised by its length and cannot be imported.
    """

    def __init__(self, store: Store, session: SessionInfo, owner: str | None = None):
        self._owner = owner
        leaves = _within_limits(session.leaves)
        self._parts: list[_Part] = []
        for info, found in zip(leaves, _find_verified(store, leaves), strict=True):
            self._parts.append(_part_of(info, found, self._parts))
        self._from = store.snapshot_kv()
        self._states = self._exportable_states()
        self._blocks = [-(-own.leaf.rows // BLOCK) for own in self._parts]
        rows = sum(own.leaf.rows for own in self._parts)
        kinds = self._from.row_kinds([piece for own in self._parts for piece in own.pieces])
        self._kv = [_place(name, dtype, (rows, *shape)) for name, dtype, shape in kinds]
        words = msgspec.json.encode(self._describe(session)).decode()
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

    def _exportable_states(self) -> list[tuple[int, Saved, Sequence[Place]]]:
        kept, tensors = [], 0
        for leaf, own in enumerate(self._parts):
            for saved in own.states:
                places = self._from.state_places(own.ids, saved)
                tensors += len(places)
                nbytes = sum(place.nbytes for place in places)
                if nbytes <= MOST_STATE_BYTES and tensors <= MOST_STATE_TENSORS:
                    kept.append((leaf, saved, places))
        return kept

    def _describe(self, session: SessionInfo) -> Description:
        own = {name: getattr(session, name) for name in CARRIED}
        for name in ("label", "name", "title", "client"):
            if own[name] is not None:  # without what the format does not allow
                own[name] = own[name][:MOST_TEXT].encode(errors="replace").decode()
        return Description(
            **own | {"namespace": self._from.namespace},
            leaves=tuple(own.leaf for own in self._parts),
            checkpoints=tuple(Checkpoint(leaf, saved.position) for leaf, saved, _ in self._states),
        )

    def _places(self) -> list[Place]:
        tokens = sum(own.leaf.tokens for own in self._parts)
        sums = sum(self._blocks) + len(self._states) + 1
        states = (
            _place(state_name(i, place.name), place.dtype, place.shape)
            for i, (_, _, places) in enumerate(self._states)
            for place in places
        )
        checksums = _place(CHECKSUMS, "U64", (sums,))
        return [_place(TOKENS, "I32", (tokens,)), *self._kv, *states, checksums]

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for own in self._parts:
            raw = plain_ids(own.ids, self._owner)[own.leaf.start :].tobytes()
            self._words.update(raw)
            yield from (raw[at : at + CHUNK_BYTES] for at in range(0, len(raw), CHUNK_BYTES))
        blocks = [
            [xxh3_64(seed=block_seed(leaf, block)) for block in range(count)]
            for leaf, count in enumerate(self._blocks)
        ]
        for place in self._kv:
            for own, sums in zip(self._parts, blocks, strict=True):
                yield from self._kv_bytes(place, own, sums)
        states = [xxh3_64(seed=i) for i in range(len(self._states))]
        for (leaf, saved, _), state in zip(self._states, states, strict=True):
            for part in self._from.state_bytes(self._parts[leaf].ids, saved):
                state.update(part)
                yield part
        sums = [one for leaf in blocks for one in leaf]
        yield b"".join(one.digest()[::-1] for one in [*sums, *states, self._words])

    def _kv_bytes(self, place: Place, own: _Part, sums: list[xxh3_64]) -> Iterator[bytes]:
        if not own.leaf.rows:
            return
        row, at = place.nbytes // place.shape[0], 0
        for part in self._from.rows(own.ids, own.pieces, place.name, own.leaf.start, own.end):
            update_blocks(sums, BLOCK * row, at, memoryview(part))
            at += len(part)
            yield part


def _place(name: str, dtype: str, shape: tuple[int, ...]) -> Place:
    return Place(name, dtype, shape, 0, prod(shape) * ITEM_BYTES[dtype])


PIECE_BYTES = 64 << 20

CHECK_BYTES = 4 << 20


PROMPT_CACHE_MODEL = "0.model"

_Piece = tuple[Tokens, int | None, Sequence[Tensor]]
"""Token ids from 0, position of the first token of the KV (None for a checkpoint), and tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A snapshot file whose header, description and tokens were checked, but not its KV.

    `nbytes`: bytes of its KV and checkpoints. `sums`: checksums of each leaf's blocks, of the
    checkpoints, and of description and tokens.
    """

    path: Path
    session: SessionInfo
    nbytes: int
    description: Description
    kv: tuple[Place, ...]
    states: tuple[tuple[Place, ...], ...]
    sums: tuple[bytes, ...]


def read_snapshot(
    path: Path,
    namespace: str | None = None,
    *,
    model: str | None = None,
    spec: Spec | None = None,
    vocab_size: int | None = None,
) -> Snapshot:
    """Read the snapshot at `path` and check that it was made with the model of `namespace`.

    `model`: name of that model, for messages. `spec`: the tensors that it caches, and `vocab_size`:
    number of its token ids; None skips a check. Raises SnapshotRefused for another model, or for a
    file that is no snapshot or damaged, and StoreError if the file cannot be read.
    """
    with _opened(path) as fd:
        header = read_snapshot_header(fd)
        description = read_description(header)
        if namespace is not None and description.namespace != namespace:
            here = f"{model} ({namespace[:8]})" if model else namespace[:8]
            raise wrong_model(description.model, description.namespace, [here])
        kv, states = check_tensors(header, description)
        check_spec(kv, spec)
        places = {place.name: place for place in header.places}
        raw = _read(fd, places[CHECKSUMS])
        sums = tuple(bytes(raw[at : at + 8])[::-1] for at in range(0, len(raw), 8))
        raw = _read(fd, places[TOKENS])
    words = xxh3_64(header.metadata["description"].encode())
    words.update(raw)
    if words.digest() != sums[-1]:
        raise SnapshotRefused(
            "The snapshot is damaged: the checksum of its tokens is wrong. Export it again."
        )
    session = description.session(read_leaf_ids(raw, description, vocab_size))
    session = with_replies(session, header.metadata, vocab_size)
    nbytes = sum(place.nbytes for part in (kv, *states) for place in part)
    return Snapshot(path, session, nbytes, description, kv, states, sums)


def read_origin(path: Path) -> tuple[str | None, str]:
    """Return the namespace and the model's name that a snapshot states.

    For a prompt cache of mlx-lm, the namespace is None, and the name is the path or id that was
    given to mlx-lm's tool, "" if none. For any other file, returns (None, ""). Raises StoreError if
    the file cannot be read.
    """
    with _opened(path) as fd:
        try:
            metadata = read_foreign_header(fd, own=False).metadata
            if metadata.get("format") != FORMAT:
                return None, metadata.get(PROMPT_CACHE_MODEL, "")
            description = read_description(read_snapshot_header(fd))
        except (Malformed, SnapshotRefused):
            return None, ""
    return description.namespace, description.model


def check_prompt_cache(path: Path) -> None:
    """Raise SnapshotRefused if a prompt cache of mlx-lm has NaN or infinity, or is cut off."""
    with _opened(path) as fd:
        try:
            places = read_foreign_header(fd, own=False).places
        except Malformed as error:
            raise SnapshotRefused(f"This is not a complete prompt cache: {error}.") from error
        if not all(is_place_finite(fd, place) for place in places):
            raise _not_finite("prompt cache")


def _not_finite(what: str) -> SnapshotRefused:
    return SnapshotRefused(
        f"The {what} holds NaN or infinity, and every reply that continues from it would fail: "
        "send the conversation again where it was made, and export it anew."
    )


def with_owner(snapshot: Snapshot, owner: str | None) -> Snapshot:
    leaves = (replace(leaf, ids=own_ids(leaf.ids, owner)) for leaf in snapshot.session.leaves)
    return replace(snapshot, session=replace(snapshot.session, leaves=tuple(leaves)))


def import_snapshot(
    store: Store, snapshot: Snapshot, progress: Progress | None = None
) -> SessionInfo:
    """Write the KV of a snapshot into `store`; return its session, for `Sessions.adopt`.

    The file is read twice: nothing is written before all of it was checked. `progress(done, total)`
    is called with numbers of bytes. Blocks. If a write fails, KV that was already written stays on
    disk; it is valid, and evicted like any other. Raises SnapshotRefused for a wrong checksum and
    for NaN or infinity, Unsupported if `store` has only one rank's part of the KV, and StoreError.
    """
    if store.limit is not None and snapshot.nbytes > store.limit:
        raise DiskFull(
            f"The snapshot takes {snapshot.nbytes} bytes, and the disk tier may hold {store.limit}."
        )
    done, into = 0, store.snapshot_kv()
    with _opened(snapshot.path) as fd:
        for _, _, tensors in _pieces(fd, snapshot, CHECK_BYTES):
            if not all(is_finite(tensor.dtype, tensor.bytes) for tensor in tensors):
                raise _not_finite("snapshot")
        for ids, start, tensors in _pieces(fd, snapshot, PIECE_BYTES):
            if start is None:
                into.write_checkpoint(ids, tensors)
            else:
                into.write_run(ids, start, tensors)
            done += sum(tensor.nbytes for tensor in tensors)
            if progress is not None:
                progress(done, snapshot.nbytes)
    return snapshot.session


def _pieces(fd: int, snapshot: Snapshot, nbytes: int) -> Iterator[_Piece]:
    per_token = sum(p.nbytes // p.shape[0] for p in snapshot.kv)
    step = max(BLOCK, nbytes // max(1, per_token) // BLOCK * BLOCK)
    row = block = 0
    for index, leaf in enumerate(snapshot.description.leaves):
        ids = snapshot.session.leaves[index].ids
        for at in range(0, leaf.rows, step):
            end = min(at + step, leaf.rows)
            tensors = [_rows(fd, place, row + at, row + end) for place in snapshot.kv]
            blocks = range(at // BLOCK, -(-end // BLOCK))
            found = [xxh3_64(seed=block_seed(index, number)) for number in blocks]
            for tensor in tensors:
                update_blocks(found, BLOCK * (tensor.nbytes // (end - at)), 0, tensor.data)
            sums = tuple(one.digest() for one in found)
            if sums != snapshot.sums[block : block + len(sums)]:
                raise SnapshotRefused(
                    "The snapshot is damaged: the checksum of some KV is wrong. Export it again."
                )
            block += len(sums)
            yield ids[: leaf.start + end], leaf.start + at, tensors
        row += leaf.rows
    yield from _checkpoints(fd, snapshot, snapshot.sums[block:])


def _checkpoints(fd: int, snapshot: Snapshot, sums: Sequence[bytes]) -> Iterator[_Piece]:
    for index, saved in enumerate(snapshot.description.checkpoints):
        prefix = len(state_name(index, ""))
        places = snapshot.states[index]
        tensors = [
            Tensor(place.name[prefix:], place.dtype, place.shape, _read(fd, place))
            for place in places
        ]
        state = xxh3_64(seed=index)
        for tensor in tensors:
            state.update(tensor.data)
        if state.digest() != sums[index]:
            raise SnapshotRefused(
                "The snapshot is damaged: the checksum of a checkpoint is wrong. Export it again."
            )
        yield snapshot.session.leaves[saved.leaf].ids[: saved.position], None, tensors


def _rows(fd: int, place: Place, first: int, last: int) -> Tensor:
    row = place.nbytes // place.shape[0]
    shape = (last - first, *place.shape[1:])
    part = replace(
        place, shape=shape, offset=place.offset + first * row, nbytes=(last - first) * row
    )
    return Tensor(place.name, place.dtype, shape, _read(fd, part))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file; an OSError, also one in the body of the `with` statement, becomes StoreError."""
    try:
        with open_file(path, links=True) as fd:
            yield fd
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def _read(fd: int, place: Place) -> memoryview:
    view, at = memoryview(bytearray(place.nbytes)), 0
    while at < len(view):
        count = os.preadv(fd, [view[at:]], place.offset + at)
        if not count:
            raise SnapshotRefused("The snapshot was cut off while it was read: export it again.")
        at += count
    return view
