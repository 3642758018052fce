"""Whether the machine is short of memory, as its operating system sees it."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import psutil

from mlxcache.config.cgroups import OWN, ROOT, groups, memory_share

SOME_STALLED, ALL_STALLED = 10.0, 5.0
"""Percent of the last ten seconds in which some, or all, waited for memory: that is a warning.
Four times as much is critical. Source: https://docs.kernel.org/accounting/psi.html
"""

TIGHT, FULL = 0.93, 0.97
"""Of a group's limit, or of the machine's memory: a warning, critical."""

_MAC = "kern.memorystatus_vm_pressure_level"


class Level(IntEnum):
    """As a Mac has them."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class Strain:
    """How short memory is, and who says so."""

    level: Level
    why: str = ""


CALM = Strain(Level.NORMAL)


def strain() -> Strain:
    """How short this machine, or this process's control group, is of memory now."""
    return mac_strain() if sys.platform == "darwin" else linux_strain()


def mac_strain(ask: Callable[[str], int | None] | None = None) -> Strain:
    """By the kernel's pressure level: 1 is normal, 2 a warning, 4 critical.

    Source: https://developer.apple.com/documentation/dispatch/dispatchsource/memorypressureevent
    """
    number = (ask or _sysctl)(_MAC)
    level = {2: Level.WARNING, 4: Level.CRITICAL}.get(number or 1, Level.NORMAL)
    return Strain(level, f"macOS reports memory pressure {number}") if level else CALM


def linux_strain(
    root: Path = ROOT,
    own: Path = OWN,
    stalls: Path = Path("/proc/pressure/memory"),
    free: Callable[[], float] | None = None,
) -> Strain:
    """By the time that is lost waiting for memory, and by what is left of it.

    `free` is the share of the machine's memory that is available.
    """
    found = [CALM]
    files = [stalls, *(folder / "memory.pressure" for folder in groups(root, own))]
    for path in files:
        some, full = _averages(path)
        share = max(some / SOME_STALLED, full / ALL_STALLED)
        if share >= 1:
            level = Level.CRITICAL if share >= 4 else Level.WARNING
            found.append(Strain(level, f"{path}: {some:g}% stalled"))
    used = (
        ("the control group's limit", memory_share(root, own)),
        ("the machine's memory", 1.0 - (free or _free)()),
    )
    for what, share in used:
        if share >= TIGHT:
            level = Level.CRITICAL if share >= FULL else Level.WARNING
            found.append(Strain(level, f"{share:.0%} of {what} is used"))
    return max(found, key=lambda one: one.level)


def _averages(path: Path) -> tuple[float, float]:
    """`some avg10` and `full avg10` of a PSI file, in percent; 0 where there is none."""
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
    """A whole number of the kernel's on a Mac; None where it has no such thing."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    try:
        library = ctypes.CDLL(ctypes.util.find_library("c"))
        failed = library.sysctlbyname(
            name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else value.value
