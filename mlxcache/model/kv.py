"""What mlx-lm's cache classes hold, told apart by what can be done with it.

The only module that names them. A model's cache is a list with one object per layer; composites
are flattened into *slots*. A slot is linear (keys and values for every position, token axis -2, so
any position can be sliced out) or opaque (a state that stands for exactly one position). A class
that is not named here is unknown: the model is served, and nothing of it is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

Caches = list[Any]
"""One cache object per layer, as `model(tokens, cache=...)` takes it."""

State = tuple[Any, ...]
"""The opaque slots' states at one position: nested tuples of arrays, numbers and None."""


class WindowCache(RotatingKVCache):  # type: ignore[misc]
    """A sliding window kept as a log of every position instead of a ring.

    The model sees exactly what `RotatingKVCache` would show it: the last `max_size - 1` positions
    and the new ones, in temporal order. But nothing is overwritten, so the window before any
    position can be had again by slicing, and a step appends in place.
    """

    step = 256
    offset: int

    def __init__(self, max_size: int):
        super().__init__(max_size=max_size, keep=0)
        self._start = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, shapes (1, heads, n, dim); return the window they see."""
        end = self.offset + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2]:
            self._extend(keys, values)
        self.keys[..., self.offset : end, :] = keys
        self.values[..., self.offset : end, :] = values
        self._start = max(0, self.offset - self.max_size + 1)
        self.offset = self._idx = end
        return self.keys_and_values()

    def _extend(self, keys: mx.array, values: mx.array) -> None:
        steps = (self.step + keys.shape[2] - 1) // self.step * self.step
        for name, new in (("keys", keys), ("values", values)):
            old = getattr(self, name)
            pad = mx.zeros((*new.shape[:2], steps, new.shape[3]), new.dtype)
            kept = pad if old is None else mx.concatenate([old[..., : self.offset, :], pad], axis=2)
            setattr(self, name, kept)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The keys and values that the newest positions see, in temporal order."""
        view = (..., slice(self._start, self.offset), slice(None))
        return self.keys[view], self.values[view]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """As `RotatingKVCache.make_mask`, for keys that are in temporal order."""
        if N > 1:
            return super().make_mask(N, window_size=window_size, return_array=return_array)
        if window_size is None or window_size >= self.max_size or self.offset < window_size:
            return None
        seen = min(self.offset + 1, self.max_size)
        return mx.arange(seen) >= seen - window_size

    def is_trimmable(self) -> bool:
        """Always: no position is ever overwritten."""
        return True

    @classmethod
    def merge(cls, caches: Sequence[WindowCache]) -> BatchRotatingKVCache:
        """One batch cache that holds the windows alone."""
        return BatchRotatingKVCache.merge([c.ring() for c in caches])

    def ring(self) -> RotatingKVCache:
        """The window before the next position, as mlx-lm's own class."""
        ring = RotatingKVCache(max_size=self.max_size)
        if self.keys is not None:
            start = max(0, self.offset - self.max_size)
            ring.keys = self.keys[..., start : self.offset, :]
            ring.values = self.values[..., start : self.offset, :]
            ring.offset, ring._idx = self.offset, self.offset - start
        return ring


LINEAR = (KVCache, WindowCache)
OPAQUE = (ArraysCache, ChunkedKVCache)
BATCHABLE = (KVCache, WindowCache, ArraysCache)


def flatten(caches: Sequence[Any]) -> list[Any]:
    """The slots of `caches`, composites opened, in a fixed order."""
    slots: list[Any] = []
    for cache in caches:
        slots += flatten(cache.caches) if type(cache) is CacheList else [cache]
    return slots


def _windowed(cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*(_windowed(c) for c in cache.caches))
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return WindowCache(cache.max_size)
    return cache


def make_caches(model: Any) -> Caches:
    """Empty caches for one sequence; sliding windows as logs."""
    return [_windowed(cache) for cache in make_prompt_cache(model)]


def arrays_of(slot: Any) -> list[mx.array]:
    """A linear slot's arrays, shape (1, heads, capacity, dim) each."""
    return [slot.keys, slot.values]


def set_arrays(slot: Any, arrays: Sequence[mx.array | None], offset: int) -> None:
    """Give a linear slot `arrays` that hold positions [0, offset)."""
    slot.keys, slot.values = arrays
    set_offset(slot, offset)


def set_offset(slot: Any, offset: int) -> None:
    """Make a linear slot end at `offset`; what lies beyond will be overwritten."""
    slot.offset = offset
    if isinstance(slot, WindowCache):
        slot._idx = offset
        slot._start = max(0, offset - slot.max_size)


def copied(array: mx.array) -> mx.array:
    """`array` in a buffer of its own, whatever it is a view of. Lazy.

    Neither `contiguous` nor assignment to a full slice is sure to copy: both may share the buffer,
    and a small view would keep a large one alive.
    """
    return array * mx.array(1, array.dtype)


def joined(parts: Sequence[mx.array]) -> mx.array:
    """`parts` one after another along the token axis, in a buffer of their own. Lazy."""
    if len(parts) > 1:
        return mx.concatenate(list(parts), axis=-2)
    (part,) = parts
    middle = part.shape[-2] // 2
    if not middle:
        return copied(part)
    return mx.concatenate([part[..., :middle, :], part[..., middle:, :]], axis=-2)


def _copied_tree(value: Any) -> Any:
    if isinstance(value, mx.array):
        return copied(value)
    if isinstance(value, list | tuple):
        return tuple(_copied_tree(v) for v in value)
    return value


def tree_arrays(value: Any) -> list[mx.array]:
    """Every array in nested tuples and lists."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, list | tuple):
        return [array for v in value for array in tree_arrays(v)]
    return []


def capture(slots: Sequence[Any]) -> State:
    """The opaque slots' states, evaluated, in buffers that nobody else writes to."""
    state = tuple(_copied_tree(slot.state) for slot in slots if type(slot) in OPAQUE)
    mx.eval(tree_arrays(state))
    return state


def restore(slots: Sequence[Any], state: State | None) -> None:
    """Put `state` back into the opaque slots; `state` itself stays as it is. None: leave empty."""
    if state is None:
        return
    for slot, saved in zip((s for s in slots if type(s) in OPAQUE), state, strict=True):
        fresh = _copied_tree(saved)
        slot.state = [list(fresh[0]), *fresh[1:]] if type(slot) is ArraysCache else fresh


def eval_states(caches: Sequence[Any], *, wait: bool = True) -> None:
    """Compute what `caches` hold; with `wait` False only start to."""
    arrays = tree_arrays([slot.state for slot in flatten(caches)])
    if wait:
        mx.eval(arrays)
    else:
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]


def merge(rows: Sequence[Caches]) -> Caches:
    """Batch caches that hold copies of `rows`, left-padded to the longest."""
    return [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Layout:
    """How one model caches.

    `bytes_per_token` covers every linear slot; `checkpoint_bytes` all opaque slots at one position.
    `linear` are the indices of the linear slots that the model fills, `specs` the (heads, dim,
    dtype) of each one's arrays. `window` is the smallest sliding window in tokens, or None.
    `unknown` names classes that are not cached. `vocab_size` is the number of logits. `make`
    gives empty caches for one sequence.
    """

    make: Callable[[], Caches]
    vocab_size: int
    bytes_per_token: int
    checkpoint_bytes: int
    linear: tuple[int, ...]
    specs: tuple[tuple[tuple[int, int, Any], ...], ...]
    opaque: bool
    batchable: bool
    window: int | None
    unknown: tuple[str, ...]

    @property
    def cacheable(self) -> bool:
        """Whether anything can be reused at all."""
        return not self.unknown


def survey(model: Any) -> Layout:
    """Classify a model's caches by feeding it two tokens.

    Raises whatever the model raises: one that cannot be fed cannot be served.
    """
    caches = make_caches(model)
    slots = flatten(caches)
    kinds = {type(slot) for slot in slots}
    unknown = tuple(sorted(k.__name__ for k in kinds if k not in LINEAR + OPAQUE))
    logits = model(mx.array([[0, 0]]), cache=caches)
    eval_states(caches)
    filled = [i for i, s in enumerate(slots) if type(s) in LINEAR and s.keys is not None]
    linear = [slots[i] for i in filled]
    specs = tuple(tuple((a.shape[1], a.shape[3], a.dtype) for a in arrays_of(s)) for s in linear)
    windows = [slot.max_size for slot in linear if type(slot) is WindowCache]
    opaque = [slot for slot in slots if type(slot) in OPAQUE]
    return Layout(
        make=lambda: make_caches(model),
        vocab_size=logits.shape[-1],
        bytes_per_token=sum(h * d * t.size for spec in specs for h, d, t in spec),
        checkpoint_bytes=sum(a.nbytes for a in tree_arrays([s.state for s in opaque])),
        linear=tuple(filled),
        specs=specs,
        opaque=bool(opaque),
        batchable=kinds <= set(BATCHABLE),
        window=min(windows, default=None),
        unknown=unknown,
    )


def row_tail(
    layout: Layout, batch: Sequence[Any], row: int, count: int
) -> tuple[list[list[mx.array]], Caches]:
    """The newest `count` positions of a batch's row: linear slots' arrays, and opaque slots.

    `count` must not exceed the smallest window. Lazy; evaluate before the next step.
    """
    slots = flatten(batch)
    linear: list[list[mx.array]] = []
    for slot in (slots[i] for i in layout.linear):
        if type(slot) is BatchKVCache:
            view = (slice(row, row + 1), slice(None), slice(slot._idx - count, slot._idx))
            linear.append([slot.keys[view], slot.values[view]])
        else:
            ring = slot.extract(row)
            first = ring.keys.shape[2] - count
            linear.append([a[..., first:, :] for a in (ring.keys, ring.values)])
    return linear, [slot.extract(row) for slot in slots if type(slot) in OPAQUE]
