"""KV on its way to and from files: copies for the writer, and loads of verified files.

MLX thread only. The ranks of a divided model have a class of their own in place of `KVFiles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxcache.model import serialise
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Lineage, Span
from mlxcache.safetensors import Tensor
from mlxcache.store.found import RunPart
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.cache.restore import DiskLookup

MOST_LOADED = 128 << 20
"""Maximum bytes of several files that are loaded in one evaluation."""


class KVFiles:
    """Copies KV and states into tensors of files, and loads them from files."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self._stream = mx.new_stream(mx.cpu)

    def copy_run(
        self, ids: Tokens, start: int, spans: Sequence[Span], out: memoryview
    ) -> list[Tensor]:
        """Copy `spans`, the KV from `start` to the end of `ids`, into `out`, to be written next."""
        return serialise.copied_run(self.layout, spans, out)

    def copy_state(self, ids: Tokens, state: State) -> list[Tensor]:
        """Return the tensors of a checkpoint at the end of `ids`, to be written next."""
        return serialise.state_tensors(state, self.layout.heads)

    def load_runs(self, lookup: DiskLookup, lineage: Lineage) -> None:
        """Append to `lineage` the next verified files that fit into one evaluation. Blocks."""
        if not self.layout.specs:
            lineage.advance(lookup.target - lineage.length)
            return
        pieces = _loadable(lookup, lineage)
        runs = [serialise.load_run(p.path, self.layout, self._stream) for p in pieces]
        for piece, arrays in zip(pieces, runs, strict=True):
            first = lineage.length - piece.first
            last = min(piece.end, lookup.target) - piece.first
            held, wait = arrays[0][0].shape[0], piece is pieces[-1]
            slots = self._slots(arrays, first, last)
            lineage.append(slots, last - first, held=held, wait=wait)

    def load_state(self, lookup: DiskLookup, lineage: Lineage) -> None:
        """Set the opaque slots to the checkpoint that the lookup has found, if it has one."""
        if lookup.state is not None:
            state = serialise.load_state(lookup.state.path, self.layout, self._stream)
            lineage.set_state(state)

    def _slots(
        self, arrays: list[list[mx.array]], first: int, last: int
    ) -> Iterator[list[mx.array]]:
        """Yield each linear slot's arrays of positions [first, last) in turn, for `Lineage.append`.

        `arrays`: those of a run by slot, of shape (tokens, heads, dim); a slot is removed when it
        is yielded. `first` and `last` count from the run's start.
        """
        while arrays:
            yield serialise.row_major([arrays.pop(0)], first, last)[0]


def _loadable(lookup: DiskLookup, lineage: Lineage) -> list[RunPart]:
    """Return the next verified files that fit into one evaluation, but at least one."""
    found: list[RunPart] = []
    most = min(lineage.copy_bytes, MOST_LOADED)
    for piece in lookup.pieces if lineage.length < lookup.target else ():
        if piece.end <= lineage.length:
            continue
        most -= piece.nbytes
        if found and (most < 0 or piece.end > lookup.verified):
            break
        found.append(piece)
    return found
