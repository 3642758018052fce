"""A file that claims to be a snapshot into the store; nothing it says is believed unchecked.

Sizes are checked against the file before memory is taken for them. Only the description and the
tokens are held; KV is read in pieces, each checked before it is written to the store.
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
from mlxcache.safetensors import Place, Tensor
from mlxcache.store.digests import BLOCK
from mlxcache.store.snapshot_format import (
    CHECKSUMS,
    TOKENS,
    Description,
    Progress,
    SessionInfo,
    Spec,
    block_seed,
    bounded_header,
    check_model,
    check_spec,
    description_of,
    leaf_ids,
    state_name,
    tensors_of,
    with_tokens,
)
from mlxcache.store.store import Store
from mlxcache.types import Tokens

PIECE_BYTES = 64 << 20
"""About so much is in RAM at a time, and in a run."""


_Piece = tuple[Tokens, int | None, Sequence[Tensor]]
"""Tokens from 0, the position where the KV of the last of them begins, or None: a checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A file whose description and tokens are sound and fit its size; `restore` checks the rest.

    `nbytes`: of its KV and checkpoints.
    """

    path: Path
    session: SessionInfo
    nbytes: int
    description: Description
    kv: tuple[Place, ...]
    states: tuple[tuple[Place, ...], ...]
    sums: tuple[bytes, ...]
    """Of each leaf's blocks in turn, of the checkpoints, and of description and tokens."""


def read_snapshot(
    path: Path,
    namespace: str | None = None,
    *,
    model: str | None = None,
    spec: Spec | None = None,
    vocab_size: int | None = None,
) -> Snapshot:
    """Check the snapshot at `path`, and that it is for the model of `namespace` if given.

    `model` is that model's name, for the message; `spec` what it caches, and `vocab_size` the ids
    it knows. Raises SnapshotRefused, a sentence; of another model one that names both.
    """
    with _opened(path) as fd:
        header = bounded_header(fd)
        description = description_of(header)
        check_model(description, namespace, model)
        kv, states = tensors_of(header, description)
        check_spec(kv, spec)
        places = {place.name: place for place in header.places}
        raw = _read(fd, places[CHECKSUMS])
        sums = tuple(bytes(raw[at : at + 8])[::-1] for at in range(0, len(raw), 8))
        raw = _read(fd, places[TOKENS])
    words = xxh3_64(header.metadata["description"].encode())
    words.update(raw)
    if words.digest() != sums[-1]:
        raise SnapshotRefused("The snapshot is damaged: its tokens are not as they were.")
    session = with_tokens(description.session(), leaf_ids(raw, description, vocab_size))
    nbytes = sum(place.nbytes for part in (kv, *states) for place in part)
    return Snapshot(path, session, nbytes, description, kv, states, sums)


def owned(snapshot: Snapshot, owner: str | None) -> Snapshot:
    """A snapshot as one owner's."""
    session = snapshot.session
    ids = [own_ids(leaf.ids, owner) for leaf in session.leaves]
    return replace(snapshot, session=with_tokens(session, ids))


def restore(store: Store, snapshot: Snapshot, progress: Progress | None = None) -> SessionInfo:
    """Write a snapshot's KV into `store`; the session to enter into the table, with its tokens.

    What is written stays where it fails later: it is sound, and goes with the least recently used.
    Raises SnapshotRefused where a checksum does not hold, and StoreError.
    """
    if store.limit is not None and snapshot.nbytes > store.limit:
        raise DiskFull(
            f"The snapshot takes {snapshot.nbytes} bytes, and the disk tier may hold {store.limit}."
        )
    done = 0
    with _opened(snapshot.path) as fd:
        for ids, start, tensors in _pieces(fd, snapshot):
            if start is None:
                store.write_checkpoint(ids, tensors)
            else:
                store.write_run(ids, start, tensors)
            done += sum(tensor.nbytes for tensor in tensors)
            if progress is not None:
                progress(done, snapshot.nbytes)
    return snapshot.session


def _pieces(fd: int, snapshot: Snapshot) -> Iterator[_Piece]:
    """Runs, then checkpoints, each checked."""
    per_token = sum(p.nbytes // p.shape[0] for p in snapshot.kv)
    step = max(BLOCK, PIECE_BYTES // max(1, per_token) // BLOCK * BLOCK)
    row = block = 0
    for index, leaf in enumerate(snapshot.description.leaves):
        ids = snapshot.session.leaves[index].ids
        for at in range(0, leaf.rows, step):
            end = min(at + step, leaf.rows)
            tensors = [_rows(fd, place, row + at, row + end) for place in snapshot.kv]
            found = _block_sums(tensors, end - at, index, at // BLOCK)
            if found != snapshot.sums[block : block + len(found)]:
                raise SnapshotRefused("The snapshot is damaged: some of its KV is not as it was.")
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
            raise SnapshotRefused("The snapshot is damaged: a checkpoint is not as it was.")
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
    """The file's descriptor; errors of the system come out of the block as StoreError."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def _read(fd: int, place: Place) -> memoryview:
    """A tensor's bytes; its place was checked against the size of the file."""
    view, at = memoryview(bytearray(place.nbytes)), 0
    while at < len(view):
        count = os.preadv(fd, [view[at:]], place.offset + at)
        if not count:
            raise SnapshotRefused("The snapshot was cut off while it was read.")
        at += count
    return view
