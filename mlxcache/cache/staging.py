"""Buffers for copies of KV that wait to be written to disk, used again and again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxcache.safetensors import Tensor


class StagingBuffers:
    """Reusable buffers of `size` bytes each, for copies of KV that wait to be written to disk.

    A copy that takes at most half of `size`, or more than `size`, is not put into one of them:
    `take` allocates memory for it alone.
    """

    def __init__(self, size: int):
        self.size = size
        self._free: list[memoryview] = []
        self._taken: dict[int, memoryview] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all staging buffers, in use or free."""
        return self.size * (len(self._free) + len(self._taken))

    def release_free(self) -> None:
        """Release the memory of the staging buffers that are not in use."""
        self._free.clear()

    def take(self, size: int) -> memoryview:
        """Return uninitialised memory of `size` bytes: a staging buffer's, or newly allocated.

        Hand it back with `give_back` or `put_back`.
        """
        if not self.size // 2 < size <= self.size:
            return np.empty(size, np.uint8).data
        whole = self._free.pop() if self._free else np.empty(self.size, np.uint8).data
        part = whole[:size]
        self._taken[_address(part)] = whole
        return part

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Mark the staging buffer that holds `tensors` as free, for use by a later `take`.

        The first tensor is at the buffer's start. Does nothing if they are not in a staging buffer.
        They must not be read afterwards.
        """
        if tensors:
            self.put_back(tensors[0].bytes)

    def put_back(self, part: memoryview) -> None:
        """Mark the staging buffer that begins at the address of `part` as free for a later `take`.

        `part`: a result of `take`, or the beginning of one. Does nothing if that result is not a
        staging buffer.
        """
        if (whole := self._taken.pop(_address(part), None)) is not None:
            self._free.append(whole)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
