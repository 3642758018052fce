"""Reading of files from disk, not from the page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

EVERYTHING = Path("/proc/sys/vm/drop_caches")
READ_BYTES = 8 << 20


def drop(files: Sequence[Path]) -> str | None:
    """Drop `files`, which must be durable, from the page cache; return the method used.

    None: this system has no method.
    """
    try:
        EVERYTHING.write_text("3")
    except OSError:
        pass
    else:
        return str(EVERYTHING)
    if not hasattr(os, "posix_fadvise"):
        return None
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return "posix_fadvise"


def read(files: Sequence[Path]) -> int:
    """Read `files` in sequence into one buffer; the number of bytes."""
    buffer, total = memoryview(bytearray(READ_BYTES)), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total
