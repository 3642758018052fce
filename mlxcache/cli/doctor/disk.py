"""The cache folder: who may read it, how much room there is, how fast its disk is."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mlxcache.cli.doctor.finding import Finding
from mlxcache.config import disk_limit, format_size
from mlxcache.private import make_folder

TEST_BYTES = 256 << 20
PART_BYTES = 8 << 20

SLOW = 200 * 10**6
"""Bytes per second below which a restore keeps a person waiting."""

LEAST_FREE = 5 * 10**9
"""Bytes below which a few long conversations fill the disk."""

Step = Callable[[int, int], None]
"""Called with the bytes done and those to do in all."""


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def examine_folder(folder: Path) -> Finding:
    """Whether the cache folder can be used, and is the user's alone."""
    there = _existing(folder)
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        value = f"{folder} cannot be written"
        remedy = f"chown it to yourself, or choose another with --cache-dir ({there} is in the way)"
        return Finding("cache folder", "fail", value, remedy)
    if there != folder.absolute():
        return Finding("cache folder", "ok", f"{folder}, not there yet")
    mode = folder.stat().st_mode & 0o777
    figures = {"path": str(folder), "mode": f"{mode:o}"}
    if mode & 0o077:
        value = f"{folder} is open to others (mode {mode:o})"
        remedy = f"conversations are in it: chmod 700 {folder}"
        return Finding("cache folder", "warn", value, remedy, figures)
    return Finding("cache folder", "ok", str(folder), figures=figures)


def examine_room(folder: Path, setting: str | int) -> Finding:
    """How much of the disk is free, and how much of it `--disk` takes."""
    free = shutil.disk_usage(_existing(folder)).free
    if setting == "off":
        return Finding("disk", "ok", f"{format_size(free)} free; --disk is off")
    limit = disk_limit(setting, folder / "store")
    value = f"{format_size(free)} free; --disk takes {format_size(limit)}"
    figures = {"free_bytes": free, "disk_bytes": limit}
    if free < LEAST_FREE:
        remedy = "make room, or choose a folder on another disk with --cache-dir"
        return Finding("disk", "warn", value, remedy, figures)
    return Finding("disk", "ok", value, figures=figures)


def examine_speed(folder: Path, step: Step, size: int = TEST_BYTES) -> Finding:
    """How fast `size` bytes are written to the folder's disk, made durable and read back.

    What it makes there is removed again, the folder too where it was not there.
    """
    made = not folder.exists()
    try:
        make_folder(folder)
        with tempfile.TemporaryDirectory(prefix=".speed-", dir=folder) as place:
            path = Path(place) / "data"
            written = size / _write(path, size, step)
            fresh = _forget(path)
            read = size / _read(path, size, step)
    except OSError as error:
        remedy = "make room, or choose a folder on another disk with --cache-dir"
        return Finding("disk speed", "fail", f"{folder}: {error.strerror}", remedy)
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()
    return _judged(written, read if fresh else None)


def _judged(written: float, read: float | None) -> Finding:
    value = f"written at {_rate(written)}"
    value += f", read at {_rate(read)}" if read else " (reading cannot be measured here)"
    figures = {"write_bytes_s": round(written), "read_bytes_s": round(read) if read else None}
    if min(written, read or written) < SLOW:
        remedy = "choose a folder on a faster disk with --cache-dir: restores wait for it"
        return Finding("disk speed", "warn", value, remedy, figures)
    return Finding("disk speed", "ok", value, figures=figures)


def _rate(bytes_s: float) -> str:
    return f"{format_size(round(bytes_s))}/s"


def _write(path: Path, size: int, step: Step) -> float:
    """Seconds to write noise of `size` bytes, which no file system can shrink."""
    part = os.urandom(PART_BYTES)
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _go_by_cache(fd)
        for done in range(0, size, PART_BYTES):
            os.write(fd, part)
            step(done, 2 * size)
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def _forget(path: Path) -> bool:
    """Have the system forget what it remembers of a file; whether that can be done here."""
    if hasattr(fcntl, "F_NOCACHE"):
        return True  # it remembers nothing: see `_go_by_cache`
    if not hasattr(os, "posix_fadvise"):
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return True


def _go_by_cache(fd: int) -> None:
    """On a Mac, have what is written and read through `fd` leave nothing in memory."""
    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)


def _read(path: Path, size: int, step: Step) -> float:
    buffer, done = memoryview(bytearray(PART_BYTES)), 0
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        _go_by_cache(file.fileno())
        while count := file.readinto(buffer):
            done += count
            step(size + done, 2 * size)
    return time.perf_counter() - began
