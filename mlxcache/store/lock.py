"""File locks: of open stores in a store folder, and of servers of a cache folder.

Each open store holds a lock file of its own, so that other processes can tell which files are still
being written. Every server holds `serving.lock` shared, and a lock file of its own, the note, which
has its address. A command that changes files takes `serving.lock` exclusively. The operating system
releases a lock when its process ends for any reason. A copy of a folder is not locked.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxcache.errors import StoreError
from mlxcache.private import make_folder
from mlxcache.store.database import store_errors
from mlxcache.store.folder import STORE, Folder, remove


class InUse(StoreError):
    """Error raised if the cache folder is locked by a server, or by a command that changes it."""


NAME = "serving.lock"
NOTES = "serving"
NOTE = "[0-9]*-*.json"


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server: its process id, its address, and the model's name as the user gave it.

    `id`: the id that the server repeats in `GET /health`, since another one may answer at `url`.
    `folder`: the inode of its cache folder. `models`: folders and Hub ids of all models that it
    serves, draft models included. `names`: the names that requests may use for them.
    """

    id: str
    folder: int
    pid: int
    url: str
    model: str
    models: tuple[str, ...]
    names: tuple[str, ...]


@contextmanager
def serving(
    cache_dir: Path, url: str, model: str, models: Sequence[str] = (), names: Sequence[str] = ()
) -> Iterator[str]:
    """Context manager: hold the shared lock of a server, and publish it as a `Serving`.

    Yields the server's id. Raises InUse while a command changes the folder, and StoreError if the
    folder cannot be written.
    """
    with _locked(cache_dir, fcntl.LOCK_SH) as free:
        if not free:
            raise InUse(
                f"Another command is changing {cache_dir}. Wait for it, or choose another folder "
                "with --cache-dir DIR."
            )
        notes = cache_dir / NOTES
        with store_errors(cache_dir):
            notes.mkdir(mode=0o700, exist_ok=True)
            with opening_lock(notes):
                for note in notes.glob(NOTE):
                    if not is_alive(notes, note.name):
                        note.unlink(missing_ok=True)
                lock = ProcessLock(notes, ".json")
        try:
            with store_errors(cache_dir):
                folder = os.stat(cache_dir).st_ino
                mine = (lock.name, folder, os.getpid(), url, model, tuple(models), tuple(names))
                text = json.dumps(asdict(Serving(*mine)))
                try:
                    lock.path.write_text(text)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    remove(Folder(cache_dir / STORE).reserve)  # which the store makes again
                    lock.path.write_text(text)
            yield lock.name
        finally:
            lock.release()


@contextmanager
def exclusive_lock(cache_dir: Path) -> Iterator[None]:
    """Context manager: hold the exclusive lock of a command that changes the folder."""
    with _locked(cache_dir, fcntl.LOCK_EX) as free:
        if not free:
            names = " and ".join(
                f"{one.url} ({one.model}, process {one.pid})" for one in servers(cache_dir)
            )
            holder = f"The server at {names}" if names else "Another mlxcache command or server"
            raise InUse(f"{holder} uses {cache_dir}. Wait until it answers or ends, or stop it.")
        yield


def servers(cache_dir: Path) -> list[Serving]:
    """Return the running servers that use this cache folder.

    Their note files are locked and name the folder's inode. So neither a copy of a note nor a hard
    link to one counts.
    """
    found = []
    for note in sorted((cache_dir / NOTES).glob(NOTE)):
        with suppress(OSError, ValueError, TypeError, AttributeError):
            known: Mapping[str, Any] = json.loads(note.read_text())
            values: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in known.items()
            }
            one = Serving(**values)
            here = one.folder == os.stat(cache_dir).st_ino
            if here and is_alive(note.parent, note.name):
                found.append(one)
    return found


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def _locked(cache_dir: Path, kind: int) -> Iterator[bool]:
    """Try to hold `serving.lock` inside the block; yield whether it could be taken."""
    with store_errors(cache_dir):
        make_folder(cache_dir)
        fd = os.open(cache_dir / NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise StoreError(f"{cache_dir} cannot be locked: {error.strerror}.") from error
        yield True
    finally:
        os.close(fd)


_TRIES, _PAUSE_S = 20, 0.01
"""Tries to take a lock, and seconds between them: an ended process may hold it a moment longer."""


class ProcessLock:
    """Lock file of one open store or server: while it is locked, the store is open.

    Its `name` marks the files that the store is writing.
    """

    def __init__(self, folder: Path, suffix: str = ""):
        """Create and lock a file. Call inside `opening_lock`: none sees it before it is locked."""
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.path = folder / (self.name + suffix)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):  # the disk may be read-only or gone
                remove(self.path)
            os.close(self._fd)
            self._fd = -1


class NoLock(ProcessLock):
    def __init__(self) -> None:
        self.name, self.path, self._fd = "", Path(), -1


def is_alive(folder: Path, name: str) -> bool:
    """Return whether a lock is held. Blocks for 0.2 s if its process seems to have ended."""
    try:
        fd = os.open(folder / name, os.O_RDONLY)  # the disk may be read-only
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
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two may ask at once
    except BlockingIOError:
        return False
    return True


def _exists(name: str) -> bool:
    """Return whether the process named in a lock exists; False for one of another container."""
    try:
        return is_running(int(name.partition("-")[0]))
    except (ValueError, OverflowError):
        return False


@contextmanager
def opening_lock(folder: Path) -> Iterator[None]:
    """Hold the lock under which one process at a time adds and removes lock files in `folder`."""
    fd = os.open(folder / "open.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
