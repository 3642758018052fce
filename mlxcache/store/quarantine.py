"""Damaged files, set aside for a person to look at; few, and the first to go."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from mlxcache.store.folder import Folder, blocks, remove

MOST_FILES = 8
SHARE = 8
"""All but the newest go when they take more than this part of the limit: one in 8."""


def put(folder: Folder, path: Path, limit: int | None) -> None:
    """Move `path` there, if it still is; what is too much goes. Raises OSError."""
    with suppress(FileNotFoundError):
        os.rename(path, folder.quarantine / f"{time.time_ns()}-{path.name}")
    trim(folder, None if limit is None else limit // SHARE)


def trim(folder: Folder, limit: int | None, *, keep: int = 1) -> None:
    """Remove the oldest, down to the bounds; the newest `keep` stay."""
    found = entries(folder)
    total = sum(size for _, size in found)
    while len(found) > keep and (len(found) > MOST_FILES or (limit is not None and total > limit)):
        path, size = found.pop(0)
        remove(path)
        total -= size


def free(folder: Folder, need: int) -> int:
    """Remove the oldest until `need` bytes are freed or none is left; returns bytes freed."""
    freed = 0
    for path, size in entries(folder):
        if freed >= need:
            break
        remove(path)
        freed += size
    return freed


def entries(folder: Folder) -> list[tuple[Path, int]]:
    """Its files and their bytes on disk, oldest first."""
    try:
        found = sorted(folder.quarantine.iterdir())
    except FileNotFoundError:
        return []
    return [(path, blocks(path)) for path in found]
