"""Checks of KV and states for NaN and infinity, the result of an overflow. MLX thread only."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxcache.model import kv
from mlxcache.model.arrays import tree_arrays
from mlxcache.model.kv import State
from mlxcache.model.lineage import Lineage

AT_ONCE = 4096
"""Number of positions checked in one evaluation."""


def ends_finite(lineage: Lineage) -> bool:
    """Return whether the newest KV of the last linear slot and the last opaque state are finite.

    The newest KV is that of the newest position, the last opaque state that of the last opaque
    slot. A NaN at an earlier position or in an earlier layer has spread to them, unless it is
    outside of every sliding window. True if the lineage is empty. The cost does not depend on the
    length of the lineage. Evaluates the arrays.
    """
    at = lineage.length - lineage.base - 1
    arrays = [a[..., at, :] for slot in lineage.linear[-1:] for a in kv.arrays_of(slot)]
    arrays += tree_arrays([slot.state for slot in kv.opaque_slots(lineage.slots)[-1:]])
    return at < 0 or is_finite(arrays)


def finite_upto(lineage: Lineage) -> int:
    """Return the first position whose KV is not finite, or the length of the lineage.

    Reads all KV of the linear slots, and nothing of the opaque ones.
    """
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
    """Return whether all numbers of a checkpoint are finite. Evaluates its arrays."""
    return is_finite(tree_arrays(state))


def is_finite(arrays: Sequence[mx.array]) -> bool:
    """Return whether all numbers in `arrays` are finite. Evaluates them."""
    return all(mx.all(mx.isfinite(array)).item() for array in arrays)
