"""Who is alive among the processes that share a folder: each holds a lock on a file of its own."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxcache.store.folder import Folder, remove

_TRIES, _PAUSE_S = 20, 0.01
"""A process that is gone may hold its lock a little longer."""


class ProcessLock:
    """One open store. The lock goes with the process, however that ends."""

    def __init__(self, folder: Folder):
        """Raises OSError. To be made inside `opening`, so that nobody takes it for dead."""
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = folder.locks / self.name
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """Remove the lock; a second time nothing happens."""
        if self._fd >= 0:
            with suppress(OSError):  # the disk may be read-only by now, or gone
                remove(self._path)
            os.close(self._fd)
            self._fd = -1


def alive(folder: Folder, name: str) -> bool:
    """Whether the store that `name` belongs to is still open."""
    try:
        fd = os.open(folder.locks / name, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        free = _free(fd)
        for _ in range(0 if free or _exists(name) else _TRIES):
            time.sleep(_PAUSE_S)
            free = free or _free(fd)
        return not free
    finally:
        os.close(fd)


def _free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _exists(name: str) -> bool:
    """Whether a process of the name's id is there; another container's may not be seen."""
    try:
        os.kill(int(name.partition("-")[0]), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


@contextmanager
def opening(folder: Folder) -> Iterator[None]:
    """Held by one store at a time, while it opens."""
    path: Path = folder.path / "open.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
