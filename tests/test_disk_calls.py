"""Sync and read-ahead, as macOS and as Linux make them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcache import disk_calls
from tests.mac_disk import MacDisk


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "data").open("w+b", buffering=0) as file:
        file.write(bytes(1000))
        yield file.fileno()


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> MacDisk:
    return MacDisk(monkeypatch)


def test_a_sync_on_a_mac_empties_the_drives_cache(mac: MacDisk, fd: int) -> None:
    """fsync there ends at the drive."""
    disk_calls.sync(fd)
    assert mac.calls == [("F_FULLFSYNC", fd)]


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY])
def test_a_file_system_without_full_sync_gets_fsync(mac: MacDisk, fd: int, number: int) -> None:
    mac.refuses = number
    disk_calls.sync(fd)
    assert mac.calls == [("F_FULLFSYNC", fd), ("fsync", fd)]


def test_a_failed_full_sync_is_an_error(mac: MacDisk, fd: int) -> None:
    """An fsync after it could succeed, although bytes were lost."""
    mac.refuses = errno.EIO
    with pytest.raises(OSError, match="refused"):
        disk_calls.sync(fd)
    assert ("fsync", fd) not in mac.calls


def test_a_sync_on_linux_is_an_fsync(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    synced: list[int] = []
    monkeypatch.setattr(disk_calls, "SYSTEM", "linux")
    monkeypatch.setattr(fcntl, "fcntl", _fail)
    monkeypatch.setattr(os, "fsync", synced.append)
    disk_calls.sync(fd)
    assert synced == [fd]


@pytest.mark.parametrize(
    ("start", "length", "asked"),
    [(100, 50, (100, 50)), (100, 0, (100, 900)), (0, 2**40, (0, 2**31 - 1))],
)
def test_a_mac_is_asked_to_read_ahead(
    mac: MacDisk, fd: int, start: int, length: int, asked: tuple[int, int]
) -> None:
    disk_calls.read_ahead(fd, start, length)
    assert mac.calls == [("F_RDADVISE", fd)]
    assert mac.advised == [asked]


def test_nothing_is_asked_for_behind_the_end(mac: MacDisk, fd: int) -> None:
    disk_calls.read_ahead(fd, 1000)
    disk_calls.read_ahead(fd, 2000)
    assert mac.calls == []


def test_refused_read_ahead_is_no_error(mac: MacDisk, fd: int) -> None:
    """It is a hint."""
    mac.refuses = errno.ENOTTY
    disk_calls.read_ahead(fd, 0, 100)
    assert mac.calls == [("F_RDADVISE", fd)]


def test_linux_reads_ahead_by_itself(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    """What it is asked for it reads at half the speed."""
    monkeypatch.setattr(disk_calls, "SYSTEM", "linux")
    monkeypatch.setattr(os, "posix_fadvise", _fail, raising=False)
    disk_calls.read_ahead(fd, 64, 128)


def test_only_one_module_makes_these_calls() -> None:
    """A sync elsewhere would end at a Mac's drive cache."""
    package = Path(disk_calls.__file__).parent
    makers = {
        path.name
        for path in package.rglob("*.py")
        if "os.fsync(" in (text := path.read_text()) or "FADV_WILLNEED" in text
    }
    assert makers == {"disk_calls.py"}


def _fail(*_: object) -> None:
    raise AssertionError("not to be called")
