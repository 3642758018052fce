"""KV of a session in a store: read for the export of a snapshot, written for an import."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlxcache.errors import Corrupt, Gone, StoreError
from mlxcache.safetensors import Header, Malformed, Place, Tensor, read_header
from mlxcache.store.found import Piece, Saved
from mlxcache.store.kv_files import open_file
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.store.store import Store

CHUNK_BYTES = 2 << 20
"""Most bytes that are read at a time."""

RowKind = tuple[str, str, tuple[int, ...]]
"""Name and dtype of a tensor of a run, and its shape without the first axis, which is tokens."""


class SnapshotKV:
    """Reads KV from `store` to export a snapshot, or writes the KV of a snapshot into `store`.

    This class does not convert the KV. A subclass converts it from and for the store of a rank,
    which has only a part of each layer or only some layers. `namespace`: that of the model, as the
    snapshot states it; by default that of `store`. Use one object for one export or import. All
    methods block.
    """

    def __init__(self, store: Store, namespace: str | None = None):
        self.store = store
        self.namespace = store.namespace if namespace is None else namespace
        self._headers: dict[Path, Header] = {}

    # -- for an export -----------------------------------------------------------------------------

    def row_kinds(self, pieces: Sequence[Piece]) -> list[RowKind]:
        """Return name, dtype and shape of each tensor that the runs `pieces` hold.

        The shape is without the first axis, which is tokens. The order is that of the tensors in
        the snapshot. Raises Corrupt if two runs hold different tensors, and StoreError if a file
        cannot be read.
        """
        first: list[RowKind] | None = None
        for piece in pieces:
            places = self._header(piece.path).places
            kind = [(place.name, place.dtype, place.shape[1:]) for place in places]
            first = kind if first is None else first
            if kind != first:
                raise Corrupt(f"{piece.path} holds other tensors than the rest of its session.")
        return first or []

    def rows(
        self, ids: Tokens, pieces: Sequence[Piece], name: str, start: int, end: int
    ) -> Iterator[bytes]:
        """Yield the bytes of the tensor `name` for the positions [start, end) of `ids`.

        `pieces`: the runs on disk with these positions, as `Store.find` returns them for `ids`.
        Raises StoreError if a file is missing, damaged or cannot be read.
        """
        for piece in pieces:
            first, last = max(piece.start, start), min(piece.end, end)
            if first < last:
                place = next(p for p in self._header(piece.path).places if p.name == name)
                row = place.nbytes // place.shape[0]
                begin = place.offset + (first - piece.first) * row
                yield from read_bytes(piece.path, begin, begin + (last - first) * row)

    def state_places(self, ids: Tokens, saved: Saved) -> Sequence[Place]:
        """Return the tensors of the checkpoint `saved`; their offsets must not be used.

        `ids`: the token ids for which `saved` was found. Raises StoreError if its file is missing,
        damaged or cannot be read.
        """
        return self._header(saved.path).places

    def state_bytes(
        self, ids: Tokens, saved: Saved, first: int = 0, last: int | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes of all tensors of the checkpoint `saved`, one after another.

        `ids`: the token ids for which `saved` was found. Only the range [first, last) of these
        bytes is yielded, up to their end if `last` is None. Raises StoreError if the file is
        missing, damaged or cannot be read.
        """
        at = 0
        for place in self._header(saved.path).places:
            begin = max(first - at, 0)
            end = place.nbytes if last is None else min(last - at, place.nbytes)
            if begin < end:
                yield from read_bytes(saved.path, place.offset + begin, place.offset + end)
            at += place.nbytes

    def _header(self, path: Path) -> Header:
        if path not in self._headers:
            with _opened(path) as fd:
                self._headers[path] = read_header(fd)
        return self._headers[path]

    # -- for an import -----------------------------------------------------------------------------

    def write_run(self, ids: Tokens, start: int, tensors: Sequence[Tensor]) -> None:
        """Save the KV of the tokens [start, len(ids)).

        The arguments and the errors raised are those of `Store.write_run`.
        """
        self.store.write_run(ids, start, tensors)

    def write_checkpoint(self, ids: Tokens, tensors: Sequence[Tensor]) -> None:
        """Save `tensors`, the state after `ids`. Raises as `Store.write_checkpoint`."""
        self.store.write_checkpoint(ids, tensors)


def read_bytes(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes [begin, end) of a file of the store, at most `CHUNK_BYTES` at a time.

    Raises StoreError if the file is missing, ends before `end`, or cannot be read.
    """
    with _opened(path) as fd:
        while begin < end:
            part = os.pread(fd, min(CHUNK_BYTES, end - begin), begin)
            if not part:
                raise Corrupt(f"{path} is cut off.")
            begin += len(part)
            yield part


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file of the store for a `with` statement; yield its descriptor.

    Errors of opening it and of the body are converted: a missing file raises Gone, a malformed one
    Corrupt, and any other OSError StoreError.
    """
    try:
        with open_file(path) as fd:
            yield fd
    except FileNotFoundError as error:
        raise Gone(f"{path} was evicted.") from error
    except Malformed as error:
        raise Corrupt(f"{path}: {error}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
