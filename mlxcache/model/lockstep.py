"""Operations on KV and passes of a model that the other ranks of a group repeat.

A model that is divided among several processes, called ranks, computes a forward pass only if all
of them make it. One rank decides what is done; the others repeat each of its operations, in the
same order, on their own part of the KV. MLX thread only.
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
    """Announcements of operations to the other ranks of a divided model; without any, no-ops.

    Each method announces one operation, which the caller makes itself; one that announces a pass
    must be called before the pass. `caches` is the list of caches of a lineage or of a batch. The
    methods of a subclass raise GroupLost if another rank cannot be reached. `divided`: there are
    other ranks.
    """

    divided = False

    def check(self, error: Exception) -> None:
        """Raise GroupLost if `error` leaves the ranks in different states, before it is handled."""

    def prepare(self, pool_bytes: int) -> None:
        """MLX's memory is set up, as `device.prepare` does it."""

    # -- passes ------------------------------------------------------------------------------------

    def feed(self, lineage: Lineage, ids: Tokens) -> None:
        """Tokens are fed at the end of a lineage; the caller evaluates its caches alone."""

    def start(self, caches: Caches, tokens: Sequence[int]) -> None:
        """First pass of decoding: `tokens`, one per row, are fed, and the next ones drawn."""

    def step(self, caches: Caches) -> None:
        """Step of decoding: the pending token of each row is fed, and the next one drawn."""

    def share(self, drawn: mx.array) -> mx.array:
        """Send the tokens `drawn` on rank 0, shape (rows,), to all ranks, which feed them next.

        Returns the same tokens as a lazy array, whose evaluation sends them. The caller must
        evaluate it together with the log-probabilities of the pass.
        """
        return drawn

    # -- lineages ----------------------------------------------------------------------------------

    def create(self, lineage: Lineage) -> None: ...

    def rebuild(self, lineage: Lineage, sources: Sequence[Span], capacity: int) -> None: ...

    def truncate(self, lineage: Lineage, length: int) -> None: ...

    def pretend(self, lineage: Lineage, length: int) -> None: ...

    def append_span(self, lineage: Lineage, span: Span) -> None: ...

    def capture(self, lineage: Lineage, state: State) -> State:
        """Return what to store of a checkpoint: an object by which the other ranks know it."""
        return state

    def restore(self, lineage: Lineage, state: State | None) -> None: ...

    def settle(self, lineage: Lineage) -> None: ...

    def rest(self, lineage: Lineage) -> None: ...

    def release(self, lineage: Lineage) -> None: ...

    # -- batches -----------------------------------------------------------------------------------

    def join(self, joint: Caches, rows: Caches, others: Sequence[Caches], batched: bool) -> None:
        """A batch `joint` was made of `rows`, of a lineage or `batched`, and of `others`."""

    def keep_rows(self, batch: Caches, rows: Sequence[int]) -> None: ...

    def take_row(self, batch: Caches, row: int, lineage: Lineage) -> None:
        """A row is decoded alone from now on; its KV is in the caches of `lineage`."""

    def append_row(self, batch: Caches, row: int, lineage: Lineage, count: int) -> None:
        """The newest `count` positions of a row were appended to a lineage, with its states."""

    def drop_batch(self, batch: Caches) -> None: ...

    # -- files -------------------------------------------------------------------------------------

    def write_run(self, ids: Tokens, start: int, spans: Sequence[Span]) -> None:
        """The KV from `start` to the end of `ids`, a prompt's beginning, is written to disk."""

    def write_state(self, ids: Tokens, state: State) -> None:
        """A checkpoint at the end of `ids`, a prompt's beginning, is written to disk."""

    def load(self, lineage: Lineage, ids: Tokens, start: int, end: int) -> None:
        """Positions [start, end) of a lineage, of the prompt `ids`, were read from disk."""

    def load_state(self, lineage: Lineage, ids: Tokens) -> None:
        """A lineage's states were read from a checkpoint on disk, at the end of `ids`."""


ALONE = Lockstep()
"""Lockstep of a process that has the whole model, so that there are no other ranks."""
