"""Prompt caches for mlx-lm's own tools. Used on the MLX thread only.

The format, as of mlx-lm 0.32.2 (mlx_lm/models/cache.py, save_prompt_cache): a safetensors file
whose tensors are the caches' states, flattened; numbers, texts and None among them are small
tensors too, listed in the metadata beside the classes' names and what the tool says: the model, as
given to --model, and the tokenizer's configuration. Token ids are not in it; files written here
add them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxcache.model import serialise as wire
from mlxcache.model.adapters import adapter_of, class_name, composed, parts_of
from mlxcache.model.lineage import Lineage
from mlxcache.model.sliced import Sliced
from mlxcache.safetensors import Place, compose
from mlxcache.tensor import ITEM_BYTES
from mlxcache.types import Tokens

IDS = "mlxcache_ids"
"""Where files written here have the token ids among the tool's metadata: int32 in base64."""

CHUNK_BYTES = 4 << 20


class PromptCacheFile:
    """A file for `mlx_lm.generate --prompt-cache-file`: iterate once for its `nbytes` bytes.

    `lineage` must be whole, with its opaque slots at its end, and must not be written to until the
    iteration ends. One array at a time is copied. `model` is what --model has to be given, a path
    or a Hub id; `ids` are the lineage's tokens.
    """

    def __init__(self, lineage: Lineage, model: str, ids: Tokens):
        if len(ids) != lineage.length or not lineage.whole:
            raise ValueError(f"{len(ids)} ids for a lineage of {lineage.length} tokens")
        caches = [_as_mlx_lm(cache) for cache in lineage.caches]
        kinds: list[tuple[str, str]] = []
        self._leaves = [
            (key, _as_array(key, value, kinds))
            for key, value in tree_flatten([cache.state for cache in caches])
        ]
        tool = {
            "model": model,
            "tokenizer_config": json.dumps({}),
            IDS: base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode(),
        }
        names = [class_name(cache) for cache in caches]
        # tree_flatten drops an empty list, so mlx-lm puts an empty text first
        metadata = dict(tree_flatten([tool, names, ["", *kinds]]))
        places = [_place(key, array) for key, array in self._leaves]
        self._head = compose(metadata, places, own=False)
        self.nbytes = len(self._head) + sum(place.nbytes for place in places)

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for key, array in self._leaves:
            made = mx.contiguous(array)
            mx.eval(made)
            (tensor,) = wire.to_tensors([(key, made)])
            view = tensor.bytes
            for at in range(0, len(view), CHUNK_BYTES):
                yield bytes(view[at : at + CHUNK_BYTES])
            del made, tensor, view


def _as_mlx_lm(cache: Any) -> Any:
    """`cache` as mlx-lm itself would have it, without allocation padding. Views."""
    parts = parts_of(cache)
    if parts is not None:
        return composed([_as_mlx_lm(part) for part in parts])
    adapter = adapter_of(cache)
    return adapter.plain(cache) if isinstance(adapter, Sliced) else cache


def _as_array(key: str, value: Any, kinds: list[tuple[str, str]]) -> mx.array:
    """`value` as the file holds it; what is no array is noted in `kinds`."""
    if isinstance(value, mx.array):
        return value
    if isinstance(value, str):
        kinds.append((key, "string"))
        return mx.array([ord(char) for char in value])
    if value is None:
        kinds.append((key, "none"))
        return mx.array([])
    kinds.append((key, "scalar"))
    return mx.array(value)


def _place(key: str, array: mx.array) -> Place:
    dtype = wire.dtype_name(array.dtype)
    return Place(key, dtype, tuple(array.shape), 0, array.size * ITEM_BYTES[dtype])
