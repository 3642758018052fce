"""A stand-in for the calls of macOS that `disk_calls` makes."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Callable
from typing import Any

import pytest

from mlxcache import disk_calls

_NAMES = {51: "F_FULLFSYNC", 44: "F_RDADVISE"}


class MacDisk:
    """Records syncs and advice in `calls`, as (call, descriptor).

    `steps`: the same with "file" or "folder", and renames, in order. `refuses`: number of the
    error of each fcntl call; None: it succeeds. `advised`: the (offset, bytes) of each F_RDADVISE.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[tuple[str, int]] = []
        self.steps: list[str] = []
        self.advised: list[tuple[int, int]] = []
        self.refuses: int | None = None
        self._rename: Callable[..., None] = os.rename
        monkeypatch.setattr(disk_calls, "SYSTEM", "darwin")
        monkeypatch.setattr(fcntl, "fcntl", self._fcntl)
        monkeypatch.setattr(os, "fsync", lambda fd: self._note("fsync", fd))
        monkeypatch.setattr(os, "rename", self._renamed)

    def _note(self, call: str, fd: int) -> None:
        self.calls.append((call, fd))
        kind = "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
        self.steps.append(f"{call} {kind}")

    def _fcntl(self, fd: int, command: int, argument: Any = 0) -> int:
        self._note(_NAMES[command], fd)
        if self.refuses is not None:
            raise OSError(self.refuses, "refused")
        if command == 44:
            # off_t ra_offset, int ra_count, and the padding of the struct
            assert len(argument) == 16
            self.advised.append(struct.unpack("=qi4x", argument))
        return 0

    def _renamed(self, old: Any, new: Any) -> None:
        self.steps.append("rename")
        self._rename(old, new)
