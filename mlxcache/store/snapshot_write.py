"""A session out of the store into one file, streamed; see docs/snapshots.md for the format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

import mlxcache
from mlxcache.errors import Corrupt, Gone, StoreError
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Saved
from mlxcache.store.safetensors import Header, Malformed, Place, compose, read_header
from mlxcache.store.snapshot_info import (
    CHECKSUMS,
    FORMAT,
    MOST_STATE_BYTES,
    MOST_STATE_TENSORS,
    TOKENS,
    VERSION,
    SessionInfo,
    block_seed,
    state_name,
)
from mlxcache.store.snapshot_plan import Own, described, owns_of, within_limits
from mlxcache.store.store import Store
from mlxcache.tensor import ITEM_BYTES

CHUNK_BYTES = 2 << 20


class Export:
    """A snapshot on its way out: iterate once for its bytes, `nbytes` in all.

    `owner`: whose the session is, which the file does not say: it is whoever's takes it in.

    Raises StoreError while it is iterated where a file is evicted before it was read. What came
    before is then not a snapshot, and is refused by its length.
    """

    def __init__(self, store: Store, session: SessionInfo, owner: str | None = None):
        self._owner = owner
        self._owns = owns_of(store, within_limits(session.leaves))
        self._headers = {p.path: _header(p.path) for own in self._owns for p in own.pieces}
        states = [(k, saved) for k, own in enumerate(self._owns) for saved in own.states]
        self._states = _portable([(k, saved, _header(saved.path)) for k, saved in states])
        self._blocks = [-(-own.rows // BLOCK) for own in self._owns]
        self._kv = self._kv_places()
        words = described(session, self._owns, [state[:2] for state in self._states]).encode()
        self._words = xxh3_64(words.encode())
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "mlxcache": mlxcache.__version__,
            "description": words,
        }
        places = self._places()
        self._head = compose(metadata, places)
        self.nbytes = len(self._head) + sum(place.nbytes for place in places)

    def _places(self) -> list[Place]:
        """The file's tensors in order."""
        count = sum(self._blocks) + len(self._states) + 1
        return [
            _place(TOKENS, "I32", (sum(len(own.info.ids) - own.start for own in self._owns),)),
            *self._kv,
            *(
                _place(state_name(i, place.name), place.dtype, place.shape)
                for i, (_, _, header) in enumerate(self._states)
                for place in header.places
            ),
            _place(CHECKSUMS, "U64", (count,)),
        ]

    def _kv_places(self) -> list[Place]:
        """One tensor per array of the KV, over the rows of all leaves. Raises Corrupt."""
        rows = sum(own.rows for own in self._owns)
        kinds = {
            path: [(p.name, p.dtype, p.shape[1:]) for p in header.places]
            for path, header in self._headers.items()
        }
        first = next(iter(kinds.values()), [])
        for path, kind in kinds.items():
            if kind != first:
                raise Corrupt(f"{path} holds other tensors than the rest of its session.")
        return [_place(name, dtype, (rows, *shape)) for name, dtype, shape in first]

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for own in self._owns:
            raw = own.tokens(self._owner).tobytes()
            self._words.update(raw)
            yield from (raw[at : at + CHUNK_BYTES] for at in range(0, len(raw), CHUNK_BYTES))
        blocks = [
            [xxh3_64(seed=block_seed(leaf, block)) for block in range(count)]
            for leaf, count in enumerate(self._blocks)
        ]
        for index in range(len(self._kv)):
            for own, sums in zip(self._owns, blocks, strict=True):
                yield from self._kv_bytes(index, own, sums)
        states = [xxh3_64(seed=i) for i in range(len(self._states))]
        for (_, saved, header), state in zip(self._states, states, strict=True):
            for place in header.places:
                for part in _read(saved.path, place.offset, place.offset + place.nbytes):
                    state.update(part)
                    yield part
        sums = [one for leaf in blocks for one in leaf]
        yield b"".join(one.digest()[::-1] for one in [*sums, *states, self._words])

    def _kv_bytes(self, index: int, own: Own, sums: list[xxh3_64]) -> Iterator[bytes]:
        """Tensor `index` of a leaf's rows, which are hashed into `sums`, one per block."""
        row = self._kv[index].nbytes // max(1, self._kv[index].shape[0])
        for piece in own.pieces:
            place = self._headers[piece.path].places[index]
            first, last = max(piece.start, own.start), min(piece.end, own.end)
            begin = place.offset + (first - piece.first) * row
            at = (first - own.start) * row
            for part in _read(piece.path, begin, begin + (last - first) * row):
                _feed(sums, BLOCK * row, at, memoryview(part))
                at += len(part)
                yield part


def _feed(sums: list[xxh3_64], size: int, at: int, part: memoryview) -> None:
    """Hash `part`, which begins `at` bytes into blocks of `size` bytes."""
    done = 0
    while done < len(part):
        block = (at + done) // size
        end = min((block + 1) * size - at, len(part))
        sums[block].update(part[done:end])
        done = end


def _read(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """Bytes [begin, end) of a file, a chunk at a time. Raises StoreError."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise Gone(f"{path} was evicted.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        while begin < end:
            part = os.pread(fd, min(CHUNK_BYTES, end - begin), begin)
            if not part:
                raise Corrupt(f"{path} is cut off.")
            begin += len(part)
            yield part
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    finally:
        os.close(fd)


def _header(path: Path) -> Header:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            return read_header(fd)
        finally:
            os.close(fd)
    except FileNotFoundError as error:
        raise Gone(f"{path} was evicted.") from error
    except Malformed as error:
        raise Corrupt(f"{path}: {error}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def _place(name: str, dtype: str, shape: tuple[int, ...]) -> Place:
    return Place(name, dtype, shape, 0, int(np.prod(shape, dtype=object)) * ITEM_BYTES[dtype])


def _portable(states: list[tuple[int, Saved, Header]]) -> list[tuple[int, Saved, Header]]:
    """Those checkpoints that a snapshot may hold."""
    kept, tensors = [], 0
    for state in states:
        tensors += len(state[2].places)
        if state[1].nbytes <= MOST_STATE_BYTES and tensors <= MOST_STATE_TENSORS:
            kept.append(state)
    return kept
