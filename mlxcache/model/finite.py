"""Whether KV and states are numbers: a model that overflows leaves NaN. MLX thread only."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxcache.model import kv
from mlxcache.model.arrays import tree_arrays
from mlxcache.model.kv import State
from mlxcache.model.lineage import Lineage

AT_ONCE = 4096
"""Positions that are looked at together."""


def ends_finite(lineage: Lineage) -> bool:
    """Whether the newest position's KV in the last layer, and the last state, are numbers.

    What is none at an earlier position, or in an earlier layer, has come this far by then, unless
    it is out of every window's sight. A few rows are looked at, whatever the length.
    """
    at = lineage.length - lineage.base - 1
    arrays = [a[..., at, :] for slot in lineage.linear[-1:] for a in kv.arrays_of(slot)]
    arrays += tree_arrays([slot.state for slot in kv.opaque_slots(lineage.slots)[-1:]])
    return at < 0 or is_finite(arrays)


def finite_upto(lineage: Lineage) -> int:
    """The first position whose KV is no numbers, or where it ends. Looks at all of it."""
    end = lineage.length
    for slot in lineage.linear:
        for array in kv.arrays_of(slot):
            end = min(end, _finite_upto(array, lineage.base, end))
    return end


def _finite_upto(array: mx.array, base: int, end: int) -> int:
    for start in range(base, end, AT_ONCE):
        part = array[..., start - base : min(end, start + AT_ONCE) - base, :]
        sound = mx.all(mx.isfinite(part), axis=(0, 1, 3))
        if not mx.all(sound).item():
            return start + sound.tolist().index(False)  # type: ignore[union-attr]
    return end


def state_is_finite(state: State) -> bool:
    """Whether a checkpoint is numbers."""
    return is_finite(tree_arrays(state))


def is_finite(arrays: Sequence[mx.array]) -> bool:
    """Whether all of `arrays` are numbers. Evaluates."""
    return all(mx.all(mx.isfinite(array)).item() for array in arrays)
