"""Memory pressure, footprints and heap, from files and calls as operating systems provide them."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcache.config.memory import (
    NO_PRESSURE,
    PressureLevel,
    heap_trimmer,
    memory_limit,
    memory_use,
    read_footprint,
    read_linux_pressure,
    read_mac_pressure,
    read_physical_footprint,
    read_pressure,
    trim_heap,
)

GB = 10**9


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own"
    path.write_text(text)
    return path


def test_the_lowest_limit_of_all_groups_applies(tmp_path: Path) -> None:
    """cgroups v2, a service in a slice: `memory.high` is a limit and `max` is none."""
    root = tmp_path / "fs"
    put(root)
    put(root / "user.slice", memory__max=str(8 * GB), memory__high="max")
    put(root / "user.slice" / "app", memory__max="max", memory__high=str(6 * GB))
    asked = own(tmp_path, "0::/user.slice/app\n")
    assert memory_limit(root, asked) == 6 * GB
    (root / "user.slice" / "app" / "memory.high").write_text("max\n")
    assert memory_limit(root, asked) == 8 * GB


def test_limits_of_cgroups_v1_are_read(tmp_path: Path) -> None:
    """Its files have other names, and a huge number stands for no limit."""
    root = tmp_path / "fs"
    put(root / "memory", memory__limit_in_bytes=str((1 << 63) - 4096))
    put(root / "memory" / "docker" / "x", memory__limit_in_bytes=str(2 * GB))
    assert memory_limit(root, own(tmp_path, "5:memory:/docker/x\n4:cpu:/docker/x\n")) == 2 * GB


@pytest.mark.parametrize("text", ["", "0::/\n", "0::/gone\n", "0::/../../etc\n"])
def test_without_a_group_there_is_no_limit(tmp_path: Path, text: str) -> None:
    put(tmp_path / "fs")
    assert memory_limit(tmp_path / "fs", own(tmp_path, text)) is None
    assert memory_limit(tmp_path / "fs", tmp_path / "none") is None


def test_inactive_page_cache_does_not_count_as_used(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    put(
        root, memory__max=str(10 * GB), memory__current=str(9 * GB),
        memory__stat=f"anon 1\ninactive_file {4 * GB}",
    )  # fmt: skip
    assert memory_use(root, own(tmp_path, "0::/\n")) == 0.5


def stalls(some: float, full: float) -> str:
    rest = "avg60=0.00 avg300=0.00 total=9"
    return f"some avg10={some:.2f} {rest}\nfull avg10={full:.2f} {rest}"


@pytest.mark.parametrize(
    ("some", "full", "free", "level"),
    [
        (0, 0, 0.5, PressureLevel.NORMAL),
        (9.9, 4.9, 0.5, PressureLevel.NORMAL),
        (10, 0, 0.5, PressureLevel.WARNING),
        (0, 5, 0.5, PressureLevel.WARNING),
        (41, 0, 0.5, PressureLevel.CRITICAL),
        (0, 0, 0.06, PressureLevel.WARNING),
        (0, 0, 0.01, PressureLevel.CRITICAL),
    ],
)
def test_linux_pressure_comes_from_stalls_and_from_free_memory(
    tmp_path: Path, some: float, full: float, free: float, level: PressureLevel
) -> None:
    put(tmp_path, stalls=stalls(some, full))
    found = read_linux_pressure(tmp_path / "fs", tmp_path / "no", tmp_path / "stalls", lambda: free)
    assert found.level is level
    assert bool(found.why) is bool(level)


def test_a_control_group_near_its_limit_is_pressure(tmp_path: Path) -> None:
    """Also when the machine itself has free memory."""
    root = tmp_path / "fs"
    put(root / "a", memory__max=str(10 * GB), memory__current=str(9.5 * GB).split(".")[0])
    found = read_linux_pressure(root, own(tmp_path, "0::/a\n"), tmp_path / "none", lambda: 0.9)
    assert found.level is PressureLevel.WARNING
    assert "control group" in found.why


def test_unreadable_pressure_files_are_no_pressure(tmp_path: Path) -> None:
    put(tmp_path, stalls="what is this\n\n")
    assert read_linux_pressure(tmp_path, tmp_path, tmp_path / "stalls", lambda: 0.9) == NO_PRESSURE


@pytest.mark.parametrize(
    ("number", "level"), [(1, 0), (2, 1), (4, 2), (None, 0), (0, 0), (77, 0)], ids=str
)
def test_macos_pressure_comes_from_one_kernel_number(number: int | None, level: int) -> None:
    asked = []

    def ask(name: str) -> int | None:
        asked.append(name)
        return number

    assert read_mac_pressure(ask).level == level
    assert asked == ["kern.memorystatus_vm_pressure_level"]


def test_the_physical_footprint_is_read_at_its_offset() -> None:
    class Info(ctypes.Structure):
        _fields_ = (
            ("ri_uuid", ctypes.c_uint8 * 16),
            *((name, ctypes.c_uint64) for name in (
                "ri_user_time", "ri_system_time", "ri_pkg_idle_wkups", "ri_interrupt_wkups",
                "ri_pageins", "ri_wired_size", "ri_resident_size", "ri_phys_footprint",
                "ri_proc_start_abstime", "ri_proc_exit_abstime",
            )),
        )  # fmt: skip

    info = Info(ri_resident_size=1, ri_phys_footprint=7 * GB, ri_proc_start_abstime=2)
    assert ctypes.sizeof(info) == 96

    def ask(pid: int, flavour: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
        assert (pid, flavour) == (12, 0)
        ctypes.memmove(buffer, ctypes.byref(info), ctypes.sizeof(info))
        return 0

    assert read_physical_footprint(12, ask) == 7 * GB
    assert read_physical_footprint(12, lambda *_: -1) is None


def test_this_process_has_a_footprint_and_an_ended_one_has_none() -> None:
    assert read_footprint() > 10**6
    assert read_footprint(os.getpid()) > 10**6
    assert read_footprint(2**22 + 5) == 0


HOLES = """
import ctypes
from mlxcache.config.memory import read_footprint, trim_heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
held = [libc.malloc(8192) for _ in range(8192)]
for one in held:
    ctypes.memset(one, 1, 8192)
for one in held[:-1]:
    libc.free(one)
before = read_footprint()
assert trim_heap()
print(before - read_footprint())
"""


@pytest.mark.skipif(
    sys.platform != "linux" or heap_trimmer() is None, reason="the amount is only known for glibc"
)
def test_free_pages_below_one_in_use_are_returned() -> None:
    """Of 64 MB, which the library keeps because the last page is still in use."""
    command = [sys.executable, "-c", HOLES]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) > 48 << 20


class MacLibrary:
    """What `libc` and `libproc` of macOS have of what is asked of them."""

    def __init__(self, level: int = 1, footprint: int = 0):
        self.level, self.footprint = level, footprint
        self.relieved: list[tuple[Any, int]] = []

        def relieve(zone: Any, goal: ctypes.c_size_t) -> int:
            self.relieved.append((zone, goal.value))
            return 8192

        self.malloc_zone_pressure_relief = relieve

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: Any, length: Any) -> int:
        if name != b"kern.memorystatus_vm_pressure_level":
            return -1
        value._obj.value = self.level
        assert size._obj.value == 4
        assert new is None
        assert length.value == 0
        return 0

    def proc_pid_rusage(self, pid: int, flavour: int, buffer: Any) -> int:
        if not self.footprint:
            return -1
        buffer[72:80] = self.footprint.to_bytes(8, sys.byteorder)
        return 0


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[MacLibrary]:
    """A Mac, as far as its libraries are asked."""
    library = MacLibrary()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes.util, "find_library", "/usr/lib/lib{}.dylib".format)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **_: library)
    heap_trimmer.cache_clear()
    yield library
    heap_trimmer.cache_clear()


def test_on_a_mac_pressure_is_the_kernel_s(mac: MacLibrary) -> None:
    assert read_pressure() == NO_PRESSURE
    mac.level = 4
    assert read_pressure().level is PressureLevel.CRITICAL
    assert "macOS reports memory pressure 4" in read_pressure().why


def test_on_a_mac_a_footprint_is_the_physical_one(mac: MacLibrary) -> None:
    """With Metal's buffers; without it, the resident set."""
    mac.footprint = 9 * GB
    assert read_footprint() == 9 * GB
    mac.footprint = 0
    assert 10**6 < read_footprint() < 9 * GB


def test_on_a_mac_unused_heap_is_given_back(mac: MacLibrary) -> None:
    assert trim_heap()
    assert mac.relieved == [(None, 0)]


def test_a_library_that_cannot_trim_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str | None) -> object:
        return object()

    heap_trimmer.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", none)
    try:
        assert not trim_heap()
    finally:
        heap_trimmer.cache_clear()
