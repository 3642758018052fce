"""Import of a snapshot file into the store, with everything in the file checked.

Sizes are checked against the file before memory is allocated. Only the description and the token
ids are held in RAM. The KV is read in pieces, and each piece is checked before it is written to the
store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_64

from mlxcache.errors import DiskFull, SnapshotRefused, StoreError
from mlxcache.owner import own_ids
from mlxcache.safetensors import Malformed, Place, Tensor, read_foreign_header
from mlxcache.store.digests import BLOCK
from mlxcache.store.kv_files import is_finite, is_place_finite, open_file
from mlxcache.store.snapshot_format import (
    CHECKSUMS,
    FORMAT,
    TOKENS,
    Description,
    Progress,
    SessionInfo,
    Spec,
    block_seed,
    check_model,
    check_spec,
    check_tensors,
    read_description,
    read_leaf_ids,
    read_snapshot_header,
    state_name,
    with_tokens,
)
from mlxcache.store.snapshot_replies import with_replies
from mlxcache.store.store import Store
from mlxcache.types import Tokens

PIECE_BYTES = 64 << 20
"""Approximate bytes of KV held in RAM at a time, which become one run."""

CHECK_BYTES = 4 << 20
"""Approximate bytes of KV that are checked at a time before anything is written."""


PROMPT_CACHE_MODEL = "0.model"
"""Metadata key of the model's name in a prompt cache of mlx-lm."""

_Piece = tuple[Tokens, int | None, Sequence[Tensor]]
"""KV to write: token ids from 0, position of its first token, and tensors.

The position is None for a checkpoint.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A snapshot file whose header, description and tokens were checked.

    `import_snapshot` checks the rest. `nbytes`: bytes of its KV and checkpoints. `kv`, `states`:
    places in the file of the tensors of the KV, and of those of each checkpoint.
    """

    path: Path
    session: SessionInfo
    nbytes: int
    description: Description
    kv: tuple[Place, ...]
    states: tuple[tuple[Place, ...], ...]
    sums: tuple[bytes, ...]
    """Checksums of each leaf's blocks, of the checkpoints, and of description and tokens."""


def read_snapshot(
    path: Path,
    namespace: str | None = None,
    *,
    model: str | None = None,
    spec: Spec | None = None,
    vocab_size: int | None = None,
) -> Snapshot:
    """Read the snapshot at `path` and check that it was made with the model of `namespace`.

    The model is not checked if `namespace` is None. `model`: name of that model, for messages.
    `spec`: the tensors that it caches, and `vocab_size`: number of its token ids; None skips the
    check. Raises SnapshotRefused for another model, or for a file that is no snapshot or damaged,
    and StoreError if the file cannot be read.
    """
    with _opened(path) as fd:
        header = read_snapshot_header(fd)
        description = read_description(header)
        check_model(description, namespace, model)
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
    session = with_tokens(description.session(), read_leaf_ids(raw, description, vocab_size))
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
    """Raise SnapshotRefused if a prompt cache of mlx-lm holds NaN or infinity, or is incomplete.

    Blocks while the whole file is read, in parts. Raises StoreError if it cannot be read.
    """
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
    """Return a copy of `snapshot` with the token ids under which the cache stores `owner`'s KV.

    The cache stores the tokens of each owner under ids of their own; see `own_ids`.
    """
    session = snapshot.session
    ids = [own_ids(leaf.ids, owner) for leaf in session.leaves]
    return replace(snapshot, session=with_tokens(session, ids))


def import_snapshot(
    store: Store, snapshot: Snapshot, progress: Progress | None = None
) -> SessionInfo:
    """Write the KV of a snapshot into `store`; return its session, for `Sessions.adopt`.

    The file is read twice: nothing is written before all of it was checked. `progress(done, total)`
    is called with numbers of bytes. Blocks. If a write fails, KV that was already written stays on
    disk; it is valid, and evicted like any other. Raises SnapshotRefused for a wrong checksum and
    for NaN or infinity, Unsupported if `store` has only one rank's part of the KV (see
    `Store.snapshot_kv`), and StoreError.
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
    """Yield the KV of a snapshot in parts of about `nbytes`, then its checkpoints, each checked.

    A part is (token ids from 0 to its end, position of its first token, tensors); the position of a
    checkpoint is None. `fd`: descriptor of the file. Raises SnapshotRefused for a wrong checksum.
    """
    per_token = sum(p.nbytes // p.shape[0] for p in snapshot.kv)
    step = max(BLOCK, nbytes // max(1, per_token) // BLOCK * BLOCK)
    row = block = 0
    for index, leaf in enumerate(snapshot.description.leaves):
        ids = snapshot.session.leaves[index].ids
        for at in range(0, leaf.rows, step):
            end = min(at + step, leaf.rows)
            tensors = [_rows(fd, place, row + at, row + end) for place in snapshot.kv]
            found = _block_sums(tensors, end - at, index, at // BLOCK)
            if found != snapshot.sums[block : block + len(found)]:
                raise SnapshotRefused(
                    "The snapshot is damaged: the checksum of some KV is wrong. Export it again."
                )
            block += len(found)
            yield ids[: leaf.start + end], leaf.start + at, tensors
        row += leaf.rows
    yield from _checkpoints(fd, snapshot, snapshot.sums[block:])


def _checkpoints(fd: int, snapshot: Snapshot, sums: Sequence[bytes]) -> Iterator[_Piece]:
    for index, saved in enumerate(snapshot.description.checkpoints):
        prefix = len(state_name(index, ""))
        places = snapshot.states[index]
        tensors = [_tensor(place.name[prefix:], place, _read(fd, place)) for place in places]
        state = xxh3_64(seed=index)
        for tensor in tensors:
            state.update(tensor.data)
        if state.digest() != sums[index]:
            raise SnapshotRefused(
                "The snapshot is damaged: the checksum of a checkpoint is wrong. Export it again."
            )
        yield snapshot.session.leaves[saved.leaf].ids[: saved.position], None, tensors


def _block_sums(tensors: Sequence[Tensor], rows: int, leaf: int, first: int) -> tuple[bytes, ...]:
    sums = []
    for at in range(0, rows, BLOCK):
        state = xxh3_64(seed=block_seed(leaf, first + at // BLOCK))
        for tensor in tensors:
            size = tensor.nbytes // rows
            state.update(tensor.data[at * size : (at + BLOCK) * size])
        sums.append(state.digest())
    return tuple(sums)


def _rows(fd: int, place: Place, first: int, last: int) -> Tensor:
    row = place.nbytes // place.shape[0]
    part = Place(
        place.name,
        place.dtype,
        (last - first, *place.shape[1:]),
        place.offset + first * row,
        (last - first) * row,
    )
    return _tensor(place.name, part, _read(fd, part))


def _tensor(name: str, place: Place, data: memoryview) -> Tensor:
    return Tensor(name, place.dtype, place.shape, data)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for a `with` statement and yield its descriptor.

    An OSError, also one in the body of the statement, is converted to StoreError.
    """
    try:
        with open_file(path, links=True) as fd:
            yield fd
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def _read(fd: int, place: Place) -> memoryview:
    """Return the bytes of a tensor whose place was checked against the file's size.

    Raises SnapshotRefused if the file ends before the tensor does, and OSError.
    """
    view, at = memoryview(bytearray(place.nbytes)), 0
    while at < len(view):
        count = os.preadv(fd, [view[at:]], place.offset + at)
        if not count:
            raise SnapshotRefused("The snapshot was cut off while it was read: export it again.")
        at += count
    return view
