"""Operations that rank 0 tells the other ranks, as messages, and its questions to them.

Each rank is a process that computes a part of the same model; rank 0 also serves the requests. Each
holds its part of

- lineages: the KV of one sequence of tokens, and the current state of layers that keep one state
  for a whole sequence instead of KV for each token, such as recurrent layers;
- checkpoints (called states here): copies of such states, taken at one position;
- batches: caches of mlx-lm for several sequences, called rows, that are decoded together.

Rank 0 names these objects by numbers. Fields named `lineage`, `state`, `batch` and `caches` (a
lineage or a batch) are such numbers. The pending tokens of a lineage or batch are those that were
drawn last, one per row, and that the next step feeds. `length`: number of positions in the lineage
before the operation.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from mlxcache.store.parts import Mode

Ids = bytes
"""Token ids, 4 bytes each: int32 in the byte order of the machines."""

Array = tuple[str, str, list[int]]
"""Name, dtype and shape of a tensor in a file."""

Span = tuple[int, int, int]
"""Number of a lineage, and a range [start, end) of its positions."""


class Operation(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all operations: what a rank is to do, in the order in which rank 0 did it."""


class Open(Operation, frozen=True):
    """Open the disk store. `namespace`: that of the whole model. `limit`: the setting `disk`."""

    namespace: str
    limit: str | int


class OnLineage(Operation, frozen=True):
    """Base of operations on a lineage; most are those of `Lineage`."""

    lineage: int
    length: int


class Feed(OnLineage, frozen=True):
    """Feed tokens, and evaluate the caches."""

    tokens: list[int]


class Start(Operation, frozen=True):
    """Feed `tokens`, one per row, and draw those that are then pending: decoding begins."""

    caches: int
    tokens: list[int]


class Step(Operation, frozen=True):
    """Feed the pending tokens, and draw the next ones."""

    caches: int


class Create(Operation, frozen=True):
    lineage: int
    copy_bytes: int


class Rebuild(OnLineage, frozen=True):
    """`Lineage.fill`."""

    sources: list[Span]
    capacity: int


class Change(OnLineage, frozen=True):
    """Call the method `verb`, with the length `to` unless that is None."""

    verb: Literal["truncate", "pretend", "settle", "rest", "release"]
    to: int | None = None


class AppendSpan(OnLineage, frozen=True):
    span: Span


class Capture(OnLineage, frozen=True):
    """Copy the states; the copy gets the number `state`."""

    state: int


class Restore(OnLineage, frozen=True):
    state: int | None


class Join(Operation, frozen=True):
    """Make the batch `joint` of the rows of `rows` and of the lineages `others`, in this order.

    `rows`: a batch, which is dropped afterwards, if `batched`, else a lineage.
    """

    joint: int
    rows: int
    others: list[int]
    batched: bool


class KeepRows(Operation, frozen=True):
    """Drop all rows of a batch except those with the indices `rows`."""

    batch: int
    rows: list[int]


class TakeRow(Operation, frozen=True):
    """Make the pending token of a row, which the batch still has, that of a lineage."""

    batch: int
    row: int
    lineage: int


class AppendRow(OnLineage, frozen=True):
    """Append the newest `count` positions of a row to a lineage, which gets its states too."""

    batch: int
    row: int
    count: int


class DropBatch(Operation, frozen=True):
    batch: int


class WriteRun(Operation, frozen=True):
    """Write the KV of the positions from `start` to the end of `ids` to disk.

    `spans`: where this KV is. `lengths`: number of positions of each span's lineage.
    """

    ids: Ids
    start: int
    spans: list[Span]
    lengths: list[int]


class WriteState(Operation, frozen=True):
    """Write the checkpoint `state`, taken at the end of `ids`, to disk."""

    ids: Ids
    state: int


class Load(OnLineage, frozen=True):
    """Read the KV of positions [length, end) of `ids` from disk, and append it."""

    ids: Ids
    end: int


class LoadState(OnLineage, frozen=True):
    """Read the states of a lineage from the checkpoint at the end of `ids`."""

    ids: Ids


class End(Operation, frozen=True):
    """The group of ranks ends."""


AnyOperation = (
    Open | Feed | Start | Step | Create | Rebuild | Change | AppendSpan | Capture | Restore | Join
    | KeepRows | TakeRow | AppendRow | DropBatch | WriteRun | WriteState | Load | LoadState | End
)  # fmt: skip


class Message(msgspec.Struct, frozen=True, array_like=True):
    """An operation, and the numbers of objects that the other ranks are to drop before it."""

    operation: AnyOperation
    dropped: list[int] = []


class Question(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all questions and requests, which a rank answers beside its current operation.

    Requests to change files are carried out later, in order; their answers are empty.
    """


class Ping(Question, frozen=True):
    """How long has the current operation run (`age_s`), and how is the machine (`vitals`)?"""


class Find(Question, frozen=True):
    """How much of `ids` is on this rank's disk: `length` and `checkpoints`?

    `touch`: count this as a use of the files found, which delays their eviction.
    """

    ids: Ids
    touch: bool


class FindAll(Question, frozen=True):
    """`Find` for each member of `each`, without a use of the files; the answer has `found`."""

    each: list[Ids]


class Verify(Question, frozen=True):
    """Are the files with the positions [start, end) of `ids` intact? If not: `failure`."""

    ids: Ids
    start: int
    end: int


class VerifyState(Question, frozen=True):
    """Is the checkpoint at the end of `ids` intact? If not: `failure`."""

    ids: Ids


class Outcome(Question, frozen=True):
    """Has the write of the file `key` `ended`, and did it fail (`failure`, `missing`)?

    The rank tells each outcome once, and forgets it. `key`: a result of `key_of`, or `STORE`.
    """

    key: bytes


class Pin(Question, frozen=True):
    """Request `Store.pin`."""

    name: str
    paths: list[Ids]


class Remove(Question, frozen=True):
    """Request to remove the files of `ids` without any of its first `keep` tokens.

    Files that continue them are removed too. `mode`, `size`: the division of the model for which
    the files were written, which may be another one than now; see `PartName`.
    """

    ids: Ids
    keep: int
    mode: Mode
    size: int


class Forget(Question, frozen=True):
    """Request `Store.forget_beyond`: KV that is not finite."""

    ids: Ids
    keep: int


class Clear(Question, frozen=True):
    """Request `Store.clear`."""

    pinned: bool


class Prune(Question, frozen=True):
    """Request `Store.prune`."""

    limit: int | None


class Hold(Question, frozen=True):
    """Request to look up the files of `ids`, of which `ReadRows` and `ReadState` read parts.

    Those questions, and `StateArrays`, name `ids` by `key_of(ids, None)`. A rank remembers the
    files of a few `ids`, those used last.
    """

    ids: Ids


class ReadRows(Question, frozen=True):
    """The bytes (`data`) of a tensor of KV for positions [start, end) of the `ids` held as `key`.

    `name`: that of the tensor in this rank's files.
    """

    key: bytes
    name: str
    start: int
    end: int


class StateArrays(Question, frozen=True):
    """The tensors (`arrays`) of this rank's part of a checkpoint of the `ids` held as `key`."""

    key: bytes
    position: int


class ReadState(Question, frozen=True):
    """Bytes [first, last) of all tensors of `StateArrays`, one after another: `data`."""

    key: bytes
    position: int
    first: int
    last: int


class Upload(Question, frozen=True):
    """Request to keep `data`, at offset `at`, for the file that `Import` will write.

    With `at` = 0, what was kept before is dropped.
    """

    at: int
    data: bytes


class Import(Question, frozen=True):
    """Request to write the uploaded bytes as the KV of positions `start` to the end of `ids`.

    `start` is None for the checkpoint at the end of `ids`. `arrays`: the tensors whose bytes these
    are, in order; if empty, no file is written. The outcome is that of `key_of(ids, start)`.
    """

    ids: Ids
    start: int | None
    arrays: list[Array]


AnyQuestion = (
    Ping | Find | FindAll | Verify | VerifyState | Outcome | Hold | ReadRows | StateArrays
    | ReadState | Upload | Pin | Remove | Forget | Clear | Prune | Import
)  # fmt: skip


class Vitals(msgspec.Struct, frozen=True, array_like=True):
    """State of a rank's machine.

    `pressure`: a number of `PressureLevel`. `footprint_bytes`: memory of the rank's process.
    `disk_used_bytes`, `disk_limit_bytes`: None without a disk tier or a limit.
    """

    pressure: int = 0
    why: str = ""
    footprint_bytes: int = 0
    disk_used_bytes: int | None = None
    disk_limit_bytes: int | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Answer of a rank to a question.

    `length`: number of positions of the prefix on disk. `checkpoints`: positions of its
    checkpoints; None if the rank needs none. `found`: both, for several prefixes. `missing`: the
    write failed because the prefix that its file continues is not on disk; or these token ids are
    not held, see `Hold`.
    """

    age_s: float = 0.0
    length: int = 0
    checkpoints: list[int] | None = None
    ended: bool = False
    failure: str | None = None
    missing: bool = False
    data: bytes = b""
    arrays: list[Array] = []
    found: list[tuple[int, list[int] | None]] = []
    vitals: Vitals = Vitals()


def key_of(ids: bytes, start: int | None) -> bytes:
    """Return the key by which ranks name a file: a run, or the checkpoint at the end of `ids`.

    `ids`: int32, as bytes. `start`: the position at which the run begins; None for a checkpoint.
    """
    return hashlib.blake2b(ids, digest_size=16, salt=str(start).encode()).digest()


STORE = b"store"
"""The key whose outcome is that of `Open`."""
