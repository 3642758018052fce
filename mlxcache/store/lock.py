"""Locks of processes: open stores in a store folder, and servers of a cache folder.

Each open store holds a lock file of its own, so that others know which files are in writing. Every
server holds `serving.lock` shared and leaves a note of its address beside it; a command that
changes files takes it exclusively. The system releases a lock however its process ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mlxcache.errors import StoreError
from mlxcache.private import make_folder
from mlxcache.store.folder import Folder, remove


class InUse(StoreError):
    """Another process uses the folder in a way that excludes this use."""


NAME = "serving.lock"
NOTES = "serving"


@dataclass(frozen=True, slots=True)
class Serving:
    """A server: its process, its address, and the model's name as it was given."""

    pid: int
    url: str
    model: str


@contextmanager
def serving(cache_dir: Path, url: str, model: str) -> Iterator[None]:
    """Hold the shared lock of a server, and publish its address, inside the block.

    Raises InUse while a command changes the folder, StoreError if it cannot be written.
    """
    with _locked(cache_dir, fcntl.LOCK_SH) as free:
        if not free:
            raise InUse(
                f"Another command is changing {cache_dir}. Wait for it, or choose another folder "
                "with --cache-dir DIR."
            )
        note = cache_dir / NOTES / f"{os.getpid()}.json"
        with _folder_errors(cache_dir):
            note.parent.mkdir(mode=0o700, exist_ok=True)
            _sweep(note.parent)
            note.touch(mode=0o600)
            note.write_text(json.dumps(asdict(Serving(os.getpid(), url, model))))
        try:
            yield
        finally:
            with suppress(OSError):  # the disk may be gone; a stale note is harmless
                note.unlink(missing_ok=True)


@contextmanager
def exclusive_lock(cache_dir: Path) -> Iterator[None]:
    """Hold the exclusive lock of a command that changes the folder without a server.

    Raises InUse, naming the servers, if one runs.
    """
    with _locked(cache_dir, fcntl.LOCK_EX) as free:
        if not free:
            names = " and ".join(
                f"{one.url} ({one.model}, process {one.pid})" for one in servers(cache_dir)
            )
            holder = f"The server at {names} uses" if names else "Another mlxcache command changes"
            raise InUse(f"{holder} {cache_dir}. Ask it with --url URL, or stop it and try again.")
        yield


def servers(cache_dir: Path) -> list[Serving]:
    """List the servers that run on this folder, by their notes."""
    found = []
    for note in sorted((cache_dir / NOTES).glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            one = Serving(**json.loads(note.read_text()))
            if is_running(one.pid):
                found.append(one)
    return found


def _sweep(notes: Path) -> None:
    """Remove the notes of killed servers."""
    for note in notes.glob("*.json"):
        if note.stem.isdecimal() and not is_running(int(note.stem)):
            note.unlink(missing_ok=True)


def is_running(pid: int) -> bool:
    """Tell if a process `pid` exists, also another user's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _locked(cache_dir: Path, kind: int) -> Iterator[bool]:
    """Try to hold the lock inside the block; yields False if it is taken. Raises StoreError."""
    with _folder_errors(cache_dir):
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


@contextmanager
def _folder_errors(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or cache_dir}: {error.strerror}.") from error


_TRIES, _PAUSE_S = 20, 0.01
"""A process that ended may hold its lock for a moment longer."""


class ProcessLock:
    """Lock of one open store, released with the process however that ends."""

    def __init__(self, folder: Folder):
        """Take the lock, inside `opening_lock` so that no process sees it free. Raises OSError."""
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = folder.locks / self.name
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """Remove and release the lock; idempotent."""
        if self._fd >= 0:
            with suppress(OSError):  # the disk may be read-only or gone
                remove(self._path)
            os.close(self._fd)
            self._fd = -1


def is_alive(folder: Folder, name: str) -> bool:
    """Tell if the store that holds the lock `name` is still open."""
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
    """Tell if the process in a lock's name exists; one of another container may be invisible."""
    try:
        return is_running(int(name.partition("-")[0]))
    except (ValueError, OverflowError):
        return False


@contextmanager
def opening_lock(folder: Folder) -> Iterator[None]:
    """Hold the lock that one store at a time takes while it opens. Blocks. Raises OSError."""
    path: Path = folder.path / "open.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
