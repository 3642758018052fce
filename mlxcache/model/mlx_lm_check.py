"""Whether a prompt cache from elsewhere is this model's own. Used on the MLX thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxcache.model import kv
from mlxcache.model.kv import Layout
from mlxcache.model.mlx_lm_read import PromptCache
from mlxcache.types import Tokens

CHECKED_TOKENS = 64
"""How many tokens are computed again, in every layer."""

_CHUNK = 1024
_TOLERANCE = 0.05  # of the values' own size; other weights or tokens differ by about all of it


def agrees(model: Any, layout: Layout, found: PromptCache, ids: Tokens) -> bool:
    """Whether `found` was seen to be what `model` computes for `ids`.

    The file says neither which weights it was made with nor, if mlx-lm wrote it, of which tokens.
    So every layer's KV of the first tokens is computed again, and where the tokens came from
    elsewhere, the first layer's of all of them, which costs next to nothing. False also where
    that cannot be done: without KV of the beginning, or where the first layer is not attention.
    Such a file is no help: its tokens have to be computed.
    """
    if found.arrays is None or not layout.linear or not 0 < len(ids) == found.length:
        return False
    count = min(len(ids), CHECKED_TOKENS)
    head = _computed(model, layout, ids[:count])
    theirs = _comparable(layout, found.arrays, slice(0, count))
    if not all(_alike(*pair) for pair in zip(head, theirs, strict=True)):
        return False
    if found.ids is not None:
        return True
    return layout.linear[0] == 0 and _first_layer_agrees(model, layout, found.arrays, ids)


def _first_layer_agrees(
    model: Any, layout: Layout, arrays: Sequence[Sequence[mx.array]], ids: Tokens
) -> bool:
    """Whether what depends on the tokens alone is theirs: values, or MLA's latents.

    The other array of the layer also depends on the position, which is not that of the file here.
    """
    same: list[bool] = []
    for at in range(0, len(ids), _CHUNK):
        end = min(at + _CHUNK, len(ids))
        made = _computed(model, layout, ids[at:end])[0]
        read = _comparable(layout, arrays, slice(at, end))[0]
        alike = [_rows_alike(*pair) for pair in zip(made, read, strict=True)]
        same = [a and b for a, b in zip(same or alike, alike, strict=True)]
    return any(same)


def _computed(model: Any, layout: Layout, ids: Tokens) -> list[list[mx.array]]:
    """Per linear slot what can be compared of it for `ids` alone. Lazy: only what is looked at is
    computed."""
    caches = layout.make()
    model(mx.array(ids[None]), cache=caches)
    slots = kv.flatten(caches)
    return _comparable(layout, [kv.arrays_of(slots[i]) for i in layout.linear], slice(0, len(ids)))


def _comparable(
    layout: Layout, arrays: Sequence[Sequence[mx.array]], rows: slice
) -> list[list[mx.array]]:
    """Per linear slot some rows of its `arrays`, as numbers that differ little if KV does."""
    slots = kv.flatten(layout.make())
    return [
        kv.sliced(slots[i]).comparable(slots[i], [array[..., rows, :] for array in held])
        for i, held in zip(layout.linear, arrays, strict=True)
    ]


def _alike(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> bool:
    return all(_rows_alike(*pair) for pair in zip(ours, theirs, strict=True))


def _rows_alike(ours: mx.array, theirs: mx.array) -> bool:
    """Whether every position's vectors differ by little; shape (1, heads, n, dim) both."""
    a, b = ours.astype(mx.float32), theirs.astype(mx.float32)
    error, size = (mx.sum(x * x, axis=(0, 1, 3)) for x in (a - b, a))
    return bool(mx.all(error <= _TOLERANCE**2 * size + 1e-6).item())
