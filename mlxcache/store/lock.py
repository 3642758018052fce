"""Who serves from a cache folder: so that commands without a server change nothing under one.

Every server holds `serving.lock` shared and leaves a note of its address beside it; a command that
changes files takes the lock alone. The system lets go of a lock however its process ends.
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
    """Somebody else has the folder, in a way that leaves no room for this."""


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
    """Held by a server as long as it runs.

    Raises InUse while a command changes the folder, StoreError where it cannot be written.
    """
    with _locked(cache_dir, fcntl.LOCK_SH) as free:
        if not free:
            raise InUse(
                f"Another command is changing {cache_dir}. Wait for it, or choose another folder "
                "with --cache-dir DIR."
            )
        note = cache_dir / NOTES / f"{os.getpid()}.json"
        with _named(cache_dir):
            note.parent.mkdir(mode=0o700, exist_ok=True)
            _sweep(note.parent)
            note.touch(mode=0o600)
            note.write_text(json.dumps(asdict(Serving(os.getpid(), url, model))))
        try:
            yield
        finally:
            with suppress(OSError):  # the disk may have gone: a stale note does no harm
                note.unlink(missing_ok=True)


@contextmanager
def alone(cache_dir: Path) -> Iterator[None]:
    """Held by a command that changes the folder without a server.

    Raises InUse, naming the servers, where one runs.
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
    """The servers that run on this folder, by their notes."""
    found = []
    for note in sorted((cache_dir / NOTES).glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            one = Serving(**json.loads(note.read_text()))
            if runs(one.pid):
                found.append(one)
    return found


def _sweep(notes: Path) -> None:
    """Remove what servers left that were killed."""
    for note in notes.glob("*.json"):
        if note.stem.isdecimal() and not runs(int(note.stem)):
            note.unlink(missing_ok=True)


def runs(pid: int) -> bool:
    """Whether there is a process `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _locked(cache_dir: Path, kind: int) -> Iterator[bool]:
    """Whether the lock could be had, which is then held. Raises StoreError."""
    with _named(cache_dir):
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
def _named(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or cache_dir}: {error.strerror}.") from error


_TRIES, _PAUSE_S = 20, 0.01
"""A process that is gone may hold its lock a little longer."""


class ProcessLock:
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
            with suppress(OSError):  # the disk may be read-only by now, or gone
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
    """Whether a process of the name's id is there; another container's may not be seen."""
    try:
        os.kill(int(name.partition("-")[0]), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


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
