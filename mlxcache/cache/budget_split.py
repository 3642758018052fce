"""How the memory budget is divided before anything is served. In bytes."""

from __future__ import annotations

from mlxcache.model.kv import Layout
from mlxcache.store.digests import BLOCK

MIN_TRANSIENT = 16 << 20

MOST_PENDING = 256 << 20
"""Copies on their way to disk, at most."""

MOST_POOL = 1 << 30


def pool(limit: int) -> int:
    """For MLX's pool of freed buffers."""
    return min(limit // 16, MOST_POOL)


def pending(limit: int, layout: Layout) -> int:
    """For copies on their way to disk, where there is a disk tier."""
    if not layout.cacheable:
        return 0
    return max(2 * BLOCK * layout.bytes_per_token, min(limit // 16, MOST_PENDING))


def transient(limit: int, least: int = 0) -> int:
    """For forward passes: an eighth, or `least`, what the longest ones need."""
    return min(max(limit // 8, least, MIN_TRANSIENT), limit // 3)
