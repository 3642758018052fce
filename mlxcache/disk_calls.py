"""System calls that differ between macOS and Linux: sync to disk, and read-ahead."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from contextlib import suppress

SYSTEM = sys.platform

F_RDADVISE, F_FULLFSYNC = 44, 51
"""Commands of fcntl(2) on macOS, from its <sys/fcntl.h>; not every Python names both."""

_RADVISORY = struct.Struct("@qi0q")
"""`struct radvisory` of macOS: offset and number of bytes, as off_t and int."""

_MOST_ADVISED = 2**31 - 1

_NOT_SUPPORTED = {
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.ENOTTY,
    errno.ENOSYS,
    errno.ENODEV,
}
"""Errors of file systems without F_FULLFSYNC, such as those of network shares."""


def sync(fd: int) -> None:
    """Write an open file or folder to permanent storage, and return when it is there.

    On macOS, fsync(2) may leave bytes in the drive's own cache: after a power failure, earlier ones
    can be lost although later ones are there. F_FULLFSYNC of fcntl(2) makes the drive write its
    cache to the medium. On a file system without F_FULLFSYNC, fsync is called. Blocks, on a Mac
    often for tens of milliseconds. Raises OSError.
    """
    if SYSTEM == "darwin":
        try:
            fcntl.fcntl(fd, F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    os.fsync(fd)


def read_ahead(fd: int, start: int = 0, length: int = 0) -> None:
    """Start reading bytes [start, start + length) of a file in the background. Does not block.

    If `length` is 0, reads up to the end of the file. Errors are ignored. Source: F_RDADVISE in
    fcntl(2) on macOS. Does nothing on Linux: it reads a file ahead that is read in order, into
    large pages, and posix_fadvise(2) reads into small ones, at half the speed.
    """
    if SYSTEM != "darwin":
        return
    with suppress(OSError):
        count = min(length or os.fstat(fd).st_size - start, _MOST_ADVISED)
        if count > 0:
            fcntl.fcntl(fd, F_RDADVISE, _RADVISORY.pack(start, count))
