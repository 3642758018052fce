"""Operations on KV and passes of a model that the other ranks of a group repeat.

A model that is divided among several processes, called ranks, computes a forward pass only if all
of them make it. One rank decides what is done; the others repeat each of its operations, in the
same order, on their own part of the KV. This module names the operations. MLX thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from mlxcache.model.kv import Caches, State
    from mlxcache.model.lineage import Lineage, Span


class Lockstep:
    """What is told to other ranks about each operation: nothing, as long as there are none.

    Every method describes one operation, and none makes it. Those of passes must be called before
    the operation, the others before or after it. `caches` are those of a lineage or of a batch.
    Methods raise GroupLost if another rank cannot be reached. `divided`: there are other ranks.
    """

    divided = False

    def check(self, error: Exception) -> None:
        """Raise GroupLost if `error`, raised by an operation, leaves the ranks in different states.

        To be called wherever such an error would be handled as that of one request.
        """

    def prepare(self, pool_bytes: int) -> None:
        """The device is prepared; see `device.prepare`."""

    # -- passes ------------------------------------------------------------------------------------

    def feed(self, lineage: Lineage, tokens: Sequence[int]) -> None:
        """Tokens are fed at the end of a lineage; then its caches, and no logits, are evaluated."""

    def start(self, caches: Caches, tokens: Sequence[int]) -> None:
        """Decoding starts: one token per row is fed, and the next ones are drawn."""

    def step(self, caches: Caches) -> None:
        """The pending tokens of the rows of `caches` are fed, and the next ones are drawn."""

    def share(self, drawn: mx.array) -> mx.array:
        """Return the tokens of a pass, shape (rows,), as all ranks will feed them.

        The result is lazy. To be evaluated together with the logits of the pass.
        """
        return drawn

    # -- lineages ----------------------------------------------------------------------------------

    def create(self, lineage: Lineage) -> None:
        """A lineage was made. Every other operation names only lineages that were told here."""

    def rebuild(self, lineage: Lineage, sources: Sequence[Span], capacity: int) -> None:
        """The buffers of a lineage are replaced by copies of `sources`; see `Lineage.fill`."""

    def truncate(self, lineage: Lineage, length: int) -> None:
        """The positions of a lineage from `length` on are dropped."""

    def pretend(self, lineage: Lineage, length: int) -> None:
        """The length of a lineage is set without feeding it; see `Lineage.pretend`."""

    def append_span(self, lineage: Lineage, span: Span) -> None:
        """A range of another lineage is appended to a lineage."""

    def capture(self, lineage: Lineage, state: State) -> State:
        """Return `state`, a new checkpoint of a lineage, as the object to be kept."""
        return state

    def restore(self, lineage: Lineage, state: State | None) -> None:
        """The states of a lineage are set to those of a checkpoint, or left as they are."""

    def settle(self, lineage: Lineage) -> None:
        """The states of a lineage are copied into buffers of their own."""

    def rest(self, lineage: Lineage) -> None:
        """The states of a lineage are dropped, and its caches are new objects now."""

    def release(self, lineage: Lineage) -> None:
        """The buffers of a lineage are released."""

    # -- batches -----------------------------------------------------------------------------------

    def join(self, joint: Caches, rows: Caches, others: Sequence[Caches], batched: bool) -> None:
        """A batch `joint` was made of `rows` and `others`; see `rows.join`.

        A batch `rows` is not used any more.
        """

    def keep_rows(self, batch: Caches, rows: Sequence[int]) -> None:
        """All rows of a batch but those with the indices `rows` were dropped."""

    def take_row(self, batch: Caches, row: int, lineage: Lineage) -> None:
        """The pending token of a batch's row is continued over the caches of a lineage."""

    def append_row(self, batch: Caches, row: int, lineage: Lineage, count: int) -> None:
        """The newest `count` positions of a batch's row, and its states, go to a lineage."""

    def drop_batch(self, batch: Caches) -> None:
        """A batch is not used any more."""

    # -- files -------------------------------------------------------------------------------------

    def write_run(self, ids: Any, start: int, spans: Sequence[Span]) -> None:
        """The KV of the positions from `start` to the end of `ids` is written to disk.

        `spans`: the ranges of lineages that hold it.
        """

    def write_state(self, ids: Any, state: State) -> None:
        """A checkpoint at the end of `ids` is written to disk."""

    def load(self, lineage: Lineage, ids: Any, start: int, end: int) -> None:
        """Positions [start, end) of a lineage were read from disk, where they belong to `ids`."""

    def load_state(self, lineage: Lineage, ids: Any) -> None:
        """The states of a lineage were read from the checkpoint on disk at the end of `ids`."""


ALONE = Lockstep()
"""Of a process that has the whole model."""
