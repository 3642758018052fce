"""A file system of a few megabytes, for tests of a full and of a read-only disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """Mount a file system at `place` inside the block; skips the test if that is not possible."""
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "mlxcache-test", str(place)]
    try:
        done = subprocess.run(["mount", *options], check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("nothing can be mounted here")
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def mount(place: Path, option: str) -> None:
    """Change an option of a mounted file system, such as `remount,ro`."""
    subprocess.run(["mount", "-o", option, str(place)], check=True)


def fill(place: Path) -> Path:
    """Write a file that takes every free byte of the disk; return its path."""
    ballast = place / "ballast"
    with ballast.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    assert not os.statvfs(place).f_bavail
    return ballast
