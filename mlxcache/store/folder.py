"""Layout of the store folder: paths, sizes, durable writes, and the quarantine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mlxcache.disk_calls import sync
from mlxcache.private import make_folder
from mlxcache.store.database import NAME

STORE = "store"
"""Name of the store folder in the cache folder."""

RUN, CHECKPOINT = "run", "checkpoint"
KINDS = (RUN, CHECKPOINT)
SUFFIX = ".safetensors"
TEMP_SUFFIX = ".tmp"
WRITE_BYTES = 8 << 20
"""Most bytes written by one call, during which the interpreter's lock is released."""

MOST_QUARANTINED = 8
"""Most files in the quarantine."""

QUARANTINE_PART = 8
"""Divisor: all but the newest quarantined file take at most 1/QUARANTINE_PART of the byte limit."""


class Folder:
    """Paths inside one store folder, which only the user can read.

    Files are runs/ab/DIGEST.safetensors and checkpoints/ab/DIGEST.safetensors, where ab is the
    start of the digest. While being written they are called .OWNER-ID.tmp, in the same folder,
    where OWNER is the name of the process lock of the store that writes, and ID that of the index
    row. There are also quarantine/, locks/OWNER, the file reserve, and index.sqlite with its
    write-ahead log.
    """

    def __init__(self, path: Path):
        self.path = path
        self.kinds = {kind: path / f"{kind}s" for kind in KINDS}
        self.quarantine = path / "quarantine"
        self.locks = path / "locks"
        self.index = path / NAME
        self.reserve = path / "reserve"
        self.device = 0

    def make(self) -> None:
        """Create the store folder and its subfolders if they are missing. Raises OSError."""
        make_folder(self.path)
        for path in (*self.kinds.values(), self.quarantine, self.locks):
            path.mkdir(mode=0o700, exist_ok=True)
        self.note_device()

    def note_device(self) -> None:
        """Remember the disk that the folder is on, for `may_be_made_again`. Raises OSError."""
        self.device = os.stat(self.path).st_dev

    def may_be_made_again(self) -> bool:
        """Return whether the folder, created again, would be on the disk of `note_device`.

        False while that disk is not mounted. Raises OSError.
        """
        place = self.path
        while not place.exists() and place != place.parent:
            place = place.parent
        return os.stat(place).st_dev == self.device

    def file(self, kind: str, digest: bytes) -> Path:
        """Return the path of the file of `kind` (run or checkpoint) with the digest `digest`."""
        name = digest.hex()
        return self.kinds[kind] / name[:2] / (name + SUFFIX)

    def temp(self, kind: str, digest: bytes, owner: str, id: int) -> Path:
        """Return the path under which a file is written before it gets its final name.

        `owner`: name of the process lock of the writing store. `id`: id of the file's index row.
        """
        return self.file(kind, digest).with_name(f".{owner}-{id}{TEMP_SUFFIX}")

    def files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield each file in the folders of runs and checkpoints, with its kind.

        Other processes may remove a file at any time.
        """
        for kind in KINDS:
            for _, entries in self.groups(kind):
                for entry in entries:
                    yield kind, entry

    def groups(self, kind: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
        """Yield the subfolders of a kind (run or checkpoint), each as (name, files in it).

        A file that lies beside the subfolders is yielded alone, with an empty name.
        """
        for sub in _entries(self.kinds[kind]):
            if sub.is_dir(follow_symlinks=False):
                yield sub.name, _entries(Path(sub.path))
            else:
                yield "", [sub]

    def overhead(self) -> int:
        """Return the bytes on disk of everything except runs and checkpoints.

        That is the index, the file that `Reserve` keeps, folders, quarantine and locks.
        """
        total = blocks(self.path) + sum(blocks(entry) for entry in _entries(self.path))
        for top in self.kinds.values():
            total += sum(blocks(sub) for sub in _entries(top))
        for top in (self.quarantine, self.locks):
            total += sum(blocks(entry) for entry in _entries(top))
        return total

    def set_aside(self, path: Path, limit: int | None) -> None:
        """Move a damaged file to quarantine, then trim the quarantine.

        `limit`: bytes that the whole folder may take, or None. The quarantine may take
        1/`QUARANTINE_PART` of them. Nothing is moved if the file is missing. Raises OSError.
        """
        with suppress(FileNotFoundError):
            os.rename(path, self.quarantine / f"{time.time_ns()}-{path.name}")
        self.trim_quarantine(None if limit is None else limit // QUARANTINE_PART)

    def trim_quarantine(self, limit: int | None, *, keep: int = 1) -> None:
        """Remove the oldest quarantined files beyond `limit` bytes or `MOST_QUARANTINED` files.

        `limit`: bytes that the quarantine may take, or None. The newest `keep` files always stay.
        """
        found = self.quarantined()
        total = sum(size for _, size in found)
        while len(found) > keep and (
            len(found) > MOST_QUARANTINED or (limit is not None and total > limit)
        ):
            path, size = found.pop(0)
            remove(path)
            total -= size

    def free_quarantine(self, need: int) -> int:
        """Remove the oldest quarantined files until `need` bytes are freed or none is left.

        Returns the number of bytes freed, which may be less or more than `need`.
        """
        freed = 0
        for path, size in self.quarantined():
            if freed >= need:
                break
            remove(path)
            freed += size
        return freed

    def quarantined(self) -> list[tuple[Path, int]]:
        """Return the quarantined files with their bytes on disk, oldest first."""
        try:
            found = sorted(self.quarantine.iterdir())
        except FileNotFoundError:
            return []
        return [(path, blocks(path)) for path in found]

    def log_bytes(self) -> int:
        """Return the bytes on disk of the index's write-ahead log; 0 if it is missing."""
        return blocks(self.path / f"{NAME}-wal")

    def free(self) -> int:
        """Return the free bytes of the folder's file system that this user can still write."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def block_size(self) -> int:
        """Return the allocation unit of the file system in bytes, at least 4096."""
        return max(4096, os.statvfs(self.path).f_frsize)


def blocks(path: Path | os.DirEntry[str]) -> int:
    """Return the bytes that one file or folder takes on disk; 0 if it is missing."""
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
    """Remove a file if it exists. Raises OSError."""
    with suppress(FileNotFoundError):
        path.unlink()


def sync_folder(path: Path) -> None:
    """Sync a folder, which makes the names of new files in it durable. Raises OSError."""
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
