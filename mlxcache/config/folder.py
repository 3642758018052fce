"""Default of --cache-dir, and the default of earlier versions."""

from __future__ import annotations

import sys
from pathlib import Path

import platformdirs

SYSTEM = sys.platform


def default_cache_dir() -> Path:
    """Return the default cache folder.

    On a Mac it is not in ~/Library/Caches, which cleaners and macOS itself may empty: sessions must
    not go with it.
    """
    if SYSTEM == "darwin":
        return platformdirs.user_data_path("mlxcache")
    return platformdirs.user_cache_path("mlxcache")


def former_cache_dir() -> Path | None:
    """Return the default cache folder of earlier versions, or None if it was the same."""
    return platformdirs.user_cache_path("mlxcache") if SYSTEM == "darwin" else None
