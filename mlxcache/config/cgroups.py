"""The control groups that this process is in, which may allow it less than the machine has. Linux.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """The least bytes that any of the groups allows; None where there is no limit."""
    limits = (number(folder / name) for folder in groups(root, own) for name in _LIMITS)
    return min((limit for limit in limits if limit is not None), default=None)


def memory_share(root: Path = ROOT, own: Path = OWN) -> float:
    """How much of its limit the fullest group uses, from 0 to 1, without what can be given up.

    That is the page cache of files nobody has used lately. 0 where there is no limit.
    """
    return max(map(_share, groups(root, own)), default=0.0)


def _share(folder: Path) -> float:
    limits = [limit for name in _LIMITS if (limit := number(folder / name)) is not None]
    used = number(folder / "memory.current") or number(folder / "memory.usage_in_bytes")
    if not limits or not used:
        return 0.0
    idle = _field(folder / "memory.stat", "total_inactive_file", "inactive_file")
    return max(0, used - idle) / max(1, min(limits))


def groups(root: Path = ROOT, own: Path = OWN) -> Iterator[Path]:
    """The folders of this process's groups that account for memory, and of those above them.

    In a container its own group is at the root, whatever its path says.
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


def number(path: Path) -> int | None:
    """The number in a file; None where there is none, such as "max"."""
    try:
        found = int(path.read_text())
    except (OSError, ValueError):
        return None
    return found if 0 < found < 1 << 60 else None  # v1 writes "no limit" as a huge number


def _field(path: Path, *names: str) -> int:
    """The first of these fields of a file of names and numbers; 0 where there is none."""
    try:
        lines = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return next((int(lines[name]) for name in names if name in lines), 0)
    except (OSError, ValueError):
        return 0
