"""Operations that rank 0 tells the other ranks, as messages, and its questions to them.

Each rank is a process that computes a part of the same model; rank 0 also serves the requests. Each
holds its part of

- lineages: the KV of one sequence of tokens, and the current state of layers that keep one state
  for a whole sequence instead of KV for each token, such as recurrent layers;
- checkpoints (called states here): copies of such states, taken at one position;
- batches: caches of mlx-lm for several sequences, called rows, that are decoded together.

Rank 0 names these objects by numbers of its choice. Fields named `lineage`, `caches` and `batch`
are numbers of objects that an earlier operation made; `caches` is a lineage or a batch. Lineages
and batches share one sequence of numbers, checkpoints have their own. The pending tokens of a
lineage or batch are those that were drawn last, one per row, and that the next step feeds. Tokens
are ids. Where an operation has `length`, it is the number of positions in the lineage before the
operation.
"""

from __future__ import annotations

import hashlib

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
    """Operation: open the disk store.

    `namespace`: that of the whole model. `limit`: the setting `disk`.
    """

    namespace: str
    limit: str | int


class Feed(Operation, frozen=True):
    """Operation: feed `tokens` to a lineage after its `length` positions; evaluate its caches."""

    lineage: int
    length: int
    tokens: list[int]


class Start(Operation, frozen=True):
    """Operation: feed `tokens`, one per row of a lineage or batch, and draw the next ones.

    `caches`: number of the lineage or batch. The tokens drawn become its pending ones: its decoding
    begins.
    """

    caches: int
    tokens: list[int]


class Step(Operation, frozen=True):
    """Operation: feed the pending tokens of the lineage or batch `caches`; draw the next ones."""

    caches: int


class Create(Operation, frozen=True):
    """Operation: make an empty lineage with the number `lineage`.

    `copy_bytes`: most bytes that it copies in one evaluation, unless one array has more.
    """

    lineage: int
    copy_bytes: int


class Rebuild(Operation, frozen=True):
    """Operation: replace the buffers of a lineage by copies of the ranges `sources`.

    `length`: number of its positions before. `capacity`: number of positions for which the new
    buffers have room.
    """

    lineage: int
    length: int
    sources: list[Span]
    capacity: int


class Truncate(Operation, frozen=True):
    """Operation: drop the positions from `to` to `length`, its end, of a lineage."""

    lineage: int
    length: int
    to: int


class Pretend(Operation, frozen=True):
    """Operation: change the number of positions of a lineage from `length` to `to`.

    KV and states may have any values: this serves to measure the time of a pass after `to` tokens.
    """

    lineage: int
    length: int
    to: int


class AppendSpan(Operation, frozen=True):
    """Operation: append a copy of the range `span` of another lineage to a lineage.

    `length`: number of positions of the lineage before.
    """

    lineage: int
    length: int
    span: Span


class Capture(Operation, frozen=True):
    """Operation: copy the states of a lineage; the copy gets the number `state`.

    `length`: number of positions of the lineage.
    """

    lineage: int
    length: int
    state: int


class Restore(Operation, frozen=True):
    """Operation: set the states of a lineage to the copy `state`; None leaves them as they are.

    `length`: number of positions of the lineage.
    """

    lineage: int
    length: int
    state: int | None


class Settle(Operation, frozen=True):
    """Operation: copy the states of a lineage into buffers of their own.

    Before, they may be views that keep larger buffers in memory. `length`: number of positions of
    the lineage.
    """

    lineage: int
    length: int


class Rest(Operation, frozen=True):
    """Operation: drop the states of a lineage of `length` positions; its KV stays."""

    lineage: int
    length: int


class Release(Operation, frozen=True):
    """Operation: release the buffers of a lineage of `length` positions, not used any more."""

    lineage: int
    length: int


class Join(Operation, frozen=True):
    """Operation: make the batch `joint` of the rows of `rows` and of all `others`, in this order.

    `joint`: number of the new batch. `rows`: number of a batch, which is dropped afterwards, if
    `batched`, else of a lineage. `others`: numbers of lineages.
    """

    joint: int
    rows: int
    others: list[int]
    batched: bool


class KeepRows(Operation, frozen=True):
    """Operation: drop all rows of a batch except those with the indices `rows`."""

    batch: int
    rows: list[int]


class TakeRow(Operation, frozen=True):
    """Operation: from now on, decode row `row` of a batch over a lineage, not in the batch.

    The row's pending token becomes that of the lineage. The batch still has the row afterwards.
    """

    batch: int
    row: int
    lineage: int


class AppendRow(Operation, frozen=True):
    """Operation: append the newest `count` positions of the row `row` of a batch to a lineage.

    `length`: number of positions of the lineage before. The states of the lineage become those of
    the row.
    """

    batch: int
    row: int
    lineage: int
    length: int
    count: int


class DropBatch(Operation, frozen=True):
    """Operation: drop a batch."""

    batch: int


class WriteRun(Operation, frozen=True):
    """Operation: write the KV of the positions from `start` to the end of `ids` to disk.

    `ids`: int32, as bytes. `spans`: the ranges of lineages that have this KV. `lengths`: for each
    span the number of positions that its lineage has in all.
    """

    ids: Ids
    start: int
    spans: list[Span]
    lengths: list[int]


class WriteState(Operation, frozen=True):
    """Operation: write the checkpoint `state`, taken at the end of `ids`, to disk.

    `ids`: int32, as bytes.
    """

    ids: Ids
    state: int


class Load(Operation, frozen=True):
    """Operation: read the KV of positions [length, end) of `ids` from disk, and append it.

    It is appended to `lineage`. `length`: number of positions of the lineage before. `ids`: int32,
    as bytes.
    """

    lineage: int
    length: int
    ids: Ids
    end: int


class LoadState(Operation, frozen=True):
    """Operation: read the states of a lineage from the checkpoint at the end of `ids`.

    `ids`: int32, as bytes. `length`: number of positions of the lineage.
    """

    lineage: int
    length: int
    ids: Ids


class End(Operation, frozen=True):
    """Operation: end, because the group of ranks ends."""


AnyOperation = (
    Open | Feed | Start | Step | Create | Rebuild | Truncate | Pretend | AppendSpan
    | Capture | Restore | Settle | Rest | Release | Join | KeepRows | TakeRow | AppendRow
    | DropBatch | WriteRun | WriteState | Load | LoadState | End
)  # fmt: skip
"""Every operation."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """An operation, and the numbers of objects that the other ranks are to drop before it."""

    operation: AnyOperation
    dropped: list[int] = []


class Question(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all questions and requests, which a rank answers beside its current operation."""


class Ping(Question, frozen=True):
    """Question: for how many seconds has the current operation run, and how is the rank's machine?

    The answer has `age_s` and `vitals`.
    """


class Find(Question, frozen=True):
    """Question: how many of the leading tokens of `ids` are on this rank's disk?

    The answer has `length` and `checkpoints`. `touch`: count this as a use of the files found,
    which delays their eviction.
    """

    ids: Ids
    touch: bool


class FindAll(Question, frozen=True):
    """Question: how many leading tokens of each member of `each` are on this rank's disk?

    The answer has `found`. `each`: token ids, int32 as bytes. Does not count as a use of the files,
    which would delay their eviction.
    """

    each: list[Ids]


class Verify(Question, frozen=True):
    """Question: are this rank's files with the positions [start, end) of `ids` intact?

    If one of them is not, the answer has `failure`. `late`: verify the tensors of sliding windows
    too.
    """

    ids: Ids
    start: int
    end: int
    late: bool


class VerifyState(Question, frozen=True):
    """Question: is the checkpoint at the end of `ids` intact? If not, the answer has `failure`."""

    ids: Ids


class Outcome(Question, frozen=True):
    """Question: has the write of the file `key` ended, and did it fail?

    The answer has `ended`, `failure` and `missing`. The rank tells the outcome of each write once,
    and forgets it. `key`: a result of `key_of`, or `STORE` to ask whether the rank has opened its
    store; see `Open`.
    """

    key: bytes


class Pin(Question, frozen=True):
    """Request: pin the files of `paths` under a name; see `Store.pin`.

    `paths`: the token ids of each, int32 as bytes.
    """

    name: str
    paths: list[bytes]


class Remove(Question, frozen=True):
    """Request: remove from disk the files of `ids` that hold none of its first `keep` tokens.

    Files that continue them are removed too. `mode`, `size`: the division of the model for which
    the files were written, which may be another one than now; see `PartName`.
    """

    ids: Ids
    keep: int
    mode: Mode
    size: int


class Forget(Question, frozen=True):
    """Request: remove the KV of `ids` beyond `keep` tokens from disk, because it is not finite.

    See `Store.forget_beyond`.
    """

    ids: Ids
    keep: int


class Clear(Question, frozen=True):
    """Request: remove all files from disk, except pinned files unless `pinned` is True."""

    pinned: bool


class Prune(Question, frozen=True):
    """Request: remove damaged files from disk, then evict files down to `limit` bytes in total.

    If `limit` is None, no file is evicted. See `Store.prune`.
    """

    limit: int | None


class Hold(Question, frozen=True):
    """Request: look up the files of `ids`, of which `ReadRows` and `ReadState` will read parts.

    Those questions, and `StateArrays`, name `ids` by the key `key_of(ids, None)`. A rank remembers
    the files of a few `ids`, those used last.
    """

    ids: Ids


class ReadRows(Question, frozen=True):
    """Question: the bytes of a tensor of KV for positions [start, end) of the `ids` held as `key`.

    The answer has `data`. `key`: see `Hold`. `name`: that of the tensor in this rank's files.
    """

    key: bytes
    name: str
    start: int
    end: int


class StateArrays(Question, frozen=True):
    """Question: name, dtype and shape of each tensor of a checkpoint; the answer has `arrays`.

    It is this rank's part of the checkpoint at `position` of the `ids` held as `key`; see `Hold`.
    """

    key: bytes
    position: int


class ReadState(Question, frozen=True):
    """Question: bytes [first, last) of all tensors of a checkpoint, one after another.

    The answer has `data`. `key`, `position`, order of the tensors: as in `StateArrays`.
    """

    key: bytes
    position: int
    first: int
    last: int


class Upload(Question, frozen=True):
    """Request: keep `data`, at offset `at`, for the file that `Import` will write.

    With `at` = 0, what was kept before is dropped.
    """

    at: int
    data: bytes


class Import(Question, frozen=True):
    """Request: write the uploaded bytes as the KV of positions `start` to the end of `ids`.

    `start` is None for the checkpoint at the end of `ids`. `arrays`: name, dtype and shape of the
    tensors whose bytes these are, in order; if empty, no file is written. The outcome is told under
    `key_of(ids, start)`; see `Outcome`.
    """

    ids: Ids
    start: int | None
    arrays: list[Array]


AnyQuestion = (
    Ping | Find | FindAll | Verify | VerifyState | Outcome | Hold | ReadRows | StateArrays
    | ReadState | Upload | Pin | Remove | Forget | Clear | Prune | Import
)  # fmt: skip
"""Every question. Those after `Upload` change files, later and in order."""


class Vitals(msgspec.Struct, frozen=True, array_like=True):
    """State of a rank's machine.

    `pressure`: its memory pressure, a number of `PressureLevel`; `why`: the observation that led to
    it. `footprint_bytes`: memory of the rank's process. `disk_used_bytes`, `disk_limit_bytes`: of
    its disk tier, None if there is none or it has no limit.
    """

    pressure: int = 0
    why: str = ""
    footprint_bytes: int = 0
    disk_used_bytes: int | None = None
    disk_limit_bytes: int | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Answer of a rank to a question.

    `age_s`: seconds that the current operation has run. `length`: number of positions of
    the prefix on disk. `checkpoints`: positions of its checkpoints; None if the rank needs none.
    `ended`: the write that was asked about has ended. `failure`: why the write, the verification or
    the reading of a file failed, or None. `missing`: the write failed because the prefix that its
    file continues is not on disk; or these token ids are not held, see `Hold`. `data`: the bytes
    that were asked for. `arrays`: name, dtype and shape of each tensor that was asked about.
    `found`: for each prefix that was asked about, its `length` and `checkpoints`. `vitals`: state
    of the rank's machine, in answers to `Ping`.
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
