"""Folder of the kernels that MLX compiles, where no other user can put code.

MLX compiles kernels for a CPU to files in $TMPDIR/mlx, and runs whatever a file of a kernel's name
has in it. Without TMPDIR that is /tmp/mlx, which any user of the machine may make first. On a Mac,
the folder for temporary files is private already.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from mlxcache.config.folder import default_cache_dir
from mlxcache.private import make_folder

_SHARED = stat.S_IWGRP | stat.S_IWOTH
"""Bits of a mode with which others can write."""

LINKING_S = 1.0
"""Age in seconds below which an incomplete library may still be in the making."""

_ELF = struct.Struct("<4s36xQ10xHH")
"""Start of a library, with the place of its table of sections: format, offset, size, number."""

log = logging.getLogger("mlxcache.engine")


def keep_kernels_private() -> None:
    """Make MLX compile its kernels in the private folder."""
    for name, value in kernel_variables().items():
        os.putenv(name, value)


def kernel_folder() -> Path:
    return default_cache_dir() / "kernels"


@cache
def kernel_variables() -> dict[str, str]:
    """Return the environment variable for programs that use MLX; none on a Mac."""
    if sys.platform == "darwin":
        return {}
    temporary = Path(tempfile.gettempdir())
    own = temporary if _is_usable(temporary) else kernel_folder()
    return {"TMPDIR": str(open_kernel_folder(own))}


def open_kernel_folder(folder: Path) -> Path:
    """Make `folder` if it is missing, remove incomplete libraries in it, and return it.

    Returns a new temporary folder instead if other users could have put something there.
    """
    try:
        make_folder(folder)
        if _is_usable(folder):
            _remove_damaged(folder)
            return folder
        why = "others can write to it or replace it, or it allows no programs"
    except OSError as error:
        why = str(error)
    fresh = tempfile.mkdtemp(prefix="mlxcache-kernels-")
    log.warning(
        "kernels are compiled again at each start, in %s, because %s cannot be used (%s): set "
        "TMPDIR to a folder that only you can write to",
        *(fresh, folder, why),
    )
    return Path(fresh)


def _is_usable(folder: Path) -> bool:
    itself, above = folder.lstat(), folder.parent.stat()
    ours = stat.S_ISDIR(itself.st_mode) and itself.st_uid == os.getuid()
    fixed = above.st_uid in (0, os.getuid()) and not (
        above.st_mode & _SHARED and not above.st_mode & stat.S_ISVTX
    )
    runs = os.access(folder, os.W_OK) and not os.statvfs(folder).f_flag & os.ST_NOEXEC
    return ours and not itself.st_mode & _SHARED and fixed and runs


def _remove_damaged(folder: Path) -> None:
    """Remove incomplete libraries, which MLX would load instead of compiling them again."""
    for library in folder.glob("mlx/*/cpu/*.so"):
        with suppress(FileNotFoundError):  # another process removed it
            finished = abs(time.time() - library.stat().st_mtime) > LINKING_S
            if finished and not _is_complete(library):
                log.warning("an incomplete kernel is compiled again: %s", library)
                library.unlink()


def _is_complete(library: Path) -> bool:
    """Return whether an ELF library (elf(5)) is complete: its sections' table is at its end."""
    with library.open("rb") as file:
        head = file.read(_ELF.size)
        if len(head) < _ELF.size:
            return False
        magic, offset, size, count = _ELF.unpack(head)
        length = os.fstat(file.fileno()).st_size
    return bool(magic == b"\x7fELF" and 0 < offset + size * count <= length)
