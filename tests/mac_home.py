"""A home folder as on a Mac, with the calls that a Mac's default cache folder needs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from platformdirs.macos import MacOS

from mlxcache.config import folder


class MacLibrary:
    """The C library of a Mac, as far as extended attributes: those set, by path."""

    def __init__(self, fails: int = 0):
        self.set: dict[str, tuple[str, bytes]] = {}
        self.fails = fails
        self.setxattr = _Function(self._setxattr)

    def _setxattr(self, *call: Any) -> int:
        path, name, value, size, position, options = call
        assert (len(value), position, options) == (size, 0, 0)
        if self.fails:
            ctypes.set_errno(self.fails)
            return -1
        self.set[os.fsdecode(path)] = (name.decode(), value)
        return 0


class _Function:
    argtypes: tuple[object, ...] = ()

    def __init__(self, call: Callable[..., int]):
        self.call = call

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes) == 6
        return self.call(*arguments)


class MacHome:
    """A home folder of a Mac; `cache_dir`: the default cache folder."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("HOME", str(home))
        for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
            monkeypatch.delenv(name, raising=False)
        dirs = MacOS("mlxcache")
        monkeypatch.setattr(folder, "SYSTEM", "darwin")
        monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: dirs.user_cache_path)
        monkeypatch.setattr(platformdirs, "user_data_path", lambda _: dirs.user_data_path)
        self.library = MacLibrary()
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: self.library)
        self.cache_dir = home / "Library" / "Application Support" / "mlxcache"
