"""Layout of the store folder: paths, sizes, durable writes, quarantine, and the reserve."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxcache.disk_calls import sync
from mlxcache.private import make_folder
from mlxcache.store.database import NAME

STORE = "store"

RUN, CHECKPOINT = "run", "checkpoint"
KINDS = (RUN, CHECKPOINT)
SUFFIX = ".safetensors"
TEMP_SUFFIX = ".tmp"
WRITE_BYTES = 8 << 20
"""Most bytes written by one call, during which the interpreter's lock is released."""

MOST_QUARANTINED = 8

QUARANTINE_PART = 8
"""Divisor: all but the newest quarantined file take at most 1/QUARANTINE_PART of the byte limit."""

RESERVE_BYTES = 1 << 20
"""Bytes of the reserve at most; with less free space a disk counts as full."""

SMALL_BYTES, PART = 256 << 10, 32
"""Bytes of the reserve at least, and the part of the folder's limit that it otherwise has."""

LEAST_BYTES = 96 << 10
"""Bytes that SQLite needs at least to open the index and delete some rows."""


class Folder:
    def __init__(self, path: Path):
        self.path = path
        self.kinds = {kind: path / f"{kind}s" for kind in KINDS}
        self.quarantine = path / "quarantine"
        self.locks = path / "locks"
        self.index = path / NAME
        self.reserve = path / "reserve"
        self.device = 0

    def make(self) -> None:
        make_folder(self.path)
        for path in (*self.kinds.values(), self.quarantine, self.locks):
            path.mkdir(mode=0o700, exist_ok=True)
        self.note_device()

    def note_device(self) -> None:
        self.device = os.stat(self.path).st_dev

    def may_be_made_again(self) -> bool:
        """Return whether the folder, created again, would be on the disk of `note_device`."""
        place = self.path
        while not place.exists() and place != place.parent:
            place = place.parent
        return os.stat(place).st_dev == self.device

    def file(self, kind: str, digest: bytes) -> Path:
        name = digest.hex()
        return self.kinds[kind] / name[:2] / (name + SUFFIX)

    def temp(self, kind: str, digest: bytes, owner: str, id: int) -> Path:
        return self.file(kind, digest).with_name(f".{owner}-{id}{TEMP_SUFFIX}")

    def files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        for kind in KINDS:
            for _, entries in self.groups(kind):
                for entry in entries:
                    yield kind, entry

    def groups(self, kind: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
        for sub in _entries(self.kinds[kind]):
            if sub.is_dir(follow_symlinks=False):
                yield sub.name, _entries(Path(sub.path))
            else:
                yield "", [sub]

    def overhead(self) -> int:
        total = blocks(self.path) + sum(blocks(entry) for entry in _entries(self.path))
        for top in self.kinds.values():
            total += sum(blocks(sub) for sub in _entries(top))
        for top in (self.quarantine, self.locks):
            total += sum(blocks(entry) for entry in _entries(top))
        return total

    def set_aside(self, path: Path, limit: int | None) -> None:
        with suppress(FileNotFoundError):
            os.rename(path, self.quarantine / f"{time.time_ns()}-{path.name}")
        self.trim_quarantine(None if limit is None else limit // QUARANTINE_PART)

    def trim_quarantine(self, limit: int | None, *, keep: int = 1) -> None:
        """Remove the oldest files beyond `limit` bytes; the newest `keep` always stay."""
        found = self.quarantined()
        total = sum(size for _, size in found)
        while len(found) > keep and (
            len(found) > MOST_QUARANTINED or (limit is not None and total > limit)
        ):
            path, size = found.pop(0)
            remove(path)
            total -= size

    def free_quarantine(self, need: int) -> int:
        freed = 0
        for path, size in self.quarantined():
            if freed >= need:
                break
            remove(path)
            freed += size
        return freed

    def quarantined(self) -> list[tuple[Path, int]]:
        try:
            found = sorted(self.quarantine.iterdir())
        except FileNotFoundError:
            return []
        return [(path, blocks(path)) for path in found]

    def log_bytes(self) -> int:
        return blocks(self.path / f"{NAME}-wal")

    def free(self) -> int:
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def block_size(self) -> int:
        return max(4096, os.statvfs(self.path).f_frsize)


def blocks(path: Path | os.DirEntry[str]) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def write(temp: Path, final: Path, buffers: Sequence[bytes | memoryview]) -> int:
    """Write `buffers` to `temp`, sync it, and rename it to `final`; return its bytes on disk.

    The file is durable on return. Raises OSError, after removing both files.
    """
    if not final.parent.exists():
        make_folder(final.parent)
        sync_folder(final.parent.parent)
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # The size first: XFS allocates up to twice the bytes for a file that grows at its end.
            os.ftruncate(fd, sum(len(buffer) for buffer in buffers))
            for buffer in buffers:
                _write_all(fd, memoryview(buffer))
            sync(fd)
            size = os.fstat(fd).st_blocks * 512
        finally:
            os.close(fd)
        os.rename(temp, final)
        sync_folder(final.parent)
    except BaseException:
        remove(temp)
        remove(final)
        raise
    return size


def remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


def sync_folder(path: Path) -> None:
    """Sync a folder, which makes the names of new files in it durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, view: memoryview) -> None:
    at = 0
    while at < len(view):
        at += os.write(fd, view[at : at + WRITE_BYTES])


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


class Reserve:
    """A file that is removed while the disk is full, so that the index can be changed. Thread-safe.

    SQLite needs space to delete a row: for its log, and for the index of the log. Without a
    `limit`, as in commands without a server, a reserve is written only after a disk was found full.
    """

    def __init__(self, folder: Folder, limit: int | None):
        self._folder = folder
        self._limited = limit is not None
        self._size = 0 if limit is None else max(SMALL_BYTES, min(RESERVE_BYTES, limit // PART))
        self._lock = threading.Lock()
        self._freeing = 0

    @contextmanager
    def freeing(self) -> Iterator[bool]:
        """Remove the reserve for the body of a `with` statement that frees space on a full disk.

        Yields whether the disk is full; otherwise the reserve stays. After the last of several
        bodies that run at once, it is written again as far as there is space.
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
        with suppress(OSError):
            lacking = self._size - self._held()
            if lacking < 0 and self._limited:  # of a higher limit
                os.truncate(self._folder.reserve, self._size)
            # random bytes, which no file system compresses
            content = os.urandom(max(0, min(lacking, self._folder.free())))
            fd = os.open(self._folder.reserve, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                _write_all(fd, memoryview(content))
            finally:
                os.close(fd)
