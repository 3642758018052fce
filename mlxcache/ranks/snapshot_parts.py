"""Reading and writing of one rank's part of snapshots, as rank 0 asks for it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from mlxcache.errors import StoreError
from mlxcache.lru import LRU
from mlxcache.ranks import operations as op
from mlxcache.safetensors import ITEM_BYTES, Tensor
from mlxcache.store.found import Found, Saved
from mlxcache.store.snapshots import SnapshotKV
from mlxcache.store.store import Store
from mlxcache.types import Tokens, ids_of_bytes

HELD = 16
"""Number of conversations whose files are remembered for reading; others are looked up again."""

Write = Callable[[bytes, Callable[[Store], None]], None]

SnapshotQuestion = op.Hold | op.ReadRows | op.StateArrays | op.ReadState | op.Upload | op.Import


class SnapshotParts:
    """Reader and writer of one rank's part of snapshots, in its `store`. Used by one thread.

    `write(key, action)` calls `action(store)` on the writer's thread, and notes the outcome of the
    file `key`.
    """

    def __init__(self, store: Store, write: Write):
        self._store = store
        self._write = write
        self._held: LRU[bytes, tuple[Tokens, Found, SnapshotKV]] = LRU(HELD)
        self._uploaded = bytearray()

    def answer(self, question: SnapshotQuestion) -> op.Answer:
        """Answer a question about snapshots. Blocks while files are read.

        The answer has `failure` if a file cannot be read, and `missing` if no `ids` are held under
        the `key` of the question; see `Hold`.
        """
        try:
            match question:
                case op.Hold(ids):
                    return self._hold(ids)
                case op.Upload(at, data):
                    del self._uploaded[at:]
                    self._uploaded += data
                    return op.Answer()
                case op.Import(ids, start, arrays):
                    return self._import(ids, start, arrays)
                case op.ReadRows() | op.StateArrays() | op.ReadState():
                    held = self._held.get(question.key)
                    return op.Answer(missing=True) if held is None else _read(question, *held)
        except StoreError as error:
            return op.Answer(failure=str(error))

    def _hold(self, data: bytes) -> op.Answer:
        ids = ids_of_bytes(data)
        found = self._store.find(ids)
        self._held.put(op.key_of(data, None), (ids, found, SnapshotKV(self._store)))
        return op.Answer()

    def _import(self, data: bytes, start: int | None, arrays: list[op.Array]) -> op.Answer:
        """Have the uploaded bytes written as a file later, and return an empty answer at once."""
        ids, raw = ids_of_bytes(data), memoryview(bytes(self._uploaded))
        self._uploaded.clear()
        tensors, at = [], 0
        for name, dtype, shape in arrays:
            size = prod(shape) * ITEM_BYTES[dtype]
            tensors.append(Tensor(name, dtype, tuple(shape), raw[at : at + size]))
            at += size
        if not arrays:  # this rank has no part of it
            self._write(op.key_of(data, start), lambda store: None)
        elif start is None:
            self._write(op.key_of(data, None), lambda store: store.write_checkpoint(ids, tensors))
        else:
            self._write(op.key_of(data, start), lambda store: store.write_run(ids, start, tensors))
        return op.Answer()


def _read(
    question: op.ReadRows | op.StateArrays | op.ReadState,
    ids: Tokens,
    found: Found,
    files: SnapshotKV,
) -> op.Answer:
    """Return the answer to a question, read from this rank's files. Raises StoreError."""
    match question:
        case op.ReadRows(_, name, start, end):
            if end > found.length:
                raise StoreError(f"only {found.length} tokens of the KV are on disk")
            return op.Answer(data=b"".join(files.rows(ids, found.pieces, name, start, end)))
        case op.StateArrays(_, position):
            places = files.state_places(ids, _saved(found, position))
            return op.Answer(arrays=[(one.name, one.dtype, list(one.shape)) for one in places])
        case op.ReadState(_, position, first, last):
            data = files.state_bytes(ids, _saved(found, position), first, last)
            return op.Answer(data=b"".join(data))


def _saved(found: Found, position: int) -> Saved:
    saved = next((one for one in found.checkpoints if one.position == position), None)
    if saved is None:
        raise StoreError(f"no checkpoint at {position} tokens is on disk")
    return saved
