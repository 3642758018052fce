"""The disk tier: runs of KV and checkpoints in files, found by token ids, and the sessions.

`Store` is the one door to the files of a folder, `Writer` the thread that writes them. Also here:
the table of sessions, and snapshots of them. Only files and SQLite: it knows neither MLX, models
nor asyncio. The format is described in docs/disk-format.md.
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
