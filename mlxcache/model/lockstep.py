"""Operations on KV and passes of a model that the other ranks of a group repeat.

A model that is divided among several processes, called ranks, computes a forward pass only if all
of them make it. One rank decides what is done; the others repeat each of its operations, in the
same order, on their own part of the KV. This module names the operations. MLX thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from mlxcache.model.kv import Caches, State
    from mlxcache.model.lineage import Lineage, Span
    from mlxcache.types import Tokens


class Lockstep:
    """Announcements of operations to the other ranks of a divided model.

    This class is for a model without other ranks: its methods announce nothing. A subclass sends
    the announcements. Each method announces one operation, which the caller makes itself. A
    method that announces a pass must be called before the pass, any other method before or after
    its operation. An argument `caches` is the list of caches of a lineage or of a batch. The
    methods of the subclass raise GroupLost if another rank cannot be reached. `divided`: True if
    there are other ranks.
    """

    divided = False

    def check(self, error: Exception) -> None:
        """Raise GroupLost if `error`, raised by an operation, leaves the ranks in different states.

        The caller is to call it before it handles `error` as that of one request. Without other
        ranks it never raises.
        """

    def prepare(self, pool_bytes: int) -> None:
        """Announce that MLX's memory is set up, as `device.prepare` does it.

        `pool_bytes`: the limit of MLX's pool of freed buffers, in bytes.
        """

    # -- passes ------------------------------------------------------------------------------------

    def feed(self, lineage: Lineage, ids: Tokens) -> None:
        """Announce that the token ids `ids` are fed to the model, at the end of a lineage.

        The caller evaluates the lineage's caches after the pass, but not the logits.
        """

    def start(self, caches: Caches, tokens: Sequence[int]) -> None:
        """Announce the first pass of decoding over `caches`.

        The pass feeds `tokens`, one token id per row, and draws the next token of each row.
        """

    def step(self, caches: Caches) -> None:
        """Announce a step of decoding over `caches`.

        It feeds the pending token of each row, and draws the next one.
        """

    def share(self, drawn: mx.array) -> mx.array:
        """Send the tokens `drawn` on rank 0, shape (rows,), to all ranks, which feed them next.

        Called on rank 0. Returns the same tokens as a lazy array, whose evaluation sends them. The
        caller must evaluate it together with the log-probabilities of the pass.
        """
        return drawn

    # -- lineages ----------------------------------------------------------------------------------

    def create(self, lineage: Lineage) -> None:
        """Announce a new lineage. Every other operation names only lineages that were announced."""

    def rebuild(self, lineage: Lineage, sources: Sequence[Span], capacity: int) -> None:
        """Announce that copies of `sources` replace the buffers of a lineage; see `Lineage.fill`.

        `sources`: ranges of positions of lineages, possibly of `lineage` itself; each begins at the
        position where the one before ends. `capacity`: the number of positions of the new buffers.
        """

    def truncate(self, lineage: Lineage, length: int) -> None:
        """Announce that the positions of a lineage from `length` on are dropped."""

    def pretend(self, lineage: Lineage, length: int) -> None:
        """Announce that the length of a lineage is set to `length` without feeding tokens.

        Its KV and states then hold any values, for measuring a pass at that length; see
        `Lineage.pretend`.
        """

    def append_span(self, lineage: Lineage, span: Span) -> None:
        """Announce that the KV of `span`, a range of another lineage, is appended to `lineage`."""

    def capture(self, lineage: Lineage, state: State) -> State:
        """Announce that `state` was copied from a lineage as a checkpoint; return what to store.

        Only the returned object may be given to `restore` and `write_state`: it has the number by
        which the other ranks know this checkpoint. Without other ranks it is `state` itself.
        """
        return state

    def restore(self, lineage: Lineage, state: State | None) -> None:
        """Announce that the states of a lineage are set to those of the checkpoint `state`.

        With None, the operation leaves the lineage's states as they are.
        """

    def settle(self, lineage: Lineage) -> None:
        """Announce that the states of a lineage are copied, so as to free larger buffers.

        States may be views of such buffers; see `Lineage.settle`.
        """

    def rest(self, lineage: Lineage) -> None:
        """Announce that the states of a lineage were dropped.

        The lineage has new cache objects, with the same KV but without states.
        """

    def release(self, lineage: Lineage) -> None:
        """Announce that the buffers of a lineage are released."""

    # -- batches -----------------------------------------------------------------------------------

    def join(self, joint: Caches, rows: Caches, others: Sequence[Caches], batched: bool) -> None:
        """Announce that a batch `joint` was made of copies of `rows` and `others`; see `rows.join`.

        With `batched`, `rows` is a batch, which is not used any more; else the caches of a lineage.
        """

    def keep_rows(self, batch: Caches, rows: Sequence[int]) -> None:
        """Announce that all rows of a batch but those with the indices `rows` were dropped."""

    def take_row(self, batch: Caches, row: int, lineage: Lineage) -> None:
        """Announce that row number `row` of a batch is decoded alone from now on.

        Its KV is in the caches of `lineage`, where the row's pending token is fed next.
        """

    def append_row(self, batch: Caches, row: int, lineage: Lineage, count: int) -> None:
        """Announce that the newest `count` positions of a batch's row were copied to a lineage.

        They were appended at its end, and its states were set to those of the row. `row`: the
        row's index in the batch.
        """

    def drop_batch(self, batch: Caches) -> None:
        """Announce that a batch is not used any more."""

    # -- files -------------------------------------------------------------------------------------

    def write_run(self, ids: Tokens, start: int, spans: Sequence[Span]) -> None:
        """Announce that the KV of positions from `start` to the end of `ids` is written to disk.

        `ids`: token ids from the beginning of a prompt. `spans`: the ranges of lineages that hold
        the KV.
        """

    def write_state(self, ids: Tokens, state: State) -> None:
        """Announce that `state`, a checkpoint at the end of `ids`, is written to disk.

        `ids`: token ids from the beginning of a prompt.
        """

    def load(self, lineage: Lineage, ids: Tokens, start: int, end: int) -> None:
        """Announce that positions [start, end) of a lineage were read from disk.

        `ids`: the token ids of the prompt from its beginning, up to position `end` at least.
        """

    def load_state(self, lineage: Lineage, ids: Tokens) -> None:
        """Announce that a lineage's states were read from a checkpoint on disk.

        `ids`: the token ids from the beginning of the prompt up to that checkpoint.
        """


ALONE = Lockstep()
"""Lockstep of a process that has the whole model, so that there are no other ranks."""
