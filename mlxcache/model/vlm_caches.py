"""Cache classes of mlx-vlm, and how each is reused. MLX thread only.

mlx-vlm has copies of mlx-lm's classes. Those that its models only call are replaced by mlx-lm's
own, which are cut, stored and batched as in any other model. Those with methods of mlx-vlm's own
keep their class and have an adapter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from mlx_vlm.models import cache as vlm
from mlx_vlm.models.glm5_next.language import Glm5NextAttention
from mlx_vlm.models.hy_v4.cache import HyV4KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache

from mlxcache.model.adapters import Recurrent, Sliced, register
from mlxcache.model.grouped import GroupRows, RecentRows


class ArraysSlots(Recurrent):
    """Adapter for slots of mlx-vlm's `ArraysCache`, whose state is its list of arrays."""

    portable = False

    def state(self, slot: Any) -> Any:
        return (tuple(slot.cache),)

    def set_state(self, slot: Any, state: Any) -> None:
        slot.cache = list(state[0])


class MiniMaxSlots(Sliced):
    """Adapter for slots of mlx-vlm's `MiniMaxM3KVCache`: keys, values, and keys of an indexer."""

    portable = False

    def filled(self, slot: Any) -> bool:
        return not slot.kv_cache.empty()

    def arrays(self, slot: Any) -> list[mx.array]:
        return [slot.kv_cache.keys, slot.kv_cache.values, slot.index_keys]

    def put(self, slot: Any, index: int, array: mx.array) -> None:
        if index == 2:
            slot.index_keys = array
        else:
            super().put(slot.kv_cache, index, array)


class QsaCache(QSAKVCache):  # type: ignore[misc]
    """Cache of an attention layer of Qwen4: keys, values, keys of an indexer, and positions.

    mlx-vlm's class copies the indexer's keys and the positions at every step. This one appends
    them in place. `index_rows`: the indexer's keys, shape (1, 1, capacity, dim). `position_rows`:
    the positions on each axis, shape (1, 3, capacity, 1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.index_rows: mx.array | None = None
        self.position_rows: mx.array | None = None

    def update_indexer(self, keys: mx.array, position_ids: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys, shape (1, n, dim), and positions, shape (3, 1, n); return all so far.

        n is the number of new tokens. In the returned arrays, it is the number of all tokens.
        """
        end = self.offset + keys.shape[1]
        new = keys[:, None], position_ids.swapaxes(0, 1)[..., None].astype(mx.int32)
        self.index_rows = self._appended(self.index_rows, new[0], end)
        self.position_rows = self._appended(self.position_rows, new[1], end)
        return self.index_rows[:, 0, :end], self.position_rows[0, :, None, :end, 0]

    def _appended(self, held: mx.array | None, new: mx.array, end: int) -> mx.array:
        if held is None or end > held.shape[2]:
            steps = -(-new.shape[2] // self.step) * self.step
            pad = mx.zeros((*new.shape[:2], steps, new.shape[3]), new.dtype)
            held = pad if held is None else mx.concatenate([held[:, :, : self.offset], pad], 2)
        held[:, :, self.offset : end] = new
        return held

    @property
    def state(self) -> tuple[mx.array | None, ...]:
        """All arrays of the cache, for them to be evaluated; None for one that is not made yet."""
        return self.keys, self.values, self.index_rows, self.position_rows, self.index_block_keys


class QsaSlots(Sliced):
    """Adapter for slots of `QsaCache`.

    The cache also holds the indexer's mean keys of blocks of tokens. A cut drops them, and the next
    pass computes them again.
    """

    portable = False

    def arrays(self, slot: Any) -> list[mx.array]:
        return [slot.keys, slot.values, slot.index_rows, slot.position_rows]

    def put(self, slot: Any, index: int, array: mx.array) -> None:
        setattr(slot, ("keys", "values", "index_rows", "position_rows")[index], array)

    def end_at(self, slot: Any, offset: int) -> None:
        slot.offset = offset
        slot.clear_index_blocks()


class Pools:
    """Pooled keys of GLM-5-Next's indexer: one key for each group of `ratio` consecutive tokens.

    A group is closed once all its tokens were fed; only closed groups have a key. `size`: width of
    a key. The methods are those of mlx-vlm's `PoolingCache`, in whose place the model uses this
    object. `parts`: the slots that it consists of.
    """

    def __init__(self, ratio: int, size: int):
        self._rows = GroupRows(ratio, size)
        self._recent = RecentRows(1, [self._rows])
        self.parts: list[Any] = [self._recent, self._rows]

    @property
    def offset(self) -> int:
        """Number of closed groups, that is, of groups whose tokens were all fed."""
        return self._rows.groups

    def accumulate_windows(
        self, keys: mx.array, gates: mx.array, offset: int
    ) -> tuple[mx.array, mx.array, int]:
        """Append the keys and gates of new tokens, shape (1, n, dim) each.

        A group, which mlx-vlm calls a window, is a fixed number of consecutive tokens.
        `offset`: position of the first new token. Returns the keys and the gates of all tokens of
        the groups that the new tokens complete, and the position of the first of these tokens. The
        tokens of an incomplete group are kept for the next call.
        """
        self._rows.begin(keys.shape[1])
        self._recent.append(keys)
        kept, kept_gates = self._recent.pending_kv, self._recent.pending_gate
        if kept is not None and kept_gates is not None:
            offset -= kept.shape[1]
            keys = mx.concatenate([kept, keys], axis=1)
            gates = mx.concatenate([kept_gates, gates], axis=1)
        closed = keys.shape[1] // self._rows.ratio * self._rows.ratio
        self._recent.set_pending(keys[:, closed:], gates[:, closed:])
        return keys[:, :closed], gates[:, :closed], offset

    def update_and_fetch(self, pooled: mx.array) -> mx.array:
        """Append `pooled`, the keys of the newly closed groups; return those of all closed groups.

        Both arrays have the shape (1, groups, dim).
        """
        if pooled.shape[1]:
            self._rows.add(pooled)
        found = self._rows.vectors()
        return pooled[:, :0] if found is None else found


class _AllValid:
    """Reports that no token is padding, as in one sequence, in place of a cache that stores it."""

    def __init__(self, latents: KVCache):
        self._latents = latents

    def update_and_fetch(self, valid: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return an array of True, shape (1, 1, n, 1), and `values` unchanged.

        n is the number of positions of the latents. `valid` is ignored.
        """
        return mx.ones((1, 1, self._latents.offset, 1), mx.bool_), values


class _NoProjections:
    """Takes the place of a cache of keys and values of all heads, and stores nothing.

    The model then computes these keys and values from the latents. The budget of `--ram` does not
    count any memory for them.
    """

    def size(self) -> int:
        """Return -1, the length of no prompt, so that the model reads and stores nothing here."""
        return -1


class GlmCache:
    """Cache of a layer of GLM-5-Next with sparse attention: latents, and pooled keys.

    The model takes the parts of the cache by index. With an indexer they are 0: latents, 1: which
    tokens are valid, 2: pooled keys, and 3: keys and values of all heads. Without one they are 0:
    latents, and 1: keys and values of all heads. `ratio`: tokens per pooled key. `size`: the width
    of an indexer's keys, or None without one. `parts`: the slots that the cache consists of.
    """

    def __init__(self, ratio: int = 1, size: int | None = None):
        latents = KVCache()
        self.parts: list[Any] = [latents]
        self._read: tuple[Any, ...] = (latents, _NoProjections())
        if size is not None:
            pools = Pools(ratio, size)
            self.parts += pools.parts
            self._read = (latents, _AllValid(latents), pools, _NoProjections())

    def __getitem__(self, index: int) -> Any:
        return self._read[index]

    @property
    def offset(self) -> int:
        """Number of positions fed so far."""
        return int(self.parts[0].offset)


register(
    {
        vlm.ArraysCache: ArraysSlots("ArraysCache", batchable=True),
        MiniMaxM3KVCache: MiniMaxSlots("MiniMaxM3KVCache", ("0", "1", "2"), batchable=False),
        QsaCache: QsaSlots("QSAKVCache", ("0", "1", "2", "3"), batchable=False),
    },
    [GlmCache],
)


def replace_caches(caches: Sequence[Any], layers: Sequence[Any]) -> list[Any]:
    """Return empty caches of classes that the server can reuse, in place of mlx-vlm's.

    `caches`: the empty caches that mlx-vlm made for a model, one per layer. `layers`: the model's
    layers. A cache that need not or cannot be replaced is returned unchanged. If the server has no
    adapter for the class of a returned cache, nothing of the model's KV is reused.
    """
    return [_replaced(*pair) for pair in zip(caches, layers, strict=True)]


def _replaced(cache: Any, layer: Any) -> Any:
    attention: Any = getattr(layer, "self_attn", None)
    if type(attention) is Glm5NextAttention:
        indexer = attention.indexer
        return GlmCache() if indexer is None else GlmCache(indexer.index_kpool, indexer.head_dim)
    if type(cache) is vlm.CacheList:
        return CacheList(*(_replaced(part, None) for part in cache.caches))
    if type(cache) in (vlm.KVCache, vlm.ConcatenateKVCache, HyV4KVCache):
        return KVCache()
    if type(cache) is QSAKVCache:
        return QsaCache()
    if type(cache) is vlm.RotatingKVCache:
        return RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    return cache
