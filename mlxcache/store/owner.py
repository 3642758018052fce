"""Who is alive among the processes that share a folder: each holds a lock on a file of its own."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxcache.store.folder import Folder, remove


class Owner:
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
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


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
