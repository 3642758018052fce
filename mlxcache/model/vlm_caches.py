"""Cache classes of mlx-vlm, and how each is reused. MLX thread only.

mlx-vlm has copies of mlx-lm's classes. Those that its models only call are replaced by mlx-lm's
own, which are cut, stored and batched as in any other model. Those with methods of mlx-vlm's own
keep their class and have an adapter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from mlx_vlm.models import cache as vlm

from mlxcache.model.adapters import Recurrent, register


class Arrays(Recurrent):
    """Adapter for slots of mlx-vlm's `ArraysCache`, whose state is its list of arrays."""

    portable = False

    def state(self, slot: Any) -> Any:
        return (tuple(slot.cache),)

    def set_state(self, slot: Any, state: Any) -> None:
        slot.cache = list(state[0])


register({vlm.ArraysCache: Arrays("ArraysCache", batchable=True)})


def replace_caches(caches: Sequence[Any]) -> list[Any]:
    """Replace the empty caches of a model of mlx-vlm by those with which it is fed.

    A class that is not known is returned unchanged; a model that has one is not cached.
    """
    return [_replaced(cache) for cache in caches]


def _replaced(cache: Any) -> Any:
    if type(cache) is vlm.CacheList:
        return CacheList(*replace_caches(cache.caches))
    if type(cache) in (vlm.KVCache, vlm.ConcatenateKVCache):
        return KVCache()
    if type(cache) is vlm.RotatingKVCache:
        return RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    return cache
