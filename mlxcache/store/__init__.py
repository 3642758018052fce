"""The disk tier: runs of KV and checkpoints in files, found again by their tokens.

Files and SQLite only: no MLX, no asyncio. What other layers use is named here.
"""

from mlxcache.safetensors import Tensor
from mlxcache.store.database import Database
from mlxcache.store.found import Found, Piece, Problem, Saved, StoreStats
from mlxcache.store.store import FREE_FLOOR, Store
from mlxcache.store.writer import Job, Writer

__all__ = [
    "FREE_FLOOR",
    "Database",
    "Found",
    "Job",
    "Piece",
    "Problem",
    "Saved",
    "Store",
    "StoreStats",
    "Tensor",
    "Writer",
]
