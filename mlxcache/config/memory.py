"""Memory as the operating system reports it: limits, pressure, footprint, unused heap.

Functions that take paths or `ask`
are implementations for one operating system; these arguments let tests replace the system's files
and calls.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import psutil

# -- control groups ------------------------------------------------------------------------------
#
# A limit of a control group may be below the machine's memory. Other systems than Linux have none.
# Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html and
# https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return the lowest memory limit of this process's control groups, in bytes."""
    limits = (_number(folder / name) for folder in memory_groups(root, own) for name in _LIMITS)
    return min((limit for limit in limits if limit is not None), default=None)


def memory_use(root: Path = ROOT, own: Path = OWN) -> float:
    """Return the memory use of the fullest control group, as a part of its limit; 0 without one.

    The inactive page cache does not count as used, because the kernel can reclaim it.
    """
    return max(map(_use, memory_groups(root, own)), default=0.0)


def _use(folder: Path) -> float:
    limits = [limit for name in _LIMITS if (limit := _number(folder / name)) is not None]
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    if not limits or not used:
        return 0.0
    idle = _field(folder / "memory.stat", "total_inactive_file", "inactive_file")
    return max(0, used - idle) / max(1, min(limits))


def memory_groups(root: Path = ROOT, own: Path = OWN) -> Iterator[Path]:
    """Yield the folders of this process's memory control groups and of the groups above them.

    Inside a container, the process's own group is mounted at `root`, whatever its path is. `own`:
    the file that lists the process's groups.
    """
    yield from (root, root / "memory")
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        folder = root / controllers / path.lstrip("/")
        while folder not in (root, root / "memory") and ".." not in folder.parts:
            yield folder
            folder = folder.parent


def _number(path: Path) -> int | None:
    """Read the whole number in a file; None if it has none, or stands for no limit."""
    try:
        found = int(path.read_text())
    except (OSError, ValueError):
        return None
    return found if 0 < found < 1 << 60 else None  # v1 writes "no limit" as a huge number


def _field(path: Path, *names: str) -> int:
    """Return the number of the first of `names` in a file whose lines are `NAME NUMBER`, or 0."""
    try:
        lines = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return next((int(lines[name]) for name in names if name in lines), 0)
    except (OSError, ValueError):
        return 0


# -- pressure ----------------------------------------------------------------------------------

SOME_STALLED, ALL_STALLED = 10.0, 5.0
"""Percent of the last 10 s in which some, or all, tasks waited for memory that count as a warning.

Four times as much is critical. Source: https://docs.kernel.org/accounting/psi.html
"""

WARNING_USE, CRITICAL_USE = 0.93, 0.97
"""Used part of a control group's limit, or of the machine's memory, that counts as this level."""

_MAC_LEVEL = "kern.memorystatus_vm_pressure_level"


class PressureLevel(IntEnum):
    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """A level of memory pressure, and the observation that led to it, empty for `NORMAL`."""

    level: PressureLevel
    why: str = ""


NO_PRESSURE = MemoryPressure(PressureLevel.NORMAL)


def read_pressure() -> MemoryPressure:
    return read_mac_pressure() if sys.platform == "darwin" else read_linux_pressure()


def read_mac_pressure(ask: Callable[[str], int | None] | None = None) -> MemoryPressure:
    """Read the memory pressure level of the macOS kernel: 1 normal, 2 a warning, 4 critical.

    Source: https://developer.apple.com/documentation/dispatch/dispatchsource/memorypressureevent
    """
    number = (ask or _sysctl)(_MAC_LEVEL)
    levels = {2: PressureLevel.WARNING, 4: PressureLevel.CRITICAL}
    level = levels.get(number or 1, PressureLevel.NORMAL)
    if level is PressureLevel.NORMAL:
        return NO_PRESSURE
    return MemoryPressure(level, f"macOS reports memory pressure {number}")


def read_linux_pressure(
    root: Path = ROOT,
    own: Path = OWN,
    stalls: Path = Path("/proc/pressure/memory"),
    free: Callable[[], float] | None = None,
) -> MemoryPressure:
    """Derive the memory pressure on Linux from memory stalls and from memory in use.

    Returns the highest level found. `stalls`: the file of PSI (pressure stall information) for the
    machine; each control group has one too. `free` returns the available part of the machine's
    memory.
    """
    found = [NO_PRESSURE]
    files = [stalls, *(folder / "memory.pressure" for folder in memory_groups(root, own))]
    for path in files:
        some, full = _averages(path)
        share = max(some / SOME_STALLED, full / ALL_STALLED)
        if share >= 1:
            level = PressureLevel.CRITICAL if share >= 4 else PressureLevel.WARNING
            found.append(MemoryPressure(level, f"{path}: {some:g}% stalled"))
    used = (
        ("the control group's limit", memory_use(root, own)),
        ("the machine's memory", 1.0 - (free or _free)()),
    )
    for what, share in used:
        if share >= WARNING_USE:
            level = PressureLevel.CRITICAL if share >= CRITICAL_USE else PressureLevel.WARNING
            found.append(MemoryPressure(level, f"{share:.0%} of {what} is used"))
    return max(found, key=lambda one: one.level)


def _averages(path: Path) -> tuple[float, float]:
    """Read `some avg10` and `full avg10` of a PSI file, in percent; zeros if it cannot be read."""
    found = {"some": 0.0, "full": 0.0}
    try:
        for line in path.read_text().splitlines():
            kind, first, *_ = line.split()
            found[kind] = float(first.removeprefix("avg10="))
    except (OSError, ValueError):
        return 0.0, 0.0
    return found["some"], found["full"]


def _free() -> float:
    memory = psutil.virtual_memory()
    return float(memory.available / memory.total)


def _sysctl(name: str) -> int | None:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    try:
        library = ctypes.CDLL(ctypes.util.find_library("c"))
        failed = library.sysctlbyname(
            name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else value.value


# -- the footprint of a process ----------------------------------------------------------------

_PHYS_FOOTPRINT = 72
"""Offset of `ri_phys_footprint` in `struct rusage_info_v0`, after a UUID and seven counts.

Source: https://github.com/apple-oss-distributions/xnu/blob/main/bsd/sys/resource.h
"""

_INFO_BYTES = 96


def read_footprint(pid: int | None = None) -> int:
    """Return the bytes of memory that a process, by default this one, occupies; 0 if it has ended.

    On macOS this is the physical footprint, which Activity Monitor shows and which includes Metal's
    buffers; elsewhere it is the resident set.
    """
    pid = os.getpid() if pid is None else pid
    if sys.platform == "darwin":
        found = read_physical_footprint(pid)
        if found is not None:
            return found
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def read_physical_footprint(
    pid: int, ask: Callable[[int, int, ctypes.Array[ctypes.c_char]], int] | None = None
) -> int | None:
    """Return `ri_phys_footprint` of a macOS process, in bytes, or None if it is not available.

    `ask` is called as `proc_pid_rusage`, with a pid, the flavour 0, and a buffer to fill, and
    returns 0 if it succeeded. By default it is that function of the system.
    """
    ask = ask or _proc_pid_rusage()
    buffer = ctypes.create_string_buffer(_INFO_BYTES)
    if ask is None or ask(pid, 0, buffer) != 0:
        return None
    found = int.from_bytes(buffer.raw[_PHYS_FOOTPRINT : _PHYS_FOOTPRINT + 8], sys.byteorder)
    return found or None


def _proc_pid_rusage() -> Callable[[int, int, ctypes.Array[ctypes.c_char]], int] | None:
    try:
        return ctypes.CDLL(ctypes.util.find_library("proc") or "libproc.dylib").proc_pid_rusage
    except (OSError, AttributeError):
        return None


# -- unused heap -------------------------------------------------------------------------------


def trim_heap() -> bool:
    """Return unused heap pages to the operating system; False if the C library has no call for it.

    Threads that allocate in parallel leave holes in the heap, which amount to tens of megabytes in
    a server that runs for hours. Blocks for about 2 ms.
    """
    call = heap_trimmer()
    if call is None:
        return False
    call()
    return True


@cache
def heap_trimmer() -> Callable[[], object] | None:
    """Return `malloc_trim` of glibc or `malloc_zone_pressure_relief` of macOS, if there is one.

    Sources: https://man7.org/linux/man-pages/man3/malloc_trim.3.html,
    https://github.com/apple-oss-distributions/libmalloc/blob/main/include/malloc/malloc.h
    """
    try:
        library = ctypes.CDLL(ctypes.util.find_library("c") if sys.platform == "darwin" else None)
        if sys.platform == "darwin":
            relieve = library.malloc_zone_pressure_relief
            relieve.restype = ctypes.c_size_t
            return lambda: relieve(None, ctypes.c_size_t(0))
        trim = library.malloc_trim
    except (OSError, AttributeError):
        return None
    return lambda: trim(ctypes.c_size_t(0))
