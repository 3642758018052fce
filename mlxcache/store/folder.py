"""Layout of the store's folder: paths, sizes, durable writes, and the quarantine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mlxcache.disk_calls import sync
from mlxcache.private import make_folder
from mlxcache.store.database import NAME

RUN, CHECKPOINT = "run", "checkpoint"
KINDS = (RUN, CHECKPOINT)
SUFFIX = ".safetensors"
TEMP_SUFFIX = ".tmp"
WRITE_BYTES = 8 << 20
"""Bytes written by one call at most: the interpreter's lock is free during each."""

MOST_QUARANTINED = 8
"""Files that quarantine holds at most."""

QUARANTINE_PART = 8
"""Divisor: quarantine takes at most 1/QUARANTINE_PART of the byte limit, besides its newest file.
"""


class Folder:
    """Paths below one folder, readable by the user only.

    runs/ab/DIGEST.safetensors, checkpoints/ab/DIGEST.safetensors, beside them .OWNER-ID.tmp while
    they are written; quarantine/, locks/OWNER, index.sqlite and its log.
    """

    def __init__(self, path: Path):
        self.path = path
        self.kinds = {kind: path / f"{kind}s" for kind in KINDS}
        self.quarantine = path / "quarantine"
        self.locks = path / "locks"
        self.index = path / NAME
        self.device = 0

    def make(self) -> None:
        """Create the folders that are missing. Raises OSError."""
        make_folder(self.path)
        for path in (*self.kinds.values(), self.quarantine, self.locks):
            path.mkdir(mode=0o700, exist_ok=True)
        self.device = os.stat(self.path).st_dev

    def may_be_made_again(self) -> bool:
        """Tell if the folder would be made on the same disk, which may be unmounted.

        Raises OSError.
        """
        place = self.path
        while not place.exists() and place != place.parent:
            place = place.parent
        return os.stat(place).st_dev == self.device

    def file(self, kind: str, digest: bytes) -> Path:
        """Path of the file of `digest`."""
        name = digest.hex()
        return self.kinds[kind] / name[:2] / (name + SUFFIX)

    def temp(self, kind: str, digest: bytes, owner: str, id: int) -> Path:
        """Path of that file while the store with the lock `owner` writes it."""
        return self.file(kind, digest).with_name(f".{owner}-{id}{TEMP_SUFFIX}")

    def files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield every file of runs and checkpoints with its kind; it may be removed meanwhile."""
        for kind, top in self.kinds.items():
            for sub in _entries(top):
                if sub.is_dir(follow_symlinks=False):
                    for entry in _entries(Path(sub.path)):
                        yield kind, entry
                else:
                    yield kind, sub

    def overhead(self) -> int:
        """Bytes on disk besides runs and checkpoints: index, folders, quarantine, locks."""
        total = blocks(self.path) + sum(blocks(entry) for entry in _entries(self.path))
        for top in self.kinds.values():
            total += sum(blocks(sub) for sub in _entries(top))
        for top in (self.quarantine, self.locks):
            total += sum(blocks(entry) for entry in _entries(top))
        return total

    def set_aside(self, path: Path, limit: int | None) -> None:
        """Move a damaged file to quarantine, which is then trimmed to its share of `limit` bytes.

        Nothing is moved if the file does not exist. Raises OSError.
        """
        with suppress(FileNotFoundError):
            os.rename(path, self.quarantine / f"{time.time_ns()}-{path.name}")
        self.trim_quarantine(None if limit is None else limit // QUARANTINE_PART)

    def trim_quarantine(self, limit: int | None, *, keep: int = 1) -> None:
        """Remove the oldest quarantined files beyond the bounds; the newest `keep` stay."""
        found = self.quarantined()
        total = sum(size for _, size in found)
        while len(found) > keep and (
            len(found) > MOST_QUARANTINED or (limit is not None and total > limit)
        ):
            path, size = found.pop(0)
            remove(path)
            total -= size

    def free_quarantine(self, need: int) -> int:
        """Remove the oldest quarantined files until `need` bytes are freed; returns bytes freed."""
        freed = 0
        for path, size in self.quarantined():
            if freed >= need:
                break
            remove(path)
            freed += size
        return freed

    def quarantined(self) -> list[tuple[Path, int]]:
        """Quarantined files and their bytes on disk, oldest first."""
        try:
            found = sorted(self.quarantine.iterdir())
        except FileNotFoundError:
            return []
        return [(path, blocks(path)) for path in found]

    def log_bytes(self) -> int:
        """Bytes on disk of the index's log."""
        return blocks(self.path / f"{NAME}-wal")

    def free(self) -> int:
        """Bytes of the file system that are free for this user."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def block_size(self) -> int:
        """Allocation unit of the file system in bytes, at least 4096."""
        return max(4096, os.statvfs(self.path).f_frsize)


def blocks(path: Path | os.DirEntry[str]) -> int:
    """Bytes on disk of one file or folder; 0 if it is missing."""
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def write(temp: Path, final: Path, buffers: Sequence[bytes | memoryview]) -> int:
    """Write `buffers` to `temp`, sync it, and rename it to `final`; returns bytes on disk.

    Durable on return. Raises OSError, after removing both files.
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
    """Remove a file if it exists. Raises OSError."""
    with suppress(FileNotFoundError):
        path.unlink()


def sync_folder(path: Path) -> None:
    """Sync a folder, which makes new names in it durable. Raises OSError."""
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
