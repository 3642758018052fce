"""Operations that rank 0 tells the other ranks, as messages. Numbers name lineages and the like.

Tokens are ids. Fields named `lineage`, `caches` and `batch` are numbers of objects that an earlier
operation made; lineages and batches share one sequence of numbers, states have their own. Where an
operation has `length`, it is the number of positions in the lineage before the operation.
"""

from __future__ import annotations

import hashlib

import msgspec

Span = tuple[int, int, int]
"""Number of a lineage, and a range [start, end) of its positions."""


class Operation(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all operations."""


class Open(Operation, frozen=True):
    """The store is opened. `namespace`: that of the whole model. `limit`: setting `disk`."""

    namespace: str
    limit: str | int


class Feed(Operation, frozen=True):
    """Tokens are fed at the end of a lineage, and its caches are evaluated."""

    lineage: int
    length: int
    tokens: list[int]


class Start(Operation, frozen=True):
    """Decoding starts over `caches`, with one token per row."""

    caches: int
    tokens: list[int]


class Step(Operation, frozen=True):
    """The pending tokens of `caches` are fed, and the next ones drawn."""

    caches: int


class Create(Operation, frozen=True):
    """A lineage is made. `copy_bytes`: see `Lineage`."""

    lineage: int
    copy_bytes: int


class Rebuild(Operation, frozen=True):
    """The buffers of a lineage are replaced by copies of `sources`."""

    lineage: int
    length: int
    sources: list[Span]
    capacity: int


class Truncate(Operation, frozen=True):
    """The positions from `to` on are dropped."""

    lineage: int
    length: int
    to: int


class Pretend(Operation, frozen=True):
    """The number of positions becomes `to`, with any values."""

    lineage: int
    length: int
    to: int


class AppendSpan(Operation, frozen=True):
    """A range of another lineage is appended."""

    lineage: int
    length: int
    span: Span


class Capture(Operation, frozen=True):
    """The states of a lineage are copied; the copy gets the number `state`."""

    lineage: int
    length: int
    state: int


class Restore(Operation, frozen=True):
    """The states of a lineage are set to a copy; None leaves them."""

    lineage: int
    length: int
    state: int | None


class Settle(Operation, frozen=True):
    """The states of a lineage are copied into buffers of their own."""

    lineage: int
    length: int


class Rest(Operation, frozen=True):
    """The states of a lineage are dropped."""

    lineage: int
    length: int


class Release(Operation, frozen=True):
    """The buffers of a lineage are released."""

    lineage: int
    length: int


class Join(Operation, frozen=True):
    """The batch `joint` is made of the rows of `rows` and `others`."""

    joint: int
    rows: int
    others: list[int]
    batched: bool


class KeepRows(Operation, frozen=True):
    """All rows of a batch but `rows` are dropped."""

    batch: int
    rows: list[int]


class TakeRow(Operation, frozen=True):
    """The pending token of a batch's row is continued over a lineage."""

    batch: int
    row: int
    lineage: int


class AppendRow(Operation, frozen=True):
    """The newest `count` positions of a batch's row, and its states, are appended to a lineage."""

    batch: int
    row: int
    lineage: int
    length: int
    count: int


class DropBatch(Operation, frozen=True):
    """A batch is dropped."""

    batch: int


class WriteRun(Operation, frozen=True):
    """The KV of the positions from `start` to the end of `ids` is written to disk.

    `ids`: int32, as bytes. `spans`: where it is; `lengths`: of these lineages.
    """

    ids: bytes
    start: int
    spans: list[Span]
    lengths: list[int]


class WriteState(Operation, frozen=True):
    """The checkpoint `state`, at the end of `ids`, is written to disk. `ids`: int32, as bytes."""

    ids: bytes
    state: int


class Load(Operation, frozen=True):
    """Positions of `ids` from `length` to `end` are read from disk into a lineage.

    `ids`: int32, as bytes.
    """

    lineage: int
    length: int
    ids: bytes
    end: int


class LoadState(Operation, frozen=True):
    """The states of a lineage are read from the checkpoint at the end of `ids`.

    `ids`: int32, as bytes.
    """

    lineage: int
    length: int
    ids: bytes


class End(Operation, frozen=True):
    """The group ends."""


AnyOperation = (
    Open | Feed | Start | Step | Create | Rebuild | Truncate | Pretend | AppendSpan | Capture
    | Restore | Settle | Rest | Release | Join | KeepRows | TakeRow | AppendRow | DropBatch
    | WriteRun | WriteState | Load | LoadState | End
)  # fmt: skip
"""Every operation."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """An operation, and the numbers of what rank 0 has dropped before it."""

    operation: AnyOperation
    lineages: list[int] = []
    states: list[int] = []


class Question(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all questions, which are answered while an operation runs. `ids`: int32, as bytes."""


class Ping(Question, frozen=True):
    """Question: since when does the current operation run?"""


class Find(Question, frozen=True):
    """Question: how much of the prefix `ids` is on this rank's disk? `touch`: see `Store.find`."""

    ids: bytes
    touch: bool


class Verify(Question, frozen=True):
    """Question: are the files of the positions [start, end) of `ids` intact?

    `late`: see `Store.verify`.
    """

    ids: bytes
    start: int
    end: int
    late: bool


class VerifyState(Question, frozen=True):
    """Question: is the checkpoint at the end of `ids` intact?"""

    ids: bytes


class Outcome(Question, frozen=True):
    """Question: what became of the file `key`? An answer is given once for each write of it."""

    key: bytes


class Pin(Question, frozen=True):
    """The files of `paths` are pinned under a name; see `Store.pin`."""

    name: str
    paths: list[bytes]


class Remove(Question, frozen=True):
    """Files with none of the first `keep` tokens of `ids` are removed from disk."""

    ids: bytes
    keep: int


class Forget(Question, frozen=True):
    """The KV of `ids` beyond `keep` tokens is removed from disk because it is not finite."""

    ids: bytes
    keep: int


class Clear(Question, frozen=True):
    """All files are removed from disk, pinned ones only if `pinned`."""

    pinned: bool


class Prune(Question, frozen=True):
    """Damaged files are removed from disk, and others down to `limit` bytes; see `Store.prune`."""

    limit: int | None


AnyQuestion = Ping | Find | Verify | VerifyState | Outcome | Pin | Remove | Forget | Clear | Prune
"""Every question. Those after `Outcome` change files, later and in order; the answer is empty."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Answer of a rank.

    `age_s`: seconds that the current operation has run. `length`: positions of the prefix on disk.
    `checkpoints`: positions of its checkpoints; None if the rank needs none. `ended`: the write has
    ended. `failure`: why it or the verification failed, or None; `missing`: because the prefix is
    not on disk.
    """

    age_s: float = 0.0
    length: int = 0
    checkpoints: list[int] | None = None
    ended: bool = False
    failure: str | None = None
    missing: bool = False


def key_of(ids: bytes, start: int | None) -> bytes:
    """Return the key of the run of the positions from `start` of `ids`, or of a checkpoint."""
    return hashlib.blake2b(ids, digest_size=16, salt=str(start).encode()).digest()


STORE = b"store"
"""The key whose outcome is that of `Open`."""
