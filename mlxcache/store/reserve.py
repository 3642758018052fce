"""The reserve: a file that is removed while the disk is full, so that the index can be changed.

SQLite needs space to delete a row: for its log, and for the index of the log. On a full disk the
reserve is removed for that, and written again afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlxcache.store.folder import Folder, remove

RESERVE_BYTES = 1 << 20
"""Bytes of the reserve at most; with less free space a disk counts as full."""

SMALL_BYTES, PART = 256 << 10, 32
"""Least bytes of the reserve, and the divisor that gives its size from the folder's byte limit.

The size is the limit divided by `PART`, but from `SMALL_BYTES` to `RESERVE_BYTES`.
"""

LEAST_BYTES = 96 << 10
"""Bytes that SQLite needs at least to open the index and delete some rows."""


def reserve_bytes(limit: int) -> int:
    """Return the size of the reserve in bytes, for a folder that may take `limit` bytes."""
    return max(SMALL_BYTES, min(RESERVE_BYTES, limit // PART))


class Reserve:
    """The reserve of one folder. Thread-safe.

    `limit`: bytes that the folder may take, which decide the size of the reserve. If it is None, as
    in commands without a server, a reserve is written only after `freeing` found the disk full.
    """

    def __init__(self, folder: Folder, limit: int | None):
        self._folder = folder
        self._limited = limit is not None
        self._size = 0 if limit is None else reserve_bytes(limit)
        self._lock = threading.Lock()
        self._freeing = 0

    @contextmanager
    def freeing(self) -> Iterator[bool]:
        """Remove the reserve for the body of a `with` statement that frees space on a full disk.

        Yields True if the disk is full, that is, has less than `RESERVE_BYTES` free; otherwise
        yields False and leaves the reserve. After the body, or the last of several bodies that run
        at once, the reserve is written again as far as there is space.
        """
        with self._lock:
            self._freeing += 1
            full = self._give_up()
        try:
            yield full
        finally:
            with self._lock:
                self._freeing -= 1
                if not self._freeing:
                    self._make()

    def _give_up(self) -> bool:
        """Remove the reserve and return True if the disk is full; else, or on errors, False."""
        with suppress(OSError):  # the block says what is wrong with the disk
            if self._folder.free() < RESERVE_BYTES:
                if not self._limited:
                    self._size = min(RESERVE_BYTES, self._held() or SMALL_BYTES)
                remove(self._folder.reserve)
                return True
        return False

    def _held(self) -> int:
        path = self._folder.reserve
        return path.stat().st_size if path.exists() else 0

    def _make(self) -> None:
        """Extend the reserve to its full size, or as far as there is space. Ignores errors."""
        with suppress(OSError):
            lacking = self._size - self._held()
            if lacking < 0 and self._limited:  # of a higher limit
                os.truncate(self._folder.reserve, self._size)
            _append(self._folder, max(0, min(lacking, self._folder.free())))


def _append(folder: Folder, nbytes: int) -> None:
    """Append `nbytes` random bytes, which no file system compresses, to the folder's reserve.

    The file is created if it is missing. Raises OSError.
    """
    fd = os.open(folder.reserve, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        view = memoryview(os.urandom(nbytes))
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
