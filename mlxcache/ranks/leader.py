"""Rank 0: tells the other ranks every operation on KV, and asks them questions."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import mlx.core as mx
import msgspec

from mlxcache.errors import GroupLost, StoreError
from mlxcache.ranks import operations as op

PULSE_S = 4.0
"""Seconds without an answer to a question of the heartbeat after which a rank counts as lost."""

ANSWER_S = 60.0
"""Seconds without an answer to another question after which a rank counts as lost.

It may read files for that answer.
"""

_PACK = msgspec.msgpack.Encoder()
_ANSWER = msgspec.msgpack.Decoder(op.Answer)


def checked(answers: list[op.Answer]) -> list[op.Answer]:
    """Return the answers of the ranks from 1. Raises StoreError with the failure of one."""
    for rank, answer in enumerate(answers, 1):
        if answer.failure is not None:
            raise StoreError(f"Rank {rank}: {answer.failure}")
    return answers


class Questions:
    """Connections to the other ranks over which one question at a time is asked. Any thread.

    `lost`: why the ranks cannot be asked any more, or None.
    """

    def __init__(self, connections: Sequence[Any], seconds: float):
        self.lost: str | None = None
        self._connections = connections
        self._seconds = seconds
        self._asking = threading.Lock()

    @property
    def count(self) -> int:
        return len(self._connections)

    def ask(self, questions: Sequence[op.AnyQuestion | None]) -> list[op.Answer]:
        """Ask each rank its question, and return the answers; an empty one for the question None.

        Raises GroupLost if a rank does not answer. Every later call then raises it too, because a
        late answer could be taken for that to another question.
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


class Leader:
    """Sender of operations to the other ranks. MLX thread only, except `ask`, `ask_each`, `ping`.

    The heartbeat has connections of its own, so that no question that takes long delays it.
    `dropped`: numbers of objects that this rank has dropped, which the others are to drop before
    the next operation.
    """

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
        self.dropped: deque[int] = deque()

    def next_number(self) -> int:
        return next(self._numbers)

    def share(self, drawn: mx.array) -> mx.array:
        """Send the tokens `drawn`, shape (rows,), to all ranks, which feed them next.

        Returns the same tokens as a lazy array, whose evaluation sends them. The caller must
        evaluate it together with the log-probabilities of the pass.
        """
        return mx.distributed.all_sum(drawn.astype(mx.int32), group=self._group)

    def tell(self, operation: op.AnyOperation) -> None:
        """Send one operation to every other rank, without waiting until it is done."""
        dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        data = _PACK.encode(op.Message(operation, dropped))
        for connection in self._operations:
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise GroupLost(f"a rank cannot be reached: {error}") from error

    def ask(self, question: op.AnyQuestion) -> list[op.Answer]:
        """Ask every other rank; return the answers from rank 1. See `ask_each`."""
        return self.ask_each([question] * self._questions.count)

    def ask_each(self, questions: Sequence[op.AnyQuestion | None]) -> list[op.Answer]:
        """Ask each other rank a question of its own, or None; see `Questions.ask`. Any thread.

        Blocks. Raises StoreError if one does not answer: `Watch` reports the loss.
        """
        try:
            return self._questions.ask(questions)
        except GroupLost as error:
            raise StoreError(f"The other ranks cannot be reached: {error}.") from error

    def ping(self) -> list[op.Answer]:
        """Ask every other rank the question `Ping` over the heartbeat. Any thread."""
        if self._questions.lost is not None:
            raise GroupLost(self._questions.lost)
        return self._heartbeats.ask([op.Ping()] * self._heartbeats.count)
