"""Snapshots of a divided model: rank 0 joins or cuts KV, each rank reads and writes its part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod

from mlxcache.errors import StoreError
from mlxcache.lru import LRU
from mlxcache.ranks import operations as op
from mlxcache.ranks.division import Division, Rows
from mlxcache.ranks.leader import Leader, checked
from mlxcache.safetensors import ITEM_BYTES, Place, Tensor
from mlxcache.store.found import Found, RunPart, Saved
from mlxcache.store.snapshots import CHUNK_BYTES, RowKind, SnapshotKV
from mlxcache.store.store import Store
from mlxcache.types import Tokens, ids_of_bytes

PART_BYTES = 2 << 20
"""Most bytes of KV in one message, so that other questions to the ranks do not wait for long."""

HELD = 16
"""Number of conversations whose files are remembered for reading; others are looked up again."""

Write = Callable[[bytes, Callable[[Store], None]], None]

SnapshotQuestion = op.Hold | op.ReadRows | op.StateArrays | op.ReadState | op.Upload | op.Import

Wait = Callable[[bytes], None]


class GroupSnapshotKV(SnapshotKV):
    """The KV of a whole model, joined from the parts of all ranks, or cut into them.

    `own`: the store with rank 0's own part. `uploading`: held while a file is sent to the ranks,
    which remember one upload. `wait(key)` blocks until all other ranks have written the file `key`.
    """

    def __init__(
        self,
        store: Store,
        own: Store,
        leader: Leader,
        division: Division,
        namespace: str,
        *,
        uploading: threading.Lock,
        wait: Wait,
    ):
        super().__init__(store, namespace)
        self._own = SnapshotKV(own)
        self._leader = leader
        self._division = division
        self._uploading = uploading
        self._wait = wait

    # -- for an export -----------------------------------------------------------------------------

    def row_kinds(self, pieces: Sequence[RunPart]) -> list[RowKind]:
        spec = self._division.spec
        return [(name, dtype, shape) for name, (dtype, shape) in spec.items()] if pieces else []

    def rows(
        self, ids: Tokens, pieces: Sequence[RunPart], name: str, start: int, end: int
    ) -> Iterator[bytes]:
        dtype, shape = self._division.spec[name]
        step = max(1, PART_BYTES // (prod(shape) * ITEM_BYTES[dtype]))
        for first in range(start, end, step):
            last = min(first + step, end)
            held = self._division.rows[name]
            parts = self._rows_of_ranks(ids, pieces, held, first, last)
            yield self._division.join_rows(name, parts)

    def _rows_of_ranks(
        self, ids: Tokens, pieces: Sequence[RunPart], held: Sequence[Rows], start: int, end: int
    ) -> list[bytes]:
        key = op.key_of(ids.tobytes(), None)
        questions: list[op.AnyQuestion | None] = [None] * (self._division.size - 1)
        for one in held:
            if one.rank:
                questions[one.rank - 1] = op.ReadRows(key, one.name, start, end)
        answers = self._ask(ids, questions)
        return [
            answers[one.rank - 1].data
            if one.rank
            else b"".join(self._own.rows(ids, pieces, one.name, start, end))
            for one in held
        ]

    def state_places(self, ids: Tokens, saved: Saved) -> Sequence[Place]:
        """Return the tensors of a whole checkpoint; their offsets are 0 and must not be used."""
        return [
            Place(one.name, one.dtype, one.shape, 0, one.nbytes) for one in self._state(ids, saved)
        ]

    def state_bytes(
        self, ids: Tokens, saved: Saved, first: int = 0, last: int | None = None
    ) -> Iterator[bytes]:
        whole = memoryview(b"".join(tensor.bytes for tensor in self._state(ids, saved)))[first:last]
        for at in range(0, len(whole), CHUNK_BYTES):
            yield bytes(whole[at : at + CHUNK_BYTES])

    def _state(self, ids: Tokens, saved: Saved) -> list[Tensor]:
        key, position = op.key_of(ids.tobytes(), None), saved.position
        having = [bool(part.states) for part in self._division.parts[1:]]
        asked = [op.StateArrays(key, position) if has else None for has in having]
        arrays = [answer.arrays for answer in self._ask(ids, asked)]
        sizes = [sum(map(_nbytes, each)) for each in arrays]
        found = [bytearray() for _ in having]
        for first in range(0, max(sizes, default=0), PART_BYTES):
            parts = [
                op.ReadState(key, position, first, min(first + PART_BYTES, size))
                if first < size
                else None
                for size in sizes
            ]
            for rank, answer in enumerate(self._ask(ids, parts)):
                found[rank] += answer.data
        own = self._own.state_places(ids, saved)
        shapes = [(place.name, place.dtype, list(place.shape)) for place in own]
        mine = _tensors(shapes, b"".join(self._own.state_bytes(ids, saved)))
        others = [_tensors(each, bytes(data)) for each, data in zip(arrays, found, strict=True)]
        return self._division.join_states([mine, *others])

    def _ask(self, ids: Tokens, questions: Sequence[op.AnyQuestion | None]) -> list[op.Answer]:
        """Ask each rank, from rank 1, its question about `ids`, if any; return the answers.

        If a rank does not hold the files of `ids`, all are told to look them up (`Hold`), and asked
        again.
        """
        answers = self._told(questions)
        if any(answer.missing for answer in answers):
            self._told([op.Hold(ids.tobytes())] * len(questions))
            answers = self._told(questions)
        return answers

    def _told(self, questions: Sequence[op.AnyQuestion | None]) -> list[op.Answer]:
        return checked(self._leader.ask_each(questions))

    # -- for an import -----------------------------------------------------------------------------

    def write_run(self, ids: Tokens, start: int, tensors: Sequence[Tensor]) -> None:
        parts = [self._division.cut_rows(tensors, rank) for rank in range(self._division.size)]
        self._write(ids, start, parts)

    def write_checkpoint(self, ids: Tokens, tensors: Sequence[Tensor]) -> None:
        parts = [
            self._division.cut_states(tensors, rank) if has_states or not rank else []
            for rank, has_states in enumerate(bool(part.states) for part in self._division.parts)
        ]
        self._write(ids, None, parts)

    def _write(self, ids: Tokens, start: int | None, parts: Sequence[Sequence[Tensor]]) -> None:
        data = ids.tobytes()
        with self._uploading:
            self._upload(parts[1:])
            arrays = [[(one.name, one.dtype, list(one.shape)) for one in each] for each in parts]
            self._told([op.Import(data, start, each) for each in arrays[1:]])
        try:
            if start is None:
                self._own.write_checkpoint(ids, parts[0])
            else:
                self._own.write_run(ids, start, parts[0])
        finally:
            self._wait(op.key_of(data, start))

    def _upload(self, parts: Sequence[Sequence[Tensor]]) -> None:
        whole = [memoryview(b"".join(tensor.bytes for tensor in each)) for each in parts]
        for at in range(0, max(map(len, whole)), PART_BYTES):
            sent = [bytes(data[at : at + PART_BYTES]) for data in whole]
            self._told([op.Upload(at, each) if each else None for each in sent])


def _nbytes(array: op.Array) -> int:
    _, dtype, shape = array
    return prod(shape) * ITEM_BYTES[dtype]


def _tensors(arrays: Sequence[op.Array], data: bytes) -> list[Tensor]:
    made, at, view = [], 0, memoryview(data)
    for array in arrays:
        name, dtype, shape = array
        size = _nbytes(array)
        try:
            made.append(Tensor(name, dtype, tuple(shape), view[at : at + size]))
        except ValueError as error:
            raise StoreError(f"A rank's checkpoint is cut off: {error}.") from error
        at += size
    return made


class SnapshotParts:
    """Reader and writer of one rank's part of snapshots, in its `store`. Used by one thread.

    `write(key, action)` calls `action(store)` on the writer's thread, and notes its outcome.
    """

    def __init__(self, store: Store, write: Write):
        self._store = store
        self._write = write
        self._held: LRU[bytes, tuple[Tokens, Found, SnapshotKV]] = LRU(HELD)
        self._uploaded = bytearray()

    def answer(self, question: SnapshotQuestion) -> op.Answer:
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
        ids, raw = ids_of_bytes(data), bytes(self._uploaded)
        self._uploaded.clear()
        tensors = _tensors(arrays, raw)
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
    match question:
        case op.ReadRows(_, name, start, end):
            if end > found.length:
                raise StoreError(f"only {found.length} tokens of the KV are on disk")
            return op.Answer(data=b"".join(files.rows(ids, found.pieces, name, start, end)))
        case op.StateArrays(_, position):
            places = files.state_places(ids, saved_at(position, found))
            return op.Answer(arrays=[(one.name, one.dtype, list(one.shape)) for one in places])
        case op.ReadState(_, position, first, last):
            data = files.state_bytes(ids, saved_at(position, found), first, last)
            return op.Answer(data=b"".join(data))


def saved_at(position: int, found: Found) -> Saved:
    saved = next((one for one in found.checkpoints if one.position == position), None)
    if saved is None:
        raise StoreError(f"no checkpoint at {position} tokens is on disk")
    return saved
