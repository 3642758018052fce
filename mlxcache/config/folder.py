"""Default of `--cache-dir`."""

from __future__ import annotations

import sys
from pathlib import Path

import platformdirs

SYSTEM = sys.platform


def default_cache_dir() -> Path:
    """Return the default cache folder.

    On macOS it is in Application Support and not in ~/Library/Caches, which macOS and cleaning
    programs may empty: saved sessions would be lost. Elsewhere it is in the user's cache folder.
    """
    if SYSTEM == "darwin":
        return platformdirs.user_data_path("mlxcache")
    return platformdirs.user_cache_path("mlxcache")
