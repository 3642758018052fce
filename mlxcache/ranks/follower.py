"""A rank other than 0: repeats the operations of rank 0 on its own part of the model and KV."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import singledispatchmethod
from typing import Any

import mlx.core as mx
import msgspec
from mlx.nn import Module

from mlxcache.errors import PrefixNotStored, StoreError
from mlxcache.model import kv, rows, serialise
from mlxcache.model.kv import Caches, Layout, State
from mlxcache.model.lineage import Lineage, Span
from mlxcache.ranks import operations as op
from mlxcache.ranks.group_snapshots import SnapshotParts, saved_at
from mlxcache.store.parts import Mode, PartName
from mlxcache.store.store import Store
from mlxcache.types import Tokens, ids_of_bytes

log = logging.getLogger("mlxcache.ranks")

_MESSAGE = msgspec.msgpack.Decoder(op.Message)


class Follower:
    """The lineages, checkpoints, batches and pending tokens of one rank, by number.

    `open_store(operation)` returns the rank's own store; None if this rank has no disk tier. MLX
    thread only, except `answer`.
    """

    def __init__(
        self,
        model: Module,
        layout: Layout,
        group: Any,
        open_store: Callable[[op.Open], Store] | None = None,
        *,
        rank: int = 1,
        vitals: Callable[[], op.Vitals] = op.Vitals,
    ):
        self._rank = rank
        self.model = model
        self.layout = layout
        self.store: Store | None = None
        self._namespace = ""
        self._snapshots: SnapshotParts | None = None
        self._open_store = open_store
        self._vitals = vitals
        self._group = group
        self._lineages: dict[int, Lineage] = {}
        self._states: dict[int, State] = {}
        self._batches: dict[int, Caches] = {}
        self._pending: dict[int, mx.array] = {}
        self._stream = mx.new_stream(mx.cpu)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-write")
        self._outcomes: dict[bytes, deque[op.Answer]] = {}
        self._outcomes_lock = threading.Lock()
        self._began_at: float | None = None

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self._lineages), len(self._states), len(self._batches)

    def answer(self, question: op.AnyQuestion) -> op.Answer:
        """Answer a question of rank 0, or start the change of files that it requests. Any thread.

        Blocks while files are looked up or verified. Changes of files, such as `Pin`, are queued
        for the writer's thread, and the answer is empty.
        """
        match question:
            case op.Ping():
                began = self._began_at
                age_s = 0.0 if began is None else time.monotonic() - began
                return op.Answer(age_s, vitals=self._vitals())
            case op.Find() | op.FindAll() | op.Verify() | op.VerifyState():
                return self._look_up(question)
            case op.Outcome(key):
                return self._take_outcome(key)
            case op.Pin() | op.Remove() | op.Forget() | op.Clear() | op.Prune():
                return self._request_change(question)
            case _ if self._snapshots is not None:
                return self._snapshots.answer(question)
        return op.Answer(failure="this rank has no disk tier")

    def _request_change(
        self, request: op.Pin | op.Remove | op.Forget | op.Clear | op.Prune
    ) -> op.Answer:
        match request:
            case op.Pin(name, paths):
                self._change(lambda store: store.pin(name, [ids_of_bytes(path) for path in paths]))
            case op.Remove(ids, keep, mode, size):
                self._remove(ids_of_bytes(ids), keep, mode, size)
            case op.Forget(ids, keep):
                self._change(lambda store: store.forget_beyond(ids_of_bytes(ids), keep))
            case op.Clear(pinned):
                self._change(lambda store: store.clear(pinned=pinned))
            case op.Prune(limit):
                self._change(lambda store: store.prune(limit))
        return op.Answer()

    def _remove(self, ids: Tokens, keep: int, mode: Mode, size: int) -> None:
        if self._rank < size:
            part = PartName(self._namespace, mode, self._rank, size).namespace
            self._change(lambda store: store.for_namespace(part).remove_beyond(ids, keep))

    def _look_up(self, question: op.Find | op.FindAll | op.Verify | op.VerifyState) -> op.Answer:
        match question:
            case op.Find(ids, touch):
                length, checkpoints = self._find(ids, touch=touch)
                return op.Answer(length=length, checkpoints=checkpoints)
            case op.FindAll(each):
                return op.Answer(found=[self._find(ids, touch=False) for ids in each])
        return self._verify(question)

    def _find(self, ids: bytes, *, touch: bool) -> tuple[int, list[int] | None]:
        if self.store is None:
            return 0, []
        try:
            found = self.store.find(ids_of_bytes(ids), touch=touch)
        except StoreError as error:
            log.warning("rank %d: disk lookup failed, nothing is restored: %s", self._rank, error)
            return 0, []
        saved = [one.position for one in found.checkpoints] if self.layout.checkpointed else None
        return found.length, saved

    def _verify(self, question: op.Verify | op.VerifyState) -> op.Answer:
        """Verify the files that rank 0 will load next. Blocks while they are read."""
        try:
            store, ids = self._opened, ids_of_bytes(question.ids)
            found = store.find(ids)
            if isinstance(question, op.Verify):
                if self.layout.specs and found.length < question.end:
                    raise StoreError(f"files after token {found.length} are no longer on disk")
                for piece in found.pieces:
                    if piece.start < question.end and question.start < piece.end:
                        store.verify(piece, ids)
            elif self.layout.checkpointed:
                store.verify_checkpoint(saved_at(len(ids), found), ids)
        except StoreError as error:
            return op.Answer(failure=str(error))
        return op.Answer()

    def _take_outcome(self, key: bytes) -> op.Answer:
        with self._outcomes_lock:
            known = self._outcomes.get(key)
            answer = known.popleft() if known else op.Answer()
            if not known:
                self._outcomes.pop(key, None)
        return answer

    def _note_outcome(self, key: bytes, answer: op.Answer) -> None:
        with self._outcomes_lock:
            self._outcomes.setdefault(key, deque()).append(answer)

    def obey(self, data: bytes) -> bool:
        """Repeat an operation of rank 0, an encoded `Message`; return False if it is `End`."""
        message = _MESSAGE.decode(data)
        self._began_at = time.monotonic()
        for number in message.dropped:
            self._lineages.pop(number, None)
            self._pending.pop(number, None)
            self._states.pop(number, None)
        if isinstance(message.operation, op.End):
            return False
        self._do(message.operation)
        self._began_at = None
        return True

    def close(self) -> None:
        """Wait until all queued files are written to disk, then close the store. Blocks."""
        self._writer.shutdown()
        if self.store is not None:
            self.store.close()

    # -- the objects that numbers name -------------------------------------------------------------

    def lineage(self, number: int) -> Lineage:
        return self._lineages[number]

    def _lineage(self, number: int, length: int) -> Lineage:
        """Return the lineage `number`, after setting its number of positions to `length`."""
        lineage = self._lineages[number]
        lineage.advance(length - lineage.length)
        return lineage

    def _span(self, span: op.Span) -> Span:
        number, start, end = span
        return self._lineages[number], start, end

    def _caches(self, number: int) -> Caches:
        found = self._lineages.get(number)
        return found.caches if found is not None else self._batches[number]

    def _pass(self, number: int, tokens: mx.array) -> None:
        """Feed one token per row, and begin to receive the next ones, which rank 0 draws."""
        logits = self.model(tokens[:, None], cache=self._caches(number))
        drawn = self.share(logits)
        mx.async_eval(drawn)  # type: ignore[no-untyped-call]
        self._pending[number] = drawn

    def share(self, logits: mx.array) -> mx.array:
        """Return the tokens that rank 0 draws in this pass, as a lazy array of shape (rows,).

        The values of this rank's own `logits` are not used; they only let the exchange of tokens
        begin after the pass that computes them.
        """
        none = mx.depends([mx.zeros(len(logits), mx.int32)], [logits])[0]  # after the same pass
        return mx.distributed.all_sum(none, group=self._group)

    # -- operations --------------------------------------------------------------------------------

    @singledispatchmethod
    def _do(self, it: op.Operation) -> None:
        raise TypeError(f"no such operation: {it!r}")

    @_do.register
    def _(self, it: op.Open) -> None:
        failure, self._namespace = None, it.namespace
        if self._open_store is not None:
            try:
                self.store = self._open_store(it)
                self._snapshots = SnapshotParts(self.store, self._write)
            except (StoreError, OSError) as error:
                log.warning("rank %d: no disk tier on this rank: %s", self._rank, error)
                failure = str(error)
        self._note_outcome(op.STORE, op.Answer(ended=True, failure=failure))

    @_do.register
    def _(self, it: op.Feed) -> None:
        lineage = self._lineage(it.lineage, it.length)
        self.model(mx.array(it.tokens, mx.int32)[None], cache=lineage.caches)
        kv.eval_states(lineage.caches)

    @_do.register
    def _(self, it: op.Start) -> None:
        self._pass(it.caches, mx.array(it.tokens, mx.int32))

    @_do.register
    def _(self, it: op.Step) -> None:
        self._pass(it.caches, self._pending[it.caches])

    @_do.register
    def _(self, it: op.Create) -> None:
        self._lineages[it.lineage] = Lineage(self.layout, it.copy_bytes)

    @_do.register
    def _(self, it: op.Rebuild) -> None:
        lineage = self._lineage(it.lineage, it.length)
        lineage.fill([self._span(span) for span in it.sources], it.capacity)

    @_do.register
    def _(self, it: op.Change) -> None:
        change = getattr(self._lineage(it.lineage, it.length), it.verb)
        change() if it.to is None else change(it.to)

    @_do.register
    def _(self, it: op.AppendSpan) -> None:
        self._lineage(it.lineage, it.length).append_span(self._span(it.span))

    @_do.register
    def _(self, it: op.Capture) -> None:
        self._states[it.state] = self._lineage(it.lineage, it.length).capture()

    @_do.register
    def _(self, it: op.Restore) -> None:
        state = None if it.state is None else self._states[it.state]
        self._lineage(it.lineage, it.length).restore(state)

    @_do.register
    def _(self, it: op.Join) -> None:
        others = [self._caches(number) for number in it.others]
        joint = rows.join(self._caches(it.rows), others, batched=it.batched)
        each = [it.rows, *it.others]
        self._pending[it.joint] = mx.concatenate([self._pending[number] for number in each])
        self._batches[it.joint] = joint
        if it.batched:
            self._drop(it.rows)

    @_do.register
    def _(self, it: op.KeepRows) -> None:
        rows.keep_rows(self._batches[it.batch], it.rows)
        self._pending[it.batch] = self._pending[it.batch][mx.array(it.rows)]

    @_do.register
    def _(self, it: op.TakeRow) -> None:
        self._pending[it.lineage] = self._pending[it.batch][it.row : it.row + 1]

    @_do.register
    def _(self, it: op.AppendRow) -> None:
        lineage = self._lineage(it.lineage, it.length)
        linear, opaque = rows.row_tail(self.layout, self._batches[it.batch], it.row, it.count)
        lineage.append(linear, it.count)
        lineage.go_on_to(opaque)

    @_do.register
    def _(self, it: op.DropBatch) -> None:
        self._drop(it.batch)

    @_do.register
    def _(self, it: op.WriteRun) -> None:
        ids, key = ids_of_bytes(it.ids), op.key_of(it.ids, it.start)
        for (number, _, _), length in zip(it.spans, it.lengths, strict=True):
            self._lineage(number, length)
        out = memoryview(bytearray(serialise.run_bytes(self.layout, len(ids) - it.start)))
        spans = [self._span(span) for span in it.spans]
        tensors = serialise.copied_run(self.layout, spans, out)
        self._write(key, lambda store: store.write_run(ids, it.start, tensors))

    @_do.register
    def _(self, it: op.WriteState) -> None:
        ids, key = ids_of_bytes(it.ids), op.key_of(it.ids, None)
        if not self.layout.checkpointed:  # another rank has all states
            self._note_outcome(key, op.Answer(ended=True))
            return
        tensors = serialise.state_tensors(self._states[it.state])
        self._write(key, lambda store: store.write_checkpoint(ids, tensors))

    @_do.register
    def _(self, it: op.Load) -> None:
        lineage = self._lineage(it.lineage, it.length)
        store, ids = self._opened, ids_of_bytes(it.ids)
        found = store.find(ids)
        while self.layout.specs and lineage.length < it.end:
            piece = next(p for p in found.pieces if p.start <= lineage.length < p.end)
            end = min(piece.end, it.end)
            arrays = serialise.load_run(piece.path, self.layout, self._stream)
            part = serialise.row_major(arrays, lineage.length - piece.first, end - piece.first)
            lineage.append(part, end - lineage.length)
        lineage.advance(it.end - lineage.length)

    @_do.register
    def _(self, it: op.LoadState) -> None:
        lineage = self._lineage(it.lineage, it.length)
        if not self.layout.checkpointed:
            return
        store, ids = self._opened, ids_of_bytes(it.ids)
        saved = saved_at(len(ids), store.find(ids))
        lineage.set_state(serialise.load_state(saved.path, self.layout, self._stream))

    @property
    def _opened(self) -> Store:
        if self.store is None:
            raise StoreError("rank 0 uses the disk tier, and this rank has none")
        return self.store

    def _drop(self, batch: int) -> None:
        del self._batches[batch]
        self._pending.pop(batch, None)

    # -- on the writer's thread --------------------------------------------------------------------

    def _write(self, key: bytes, write: Callable[[Store], None]) -> None:
        store = self._opened

        def run() -> None:
            answer = op.Answer(ended=True)
            try:
                write(store)
            except PrefixNotStored as error:
                answer = op.Answer(ended=True, failure=str(error), missing=True)
            except Exception as error:  # noqa: BLE001 - rank 0 waits for an answer
                log.warning("rank %d: disk write failed: %s", self._rank, error)
                answer = op.Answer(ended=True, failure=str(error))
            self._note_outcome(key, answer)

        self._writer.submit(run)

    def _change(self, change: Callable[[Store], object]) -> None:
        if (store := self.store) is None:
            return

        def run() -> None:
            try:
                change(store)
            except StoreError as error:
                log.warning("rank %d: files not pinned or removed: %s", self._rank, error)

        self._writer.submit(run)
