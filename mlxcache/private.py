"""Creation of files and folders that only their user can read, whatever the umask."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents with mode 0700; those that exist keep their mode."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def create(path: Path) -> BinaryIO:
    """Create or empty a file, set its mode to 0600, and open it for writing bytes.

    An existing file of another user keeps its mode.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    if os.name == "posix" and os.fstat(fd).st_uid == os.getuid() and path.is_file():
        os.fchmod(fd, 0o600)  # it may have existed
    return os.fdopen(fd, "wb")


def replace(path: Path, content: bytes) -> None:
    """Write a whole file, which no other process ever sees in part; create its folder if needed."""
    make_folder(path.parent)
    fd, draft = tempfile.mkstemp(".tmp", path.name, path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(content)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
