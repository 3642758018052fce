"""Rank 0: tells the other ranks every operation on KV, and asks them questions."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import mlx.core as mx
import msgspec

from mlxcache.errors import GroupLost, MlxcacheError
from mlxcache.model.kv import Caches, State
from mlxcache.model.lineage import Lineage, Span
from mlxcache.model.lockstep import Lockstep
from mlxcache.ranks import operations as op
from mlxcache.types import Tokens

PULSE_S = 4.0
"""Seconds without an answer to a question of the heartbeat after which a rank counts as lost."""

ANSWER_S = 60.0
"""Seconds without an answer to another question after which a rank counts as lost.

It may read files for that answer.
"""

_PACK = msgspec.msgpack.Encoder()
_ANSWER = msgspec.msgpack.Decoder(op.Answer)


class NumberedState(tuple):  # type: ignore[type-arg]
    """A checkpoint that the other ranks know by its `number`.

    When it is garbage-collected, its number is added to `dropped`, so that they drop it too.
    """

    number: int
    dropped: deque[int]

    def __del__(self) -> None:
        self.dropped.append(self.number)


class Questions:
    """Connections to the other ranks over which one question at a time is asked. Any thread.

    `connections`: in the order of ranks from rank 1. `seconds`: the longest wait for an answer.
    `lost`: why the ranks cannot be asked any more, or None.
    """

    def __init__(self, connections: Sequence[Any], seconds: float):
        self.lost: str | None = None
        self._connections = connections
        self._seconds = seconds
        self._asking = threading.Lock()

    @property
    def count(self) -> int:
        """Number of ranks that can be asked."""
        return len(self._connections)

    def ask(self, questions: Sequence[op.AnyQuestion | None]) -> list[op.Answer]:
        """Ask each rank its question, and return the answers; an empty one for the question None.

        `questions`: one for each connection, in their order, as are the answers. Raises GroupLost
        if a rank does not answer. Every later call then raises it too, because a late answer could
        be taken for that to another question.
        """
        asked = list(zip(self._connections, questions, strict=True))
        with self._asking:
            if self.lost is not None:
                raise GroupLost(self.lost)
            try:
                for connection, question in asked:
                    if question is not None:
                        connection.send_bytes(_PACK.encode(question))
                return [
                    op.Answer() if question is None else self._answer(rank, connection)
                    for rank, (connection, question) in enumerate(asked, 1)
                ]
            except (OSError, EOFError) as error:
                self.lost = f"a rank cannot be reached: {error!r}"
                raise GroupLost(self.lost) from error

    def _answer(self, rank: int, connection: Any) -> op.Answer:
        if not connection.poll(self._seconds):
            self.lost = f"rank {rank} did not answer for {self._seconds:g} s"
            raise GroupLost(self.lost)
        return _ANSWER.decode(connection.recv_bytes())


class Leader(Lockstep):
    """Sender of operations to the other ranks. MLX thread only, except `ask`, `ask_each`, `ping`.

    `group`: MLX's group of all ranks. `operations`, `questions`, `heartbeats`: the connections to
    the other ranks for messages of each kind, in the order of ranks from rank 1. The heartbeat has
    connections of its own, so that no question that takes long delays it.
    """

    divided = True

    def __init__(
        self,
        group: Any,
        operations: Sequence[Any],
        questions: Sequence[Any],
        heartbeats: Sequence[Any] = (),
    ):
        self._group = group
        self._operations = operations
        self._questions = Questions(questions, ANSWER_S)
        self._heartbeats = Questions(heartbeats, PULSE_S)
        self._numbers = count(1)
        self._state_numbers = count(1)
        self._by_caches: dict[int, int] = {}
        self._of: weakref.WeakKeyDictionary[Lineage, int] = weakref.WeakKeyDictionary()
        self._dropped: deque[int] = deque()
        self._dropped_states: deque[int] = deque()

    # -- sending -----------------------------------------------------------------------------------

    def tell(self, operation: op.AnyOperation) -> None:
        """Send one operation to every other rank, without waiting until it is done.

        Raises GroupLost if a rank cannot be reached.
        """
        lineages = [self._dropped.popleft() for _ in range(len(self._dropped))]
        states = [self._dropped_states.popleft() for _ in range(len(self._dropped_states))]
        data = _PACK.encode(op.Message(operation, lineages, states))
        for connection in self._operations:
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise GroupLost(f"a rank cannot be reached: {error}") from error

    def ask(self, question: op.AnyQuestion) -> list[op.Answer]:
        """Ask every other rank, and return the answers in the order of ranks, from rank 1.

        Any thread. Blocks for at most `ANSWER_S` for each rank. Raises GroupLost if a rank does not
        answer, and at every later call.
        """
        return self._questions.ask([question] * self._questions.count)

    def ask_each(self, questions: Sequence[op.AnyQuestion | None]) -> list[op.Answer]:
        """Ask each other rank a question of its own, and return the answers; see `ask`.

        `questions`: in the order of ranks, from rank 1. A rank for which it is None is not asked,
        and its answer is an empty one.
        """
        return self._questions.ask(questions)

    def ping(self) -> list[op.Answer]:
        """Ask every other rank for how long its operation has run; see `op.Ping`.

        Any thread. Blocks for at most `PULSE_S` for each rank. Raises GroupLost if a rank does not
        answer, or did not answer a question of `ask`.
        """
        if self._questions.lost is not None:
            raise GroupLost(self._questions.lost)
        return self._heartbeats.ask([op.Ping()] * self._heartbeats.count)

    def check(self, error: Exception) -> None:
        if not isinstance(error, MlxcacheError):
            raise GroupLost(f"an operation failed on rank 0: {error!r}") from error

    def number(self, lineage: Lineage) -> int:
        return self._of[lineage]

    def _span(self, span: Span) -> op.Span:
        owner, start, end = span
        return self._of[owner], start, end

    def prepare(self, pool_bytes: int) -> None:
        self.tell(op.Prepare(pool_bytes))

    # -- passes ------------------------------------------------------------------------------------

    def feed(self, lineage: Lineage, ids: Tokens) -> None:
        self.tell(op.Feed(self.number(lineage), lineage.length, ids.tolist()))

    def start(self, caches: Caches, tokens: Sequence[int]) -> None:
        self.tell(op.Start(self._by_caches[id(caches)], list(tokens)))

    def step(self, caches: Caches) -> None:
        self.tell(op.Step(self._by_caches[id(caches)]))

    def share(self, drawn: mx.array) -> mx.array:
        return mx.distributed.all_sum(drawn.astype(mx.int32), group=self._group)

    # -- lineages ----------------------------------------------------------------------------------

    def create(self, lineage: Lineage) -> None:
        number = next(self._numbers)
        self._of[lineage] = number
        self._by_caches[id(lineage.caches)] = number
        weakref.finalize(lineage, self._dropped.append, number)
        self.tell(op.Create(number, lineage.copy_bytes))

    def rebuild(self, lineage: Lineage, sources: Sequence[Span], capacity: int) -> None:
        spans = [self._span(span) for span in sources]
        self.tell(op.Rebuild(self.number(lineage), lineage.length, spans, capacity))

    def truncate(self, lineage: Lineage, length: int) -> None:
        self.tell(op.Truncate(self.number(lineage), lineage.length, length))

    def pretend(self, lineage: Lineage, length: int) -> None:
        self.tell(op.Pretend(self.number(lineage), lineage.length, length))

    def append_span(self, lineage: Lineage, span: Span) -> None:
        self.tell(op.AppendSpan(self.number(lineage), lineage.length, self._span(span)))

    def capture(self, lineage: Lineage, state: State) -> State:
        numbered = NumberedState(state)
        numbered.number = next(self._state_numbers)
        numbered.dropped = self._dropped_states
        self.tell(op.Capture(self.number(lineage), lineage.length, numbered.number))
        return numbered

    def restore(self, lineage: Lineage, state: State | None) -> None:
        number = None if state is None else _number_of(state)
        self.tell(op.Restore(self.number(lineage), lineage.length, number))

    def settle(self, lineage: Lineage) -> None:
        self.tell(op.Settle(self.number(lineage), lineage.length))

    def rest(self, lineage: Lineage) -> None:
        self._by_caches[id(lineage.caches)] = self.number(lineage)
        self.tell(op.Rest(self.number(lineage), lineage.length))

    def release(self, lineage: Lineage) -> None:
        self.tell(op.Release(self.number(lineage), lineage.length))

    # -- batches -----------------------------------------------------------------------------------

    def join(self, joint: Caches, rows: Caches, others: Sequence[Caches], batched: bool) -> None:
        number = next(self._numbers)
        each = [self._by_caches[id(one)] for one in others]
        self.tell(op.Join(number, self._by_caches[id(rows)], each, batched))
        if batched:
            del self._by_caches[id(rows)]
        self._by_caches[id(joint)] = number

    def keep_rows(self, batch: Caches, rows: Sequence[int]) -> None:
        self.tell(op.KeepRows(self._by_caches[id(batch)], list(rows)))

    def take_row(self, batch: Caches, row: int, lineage: Lineage) -> None:
        self.tell(op.TakeRow(self._by_caches[id(batch)], row, self.number(lineage)))

    def append_row(self, batch: Caches, row: int, lineage: Lineage, count: int) -> None:
        number = self._by_caches[id(batch)]
        self.tell(op.AppendRow(number, row, self.number(lineage), lineage.length, count))

    def drop_batch(self, batch: Caches) -> None:
        self.tell(op.DropBatch(self._by_caches.pop(id(batch))))

    # -- files -------------------------------------------------------------------------------------

    def write_run(self, ids: Tokens, start: int, spans: Sequence[Span]) -> None:
        lengths = [owner.length for owner, _, _ in spans]
        self.tell(op.WriteRun(ids.tobytes(), start, [self._span(one) for one in spans], lengths))

    def write_state(self, ids: Tokens, state: State) -> None:
        self.tell(op.WriteState(ids.tobytes(), _number_of(state)))

    def load(self, lineage: Lineage, ids: Tokens, start: int, end: int) -> None:
        self.tell(op.Load(self.number(lineage), start, ids.tobytes(), end))

    def load_state(self, lineage: Lineage, ids: Tokens) -> None:
        self.tell(op.LoadState(self.number(lineage), lineage.length, ids.tobytes()))


def _number_of(state: State) -> int:
    assert isinstance(state, NumberedState)
    return state.number
