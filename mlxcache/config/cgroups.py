"""Memory limits and memory use of the Linux control groups (cgroups) of this process.

A limit of a control group may be below the machine's memory. Other systems have no control groups.
Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
