"""A file with settings that a client is given for one run. A key may be in it.

It is locked as long as the command or its client lives, for the client inherits the lock. So what a
command that was killed has left is told from what is in use, and the next one removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxcache.private import create

PREFIX = "mlxcache-launch-"
NAME = "settings.json"


@contextmanager
def settings_file(settings: Mapping[str, Any]) -> Iterator[tuple[Path, int]]:
    """A file with `settings`, which is there meanwhile; the client is to inherit the descriptor."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        path = Path(folder) / NAME
        with create(path) as file:
            fcntl.flock(
                file, fcntl.LOCK_EX
            )  # before anything is in it: `sweep` spares an empty one
            file.write(json.dumps(settings).encode())
            file.flush()
            yield path, file.fileno()


def sweep() -> list[Path]:
    """Remove the files of commands that were killed, once their clients are gone too.

    Those that cannot be removed are returned.
    """
    failed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if _abandoned(folder):
                (folder / NAME).unlink(missing_ok=True)
                with suppress(FileNotFoundError):  # another command sweeps too
                    folder.rmdir()
        except OSError:
            failed.append(folder / NAME)
    return failed


def _abandoned(folder: Path) -> bool:
    """Whether it is this user's, with a file that nobody holds. Raises OSError."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        fd = os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_size > 0
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
