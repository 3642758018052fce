"""Checks of the cache folder: its permissions, the free space, and the speed of its disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from mlxcache.cli.doctor import Finding, judge
from mlxcache.cli.output import Step
from mlxcache.config import disk_limit, format_size
from mlxcache.disk_calls import sync
from mlxcache.private import make_folder
from mlxcache.store.cache_folder import network_type

TEST_BYTES = 256 << 20
PART_BYTES = 8 << 20

SLOW = 200 * 10**6
"""Bytes per second below which restores are noticeably slow."""

UNKNOWN_READ = " (read speed cannot be measured here)"

LEAST_FREE = 5 * 10**9
"""Free bytes below which a few long conversations fill the disk."""


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def examine_folder(folder: Path) -> Finding:
    """Check that the cache folder can be written, is on a local disk and closed to other users."""
    there = _existing(folder)
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        value = f"{folder} cannot be written"
        remedy = f"make {there} writable (chown), or choose another folder with --cache-dir"
        return Finding("cache folder", "fail", value, remedy)
    if (kind := network_type(folder)) is not None:
        value = f"{folder} is on a network file system ({kind})"
        remedy = "choose a folder on a local disk with --cache-dir; share through --remote"
        return Finding("cache folder", "fail", value, remedy)
    if there != folder.absolute():
        return Finding("cache folder", "ok", f"{folder}, not created yet")
    mode = folder.stat().st_mode & 0o777
    figures = {"path": str(folder), "mode": f"{mode:o}"}
    if mode & 0o077:
        value = f"{folder} is accessible to other users (mode {mode:o})"
        remedy = f"it contains conversations: chmod 700 {folder}"
        return Finding("cache folder", "warn", value, remedy, figures)
    return Finding("cache folder", "ok", str(folder), figures=figures)


def examine_room(folder: Path, setting: str | int) -> Finding:
    free = shutil.disk_usage(_existing(folder)).free
    if setting == "off":
        return Finding("disk", "ok", f"{format_size(free)} free; --disk is off")
    limit = disk_limit(setting, folder / "store")
    remedy = "free some space, or choose a folder on another disk with --cache-dir"
    return judge(
        "disk",
        f"{format_size(free)} free; --disk is {format_size(limit)}",
        (free < LEAST_FREE, "warn", remedy),
        figures={"free_bytes": free, "disk_bytes": limit},
    )


def examine_speed(folder: Path, step: Step, size: int = TEST_BYTES) -> Finding:
    """Measure how fast the disk of the cache folder writes and reads a file. Blocks for seconds.

    The file is removed, and the folder too if it did not exist.
    """
    made = not folder.exists()
    try:
        make_folder(folder)
        with tempfile.TemporaryDirectory(prefix=".speed-", dir=folder) as place:
            path = Path(place) / "data"
            written = size / _write(path, size, step)
            uncached = _drop_page_cache(path)
            read = size / _read(path, size, step)
    except OSError as error:
        remedy = "free some space, or choose a folder on another disk with --cache-dir"
        return Finding("disk speed", "fail", f"{folder}: {error.strerror}", remedy)
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()
    speed = {"write_bytes_s": round(written), "read_bytes_s": round(read) if uncached else None}
    value = f"writes {format_size(round(written))}/s"
    value += f", reads {format_size(round(read))}/s" if uncached else UNKNOWN_READ
    slow = min(one for one in speed.values() if one is not None) < SLOW
    remedy = "choose a folder on a faster disk with --cache-dir: restores wait for the disk"
    return judge("disk speed", value, (slow, "warn", remedy), figures=speed)


def _write(path: Path, size: int, step: Step) -> float:
    """Write and sync `size` bytes, random so that no file system compresses them."""
    part = os.urandom(PART_BYTES)
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _disable_page_cache(fd)
        for done in range(0, size, PART_BYTES):
            os.write(fd, part)
            step(done, 2 * size)
        sync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def _drop_page_cache(path: Path) -> bool:
    if hasattr(fcntl, "F_NOCACHE"):
        return True  # nothing was cached: see `_disable_page_cache`
    if not hasattr(os, "posix_fadvise"):
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return True


def _disable_page_cache(fd: int) -> None:
    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)


def _read(path: Path, size: int, step: Step) -> float:
    buffer, done = memoryview(bytearray(PART_BYTES)), 0
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        _disable_page_cache(file.fileno())
        while count := file.readinto(buffer):
            done += count
            step(size + done, 2 * size)
    return time.perf_counter() - began
