"""mlx-lm's cache classes, told apart by what can be done with each. MLX thread only.

A model's cache is a list with one object per layer. Composites are opened, and what is in them are
*slots*. A slot can be

- sliced: arrays with a row for every position, token axis -2, so that any token can be cut out;
- restored as a window: sliced too, and only the positions shortly before one are needed to go on
  from it;
- checkpointed: its state stands for exactly one position.

Only this module, `window` and `rows` name the classes. One that is not named is unknown: it is
never guessed what it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlxcache.model.checkpointed import Checkpointed, Chunked, Recurrent, Ring
from mlxcache.model.sliced import Quantised, Sliced, Windowed
from mlxcache.model.window import WindowCache

Adapter = Sliced | Checkpointed

ADAPTERS: Mapping[type, Adapter] = {
    KVCache: Sliced("KVCache"),
    WindowCache: Windowed("RotatingKVCache"),
    QuantizedKVCache: Quantised(
        "QuantizedKVCache", ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2"), batchable=False
    ),
    ArraysCache: Recurrent("ArraysCache", batchable=True),
    ChunkedKVCache: Chunked("ChunkedKVCache"),
    RotatingKVCache: Ring("RotatingKVCache"),
}
"""What is known. A subclass is another class: it may do otherwise."""


def adapter_of(slot: Any) -> Adapter | None:
    """The adapter of a slot's class; None for one that is unknown."""
    return ADAPTERS.get(type(slot))


def parts_of(cache: Any) -> list[Any] | None:
    """What a composite is made of; None for a cache that is none."""
    return list(cache.caches) if type(cache) is CacheList else None


def composed(parts: Sequence[Any]) -> Any:
    """A composite of `parts`."""
    return CacheList(*parts)


def class_name(cache: Any) -> str:
    """What mlx-lm calls the class of a cache, composites included."""
    adapter = adapter_of(cache)
    return type(cache).__name__ if adapter is None else adapter.name


def prepared(cache: Any) -> Any:
    """A model's empty cache as it is used here: a sliding window as a log, which can be sliced.

    A `KVCache` does what a `ConcatenateKVCache` does, and writes in place.
    """
    parts = parts_of(cache)
    if parts is not None:
        return composed([prepared(part) for part in parts])
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return WindowCache(cache.max_size)
    if type(cache) is ConcatenateKVCache:
        return KVCache()
    return cache
