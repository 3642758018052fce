"""Bytes that MLX counts beyond those of arrays, and a process's peak, on each system."""

from __future__ import annotations

import resource
import sys

import mlx.core as mx

GPU_PAGE = 16_384
"""Bytes of a page on Apple chips, and of those that MLX's CUDA allocator takes."""

RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of one unit of `ru_maxrss`. Source: getrusage(2) of each system."""


def rounding_bytes(arrays: int, *, on_gpu: bool | None = None) -> int:
    """Bytes by which MLX's count of so many arrays may exceed their own; 0 on a CPU.

    On a GPU an array takes whole pages, and may get a freed buffer with up to two pages more.
    Source: `MetalAllocator::malloc` in
    https://github.com/ml-explore/mlx/blob/main/mlx/backend/metal/allocator.cpp and
    `BufferCache::reuse_from_cache` in
    https://github.com/ml-explore/mlx/blob/main/mlx/backend/common/buffer_cache.h
    """
    if on_gpu is None:
        on_gpu = mx.default_device() != mx.Device(mx.cpu)
    return 3 * max(GPU_PAGE, resource.getpagesize()) * arrays if on_gpu else 0


def peak_bytes() -> int:
    """The largest resident size that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RUSAGE_UNIT
