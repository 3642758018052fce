"""Rows of a batch cache, with one sequence each: join, drop and read them. MLX thread only."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlxcache.model import kv
from mlxcache.model.adapters import composed, parts_of
from mlxcache.model.arrays import tree_arrays
from mlxcache.model.kv import Caches, Layout, State

STEP = BatchKVCache.step  # positions by which the buffers of a batch grow


def _shadow(cache: Any) -> Any:
    parts = parts_of(cache)
    return copy(cache) if parts is None else composed(cache, [copy(part) for part in parts])


def join(rows: Caches, others: Sequence[Caches], *, batched: bool) -> Caches:
    """Build batch caches with copies of `rows` and of `others`, left-padded to the longest.

    Each of `others` holds one sequence; `rows` is a batch if `batched`, else one sequence too. None
    of them is changed. The copies are evaluated layer by layer: meanwhile at most two padded copies
    of one layer's keys and two of its values are in memory besides the input and the result.
    """
    joint = []
    for mine, *theirs in zip(rows, *others, strict=True):
        if batched:
            cache = _shadow(mine)
            cache.extend(_merged(theirs, 0))
        else:
            cache = _merged([mine, *theirs], STEP)
        mx.eval(tree_arrays(cache.state))
        joint.append(cache)
    return joint


def _merged(caches: Sequence[Any], room: int) -> Any:
    """Build one layer's batch cache with copies of `caches`, and room for the next `room` tokens.

    Without it, the first step would copy the whole batch again.
    """
    if (first := parts_of(caches[0])) is not None:
        others = [parts_of(cache) or [] for cache in caches[1:]]
        merged = [_merged(parts, room) for parts in zip(first, *others, strict=True)]
        return composed(caches[0], merged)
    lengths = [getattr(c, "offset", 0) for c in caches]
    longest = max(lengths)
    if type(caches[0]) is not KVCache or not min(lengths):
        return caches[0].merge(caches)
    batch = BatchKVCache([longest - length for length in lengths])
    for name in ("keys", "values"):
        _, heads, _, dim = getattr(caches[0], name).shape
        shape = (len(caches), heads, longest + room, dim)
        joint = mx.zeros(shape, getattr(caches[0], name).dtype)
        for i, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
            row = getattr(cache, name)[..., :length, :]
            joint[i : i + 1, :, longest - length : longest] = row
        setattr(batch, name, joint)
    batch.offset += longest
    batch._idx = longest
    return batch


def keep_rows(batch: Caches, rows: Sequence[int]) -> None:
    """Drop all rows of a batch but `rows`, and padding that no remaining row needs, in place."""
    for cache in batch:
        cache.filter(list(rows))
        mx.eval(tree_arrays(cache.state))


def row_tail(
    layout: Layout, batch: Sequence[Any], row: int, count: int
) -> tuple[list[list[mx.array]], State]:
    """Slice the newest `count` positions of one row of a batch, lazily, (1, heads, count, dim).

    Returns the arrays of each linear slot, and the row's states of the opaque slots. Evaluate the
    arrays before the next step.
    """
    slots = kv.flatten(batch)
    linear: list[list[mx.array]] = []
    for slot in (slots[i] for i in layout.linear):
        view = (slice(row, row + 1), slice(None), slice(slot._idx - count, slot._idx))
        linear.append([slot.keys[view], slot.values[view]])
    return linear, kv.states([slots[i].extract(row) for i in layout.opaque_at])
