"""What the operating system says of memory, read from files and calls as it gives them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from mlxcache.config.cgroups import memory_limit, memory_share
from mlxcache.config.footprint import footprint, physical_footprint
from mlxcache.config.strain import CALM, Level, linux_strain, mac_strain

GB = 10**9


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own"
    path.write_text(text)
    return path


def test_the_least_limit_of_all_groups_holds(tmp_path: Path) -> None:
    """Version 2: a service in a slice; `max` is no limit, and `memory.high` is one."""
    root = tmp_path / "fs"
    put(root)
    put(root / "user.slice", memory__max=str(8 * GB), memory__high="max")
    put(root / "user.slice" / "app", memory__max="max", memory__high=str(6 * GB))
    asked = own(tmp_path, "0::/user.slice/app\n")
    assert memory_limit(root, asked) == 6 * GB
    (root / "user.slice" / "app" / "memory.high").write_text("max\n")
    assert memory_limit(root, asked) == 8 * GB


def test_the_first_version_has_its_own_names(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    put(root / "memory", memory__limit_in_bytes=str((1 << 63) - 4096))
    put(root / "memory" / "docker" / "x", memory__limit_in_bytes=str(2 * GB))
    assert memory_limit(root, own(tmp_path, "5:memory:/docker/x\n4:cpu:/docker/x\n")) == 2 * GB


@pytest.mark.parametrize("text", ["", "0::/\n", "0::/gone\n", "0::/../../etc\n"])
def test_no_group_is_no_limit(tmp_path: Path, text: str) -> None:
    put(tmp_path / "fs")
    assert memory_limit(tmp_path / "fs", own(tmp_path, text)) is None
    assert memory_limit(tmp_path / "fs", tmp_path / "none") is None


def test_page_cache_that_can_go_does_not_count_as_used(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    put(
        root, memory__max=str(10 * GB), memory__current=str(9 * GB),
        memory__stat=f"anon 1\ninactive_file {4 * GB}",
    )  # fmt: skip
    assert memory_share(root, own(tmp_path, "0::/\n")) == 0.5


def stalls(some: float, full: float) -> str:
    rest = "avg60=0.00 avg300=0.00 total=9"
    return f"some avg10={some:.2f} {rest}\nfull avg10={full:.2f} {rest}"


@pytest.mark.parametrize(
    ("some", "full", "free", "level"),
    [
        (0, 0, 0.5, Level.NORMAL),
        (9.9, 4.9, 0.5, Level.NORMAL),
        (10, 0, 0.5, Level.WARNING),
        (0, 5, 0.5, Level.WARNING),
        (41, 0, 0.5, Level.CRITICAL),
        (0, 0, 0.06, Level.WARNING),
        (0, 0, 0.01, Level.CRITICAL),
    ],
)
def test_linux_by_stalls_and_by_what_is_left(
    tmp_path: Path, some: float, full: float, free: float, level: Level
) -> None:
    put(tmp_path, stalls=stalls(some, full))
    found = linux_strain(tmp_path / "fs", tmp_path / "no", tmp_path / "stalls", lambda: free)
    assert found.level is level
    assert bool(found.why) is bool(level)


def test_a_group_that_is_nearly_full_is_strain(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    put(root / "a", memory__max=str(10 * GB), memory__current=str(9.5 * GB).split(".")[0])
    found = linux_strain(root, own(tmp_path, "0::/a\n"), tmp_path / "none", lambda: 0.9)
    assert found.level is Level.WARNING
    assert "control group" in found.why


def test_files_that_make_no_sense_are_no_strain(tmp_path: Path) -> None:
    put(tmp_path, stalls="what is this\n\n")
    assert linux_strain(tmp_path, tmp_path, tmp_path / "stalls", lambda: 0.9) == CALM


@pytest.mark.parametrize(
    ("number", "level"), [(1, 0), (2, 1), (4, 2), (None, 0), (0, 0), (77, 0)], ids=str
)
def test_a_mac_says_it_by_a_number(number: int | None, level: int) -> None:
    asked = []

    def ask(name: str) -> int | None:
        asked.append(name)
        return number

    assert mac_strain(ask).level == level
    assert asked == ["kern.memorystatus_vm_pressure_level"]


def test_a_macs_physical_footprint_is_read_where_it_stands() -> None:
    """The layout of `struct rusage_info_v0`, spelt out in ctypes."""

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

    assert physical_footprint(12, ask) == 7 * GB
    assert physical_footprint(12, lambda *_: -1) is None


def test_this_process_has_a_footprint_and_one_that_is_gone_has_none() -> None:
    assert footprint() > 10**6
    assert footprint(os.getpid()) > 10**6
    assert footprint(2**22 + 5) == 0
