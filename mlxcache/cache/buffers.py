"""Memory for copies on their way to disk, used again and again. MLX thread only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxcache.model.kv import Layout
from mlxcache.store.digests import BLOCK
from mlxcache.tensor import Tensor

RUN_TOKENS, RUN_BYTES = 2048, 32 << 20
"""The most that one file holds: what a restore reads at once, and a copy takes beside a reply."""


def run_tokens(layout: Layout, room: int) -> int:
    """How many tokens one file holds where `room` bytes may be on their way to disk."""
    most = min(RUN_BYTES, room // 2) // max(1, layout.bytes_per_token)
    return max(BLOCK, min(RUN_TOKENS, most) // BLOCK * BLOCK)


class Buffers:
    """Buffers of `size` bytes each; a copy of less than half of that gets memory of its own."""

    def __init__(self, size: int):
        self.size = size
        self._free: list[memoryview] = []
        self._taken: dict[int, memoryview] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        return self.size * (len(self._free) + len(self._taken))

    def rest(self) -> None:
        """Give back to the system what is not in use."""
        self._free.clear()

    def take(self, size: int) -> memoryview:
        """Room for `size` bytes, with anything in it."""
        if not self.size // 2 < size <= self.size:
            return np.empty(size, np.uint8).data
        whole = self._free.pop() if self._free else np.empty(self.size, np.uint8).data
        part = whole[:size]
        self._taken[_address(part)] = whole
        return part

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Take back what `take` gave for `tensors`, which nobody reads any more."""
        if tensors and (whole := self._taken.pop(_address(tensors[0].bytes), None)) is not None:
            self._free.append(whole)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
