"""Lineages without arrays, for simulations: positions are counted, and bytes computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Lineage, Span

STATE: State = ("counted",)
"""Stands for the state of layers that cannot be sliced."""


class CountedLineage(Lineage):
    """A lineage without arrays, which has the length and the bytes that a real one would have.

    `copy_bytes` is that of a real lineage, and has no effect here.
    """

    __slots__ = ("_held",)

    def __init__(self, layout: Layout, copy_bytes: int = 0):
        self.layout = layout
        self.copy_bytes = copy_bytes
        self.caches, self.slots, self.linear = [], [], []
        self.base = self.length = self.capacity = self.window_valid_from = 0
        self.passes = self.turn_tokens = 0
        self._addresses = None
        self._held = True

    @property
    def state_bytes(self) -> int:
        """Bytes that a copy of the states of the opaque slots would take in a real lineage."""
        return self.layout.checkpoint_bytes

    @property
    def lost(self) -> bool:
        """True if the lineage was released."""
        return not self._held

    def _refill(self, sources: Sequence[Span], capacity: int) -> None:
        base, end = (sources[0][1], sources[-1][2]) if sources else (0, 0)
        self.base, self.length, self.capacity = base, end, capacity

    def append(
        self,
        tail: Iterable[Sequence[mx.array]],
        count: int,
        *,
        windows: bool = True,
        held: int | None = None,
        wait: bool = True,
    ) -> None:
        """Count `count` more positions.

        The other arguments are those of a real lineage, and are ignored.
        """
        self.truncate(self.length + count)

    def append_span(self, span: Span) -> None:
        """Count the positions of `span`, a range of another lineage, in this one."""
        self.truncate(self.length + span[2] - span[1])

    def capture(self) -> State:
        """Return `STATE`, a placeholder for the states of the opaque slots."""
        return STATE

    def restore(self, state: State | None) -> None:
        """Do nothing: a counted lineage has no slots whose states could be set."""

    def rest(self) -> None:
        """Do nothing: a counted lineage has no slots whose states could be dropped."""

    def sound(self) -> bool:
        """Return True: there are no arrays, which a failed pass could leave uncomputed."""
        return True

    def release(self) -> None:
        """Mark the lineage as released: `lost` is True, and the capacity 0."""
        super().release()
        self._held = False
