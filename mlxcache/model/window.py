"""A sliding window that keeps every position, so that it can be cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache


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
