"""Read files from disk instead of the system's page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

EVERYTHING = Path("/proc/sys/vm/drop_caches")
READ_BYTES = 8 << 20
BY_MSYNC = "msync"
MS_INVALIDATE = 2
"""Flag of msync(2), the same number on macOS and Linux."""


def drop(files: Sequence[Path]) -> str | None:
    """Drop `files` from the page cache and return the name of the method used.

    The files must have been synced. Returns None if this system has no method, or if msync failed.
    Raises OSError if a file cannot be opened. If this process may write to `EVERYTHING`, as root
    can on Linux, the whole page cache is dropped. On a Mac the method is `msync(MS_INVALIDATE)`,
    which the system may ignore. If a file is then read faster than the disk can deliver, the system
    has ignored it.
    """
    try:
        EVERYTHING.write_text("3")
    except OSError:
        pass
    else:
        return str(EVERYTHING)
    if sys.platform == "darwin":
        return _invalidate(files)
    if not hasattr(os, "posix_fadvise"):
        return None
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return "posix_fadvise"


def _invalidate(files: Sequence[Path]) -> str | None:
    """Drop the pages of `files` by mapping each and calling msync(MS_INVALIDATE).

    Returns the name of the method, or None if a call fails.
    """
    library = ctypes.CDLL(None, use_errno=True)
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as mapped:
            start = ctypes.c_char.from_buffer(mapped)
            failed = library.msync(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), MS_INVALIDATE
            )
            del start  # a mapping with a pointer into it cannot be closed
        if failed:
            return None
    return BY_MSYNC


def read(files: Sequence[Path]) -> int:
    """Read `files` one after another, discard their content, and return the number of bytes."""
    buffer, total = memoryview(bytearray(READ_BYTES)), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total
