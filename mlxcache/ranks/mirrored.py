"""The parts of a divided model on rank 0: each operation is told to the other ranks, then done.

An operation that fails here may have succeeded there: ranks that differ cannot go on, so GroupLost
is raised. MLX thread only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlxcache.cache.kv_io import KVFiles
from mlxcache.cache.restore import DiskLookup
from mlxcache.errors import GroupLost, MlxcacheError
from mlxcache.model.kv import Caches, Layout, State
from mlxcache.model.lineage import Lineage, Span
from mlxcache.ranks import operations as op
from mlxcache.ranks.leader import Leader
from mlxcache.safetensors import Tensor
from mlxcache.scheduling.decoder import Decoder, DecoderRow, Drawn
from mlxcache.scheduling.parts import Parts
from mlxcache.scheduling.wall import Wall
from mlxcache.types import Tokens


def mirrored_parts(leader: Leader) -> Parts:
    return Parts(
        lineage=partial(MirroredLineage, leader),
        files=partial(MirroredFiles, leader),
        decode=MirroredDecoder.of_lineage,
        wall=GroupWall,
    )


def end_group(error: Exception) -> None:
    """Raise GroupLost unless `error` left all ranks in the same state."""
    if not isinstance(error, MlxcacheError):
        raise GroupLost(f"an operation failed on rank 0: {error!r}") from error


class GroupWall(Wall):
    def pass_on(self, error: Exception) -> None:
        super().pass_on(error)
        end_group(error)

    def check_recovery(self, error: RuntimeError) -> None:
        end_group(error)


class NumberedState(tuple):  # type: ignore[type-arg]
    """A checkpoint that the other ranks know by its `number`.

    When it is garbage-collected, its number is added to `dropped`, so that they drop it too.
    """

    number: int
    dropped: deque[int]

    def __del__(self) -> None:
        self.dropped.append(self.number)


class MirroredLineage(Lineage):
    """A lineage that the other ranks know by its `number`, each with its own part of the KV."""

    def __init__(self, leader: Leader, layout: Layout, copy_bytes: int = 0):
        super().__init__(layout, copy_bytes)
        self.leader = leader
        self.number = leader.next_number()
        weakref.finalize(self, leader.dropped.append, self.number)
        leader.tell(op.Create(self.number, copy_bytes))

    def _empty(self) -> Lineage:
        return MirroredLineage(self.leader, self.layout, self.copy_bytes)

    def _tell(self, operation: Callable[..., op.AnyOperation], *args: Any) -> None:
        self.leader.tell(operation(self.number, self.length, *args))

    def note_feed(self, ids: Tokens) -> None:
        self._tell(op.Feed, ids.tolist())
        super().note_feed(ids)

    def fill(self, sources: Sequence[Span], capacity: int) -> None:
        self._tell(op.Rebuild, [_told(span) for span in sources], capacity)
        try:
            super().fill(sources, capacity)
        except Exception as error:
            end_group(error)
            raise

    def truncate(self, length: int) -> None:
        self._tell(op.Change, "truncate", length)
        super().truncate(length)

    def pretend(self, length: int) -> None:
        self._tell(op.Change, "pretend", length)
        super().pretend(length)

    def append_span(self, span: Span) -> None:
        self._tell(op.AppendSpan, _told(span))
        super().append_span(span)

    def capture(self) -> State:
        state = NumberedState(super().capture())
        state.number = self.leader.next_number()
        state.dropped = self.leader.dropped
        self._tell(op.Capture, state.number)
        return state

    def restore(self, state: State | None) -> None:
        self._tell(op.Restore, None if state is None else _number_of(state))
        super().restore(state)

    def settle(self) -> None:
        self._tell(op.Change, "settle")
        super().settle()

    def rest(self) -> None:
        if self.layout.opaque:
            self._tell(op.Change, "rest")
        super().rest()

    def release(self) -> None:
        self._tell(op.Change, "release")
        super().release()


class MirroredDecoder(Decoder):
    """A decoder over a lineage or a batch that the other ranks know by `number`.

    They receive the tokens that this rank draws within the pass itself, and feed them next.
    """

    def __init__(self, *args: Any, leader: Leader, number: int):
        super().__init__(*args)
        self.leader, self.number = leader, number

    @staticmethod
    def of_lineage(model: Any, row: DecoderRow, lineage: Lineage) -> Decoder:
        assert isinstance(lineage, MirroredLineage)
        args = model, [row], lineage.caches, lambda: lineage.nbytes
        return MirroredDecoder(*args, leader=lineage.leader, number=lineage.number)

    def _over(self, rows: list[DecoderRow], caches: Caches, nbytes: Callable[[], int]) -> Decoder:
        args, number = (self.model, rows, caches, nbytes), self.leader.next_number()
        return MirroredDecoder(*args, leader=self.leader, number=number)

    def start(self, inputs: Sequence[int]) -> None:
        self.leader.tell(op.Start(self.number, list(inputs)))
        super().start(inputs)

    def step(self) -> list[list[Drawn]]:
        self.leader.tell(op.Step(self.number))
        return super().step()

    def _draw_all(self, logprobs: mx.array) -> mx.array:
        return self.leader.share(super()._draw_all(logprobs))

    def joined(
        self, others: Sequence[Decoder], nbytes: Callable[[], int], *, batched: bool
    ) -> Decoder:
        joint = super().joined(others, nbytes, batched=batched)
        each = [_number_of(one) for one in others]
        self.leader.tell(op.Join(_number_of(joint), self.number, each, batched))
        return joint

    def append_row(self, row: int, lineage: Lineage, count: int) -> None:
        number = _number_of(lineage)
        self.leader.tell(op.AppendRow(number, lineage.length, self.number, row, count))
        super().append_row(row, lineage, count)

    def alone(self, row: int, lineage: Lineage) -> Decoder:
        self.leader.tell(op.TakeRow(self.number, row, _number_of(lineage)))
        return super().alone(row, lineage)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.leader.tell(op.KeepRows(self.number, rows))

    def drop(self) -> None:
        super().drop()
        self.leader.tell(op.DropBatch(self.number))


class MirroredFiles(KVFiles):
    """Each rank has its part of a file in a store of its own. `GroupStore` waits for the writes."""

    def __init__(self, leader: Leader, layout: Layout):
        super().__init__(layout)
        self._leader = leader

    def copy_run(
        self, ids: Tokens, start: int, spans: Sequence[Span], out: memoryview
    ) -> list[Tensor]:
        tensors = super().copy_run(ids, start, spans, out)
        lengths = [owner.length for owner, _, _ in spans]
        self._leader.tell(op.WriteRun(ids.tobytes(), start, list(map(_told, spans)), lengths))
        return tensors

    def copy_state(self, ids: Tokens, state: State) -> list[Tensor]:
        self._leader.tell(op.WriteState(ids.tobytes(), _number_of(state)))
        return super().copy_state(ids, state)

    def load_runs(self, lookup: DiskLookup, lineage: Lineage) -> None:
        start, number = lineage.length, _number_of(lineage)
        super().load_runs(lookup, lineage)
        self._leader.tell(op.Load(number, start, lookup.ids.tobytes(), lineage.length))

    def load_state(self, lookup: DiskLookup, lineage: Lineage) -> None:
        super().load_state(lookup, lineage)
        if lookup.state is not None:
            ids = lookup.ids[: lookup.target].tobytes()
            self._leader.tell(op.LoadState(_number_of(lineage), lineage.length, ids))


def _number_of(one: Lineage | Decoder | State) -> int:
    assert isinstance(one, MirroredLineage | MirroredDecoder | NumberedState)
    return one.number


def _told(span: Span) -> op.Span:
    owner, start, end = span
    return _number_of(owner), start, end
