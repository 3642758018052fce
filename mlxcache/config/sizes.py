"""Sizes as users write them, and the limits in bytes that `--ram` and `--disk` set."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Literal

import psutil

from mlxcache.config.memory import memory_limit
from mlxcache.errors import ConfigError

MIN_RAM = 64_000_000
"""Minimum of `auto` for RAM in bytes, enough for short conversations."""

LEAST_LEFT, MOST_LEFT = 4 * 10**9, 16 * 10**9

WIRED_SHARE = 2 / 3
"""Share of the memory above which `--wire auto` wires weights and budget."""

MOST_DISK = 200 * 10**9

LEAST_RAM = "8MB"
"""Memory in which the built-in demo model runs on every machine, to be named in errors."""

LEAST_DISK = 4_000_000
"""Minimum of an explicit disk limit in bytes; an index alone takes about as much."""

LEAST_BARE = 1_000_000
"""Bytes below which a number without a unit is refused, because the unit was probably forgotten."""

Size = int | float | Literal["auto"]

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]{0,3}|%)")


def read_size(text: str | int) -> Size:
    """Parse a size: bytes (int), a part of the machine's memory or disk (float), or "auto".

    Decimal units are powers of 1000 (`KB`, `MB`, also without the B), binary ones powers of 1024
    (`KiB`). Case does not matter. Raises ConfigError for anything else, for 0, for more than 100%,
    and for a text with a number below `LEAST_BARE` and no unit; the message then names the unit
    that was probably meant.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return _positive(text, text)
    if not isinstance(text, str):
        raise _unreadable(text)
    cleaned = text.strip()
    if cleaned.lower() == "auto":
        return "auto"
    matched = _SIZE.fullmatch(cleaned)
    if matched is None:
        raise _unreadable(text)
    number, unit = float(matched[1]), matched[2].upper()
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"must be a percentage above 0% and at most 100%, not {text!r}")
        return number / 100
    if unit not in _UNITS:
        raise _unreadable(text)
    size = _positive(int(number * _UNITS[unit]), text)
    if not unit and size < LEAST_BARE:
        raise ConfigError(f"{text!r} is a size of {size} bytes: did you mean {cleaned}GB?")
    return size


def parse_size(text: str | int, *, total: int) -> int | None:
    """Convert a size to bytes, with `total` bytes as 100%; return None for "auto"."""
    size = read_size(text)
    if size == "auto":
        return None
    return int(size * total) if isinstance(size, float) else size


def require_memory(setting: str | int, machine_bytes: int) -> None:
    """Raise ConfigError if `setting`, that of --ram, is more than the machine has."""
    if (parse_size(setting, total=machine_bytes) or 0) > machine_bytes:
        raise ConfigError(
            f"--ram {setting} is more than the {format_size(machine_bytes)} of memory here: "
            "set less, or --ram auto"
        )


def ram_limit(
    setting: str | int, *, machine_bytes: int, working_set_bytes: int | None, weights_bytes: int
) -> int:
    """Return the budget in bytes for all memory that MLX holds besides the weights.

    `auto` takes a part of the memory that the weights leave: on Metal three quarters of its working
    set, elsewhere half of the machine's, so that other programs have memory too; at least 64 MB.
    `working_set_bytes` is None without Metal.
    """
    explicit = parse_size(setting, total=machine_bytes)
    if explicit is not None:
        return explicit
    rest = memory_for(machine_bytes, working_set_bytes) - weights_bytes
    return max(rest // 2 if working_set_bytes is None else rest * 3 // 4, MIN_RAM)


def memory_for(machine_bytes: int, working_set_bytes: int | None) -> int:
    """Return the bytes available to a model and its cache: at most Metal's working set.

    Above the working set the system begins to page. A user can raise it, but what is left to the
    system stays free.
    """
    if working_set_bytes is None:
        return machine_bytes
    return min(working_set_bytes, machine_bytes - left_to_system(machine_bytes))


def left_to_system(machine_bytes: int) -> int:
    """Return the bytes of a Mac's memory that are left to macOS and other programs.

    An eighth, from 4 to 16 GB: 8 GB of 64 GB. Where less was left, kernel panics were reported.
    Source: https://github.com/ml-explore/mlx-lm/issues/883
    """
    return max(LEAST_LEFT, min(machine_bytes // 8, MOST_LEFT))


def wired_size(setting: str | int, *, machine_bytes: int, needed_bytes: int) -> int:
    """Return how many bytes `--wire` is to keep wired, that is, never paged out.

    `auto` wires `needed_bytes`, those of weights and budget, if they are more than two thirds of
    `machine_bytes`: models that nearly fill the memory have decoded 40 times slower unwired. Below,
    nothing is wired: with concurrent requests and much eviction, wired memory has led to kernel
    panics within minutes, and unwired memory to none. Source:
    https://github.com/ml-explore/mlx/issues/3186,
    https://github.com/osaurus-ai/vmlx-swift/issues/418
    """
    if setting == "off":
        return 0
    explicit = parse_size(setting, total=machine_bytes)
    if explicit is not None:
        return explicit
    return needed_bytes if needed_bytes > WIRED_SHARE * machine_bytes else 0


def explain_auto(whole: int, weights: int, *, metal: bool) -> str:
    """Describe in words how `ram_limit` computes the budget of `auto`.

    `weights` is 0 if the budget includes the weights of several models.
    """
    share = "three quarters" if metal else "half"
    whose = "that Metal may use here" if metal else "of this machine"
    here = f"the {format_size(whole)} {whose}"
    if not weights:
        return f"{share} of {here}, for the weights and the KV of all models"
    return f"{share} of what the weights ({format_size(weights)}) leave of {here}"


def disk_limit(setting: str | int, folder: Path) -> int:
    """Return the limit in bytes of the disk tier in `folder`, or 0 for "off".

    A percentage is of the whole disk. `auto` is a quarter of the free space, in which the files
    already in `folder` count as free, and at most 200 GB. Raises ConfigError below `LEAST_DISK`
    bytes.
    """
    if setting == "off":
        return 0
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    disk = shutil.disk_usage(existing)
    explicit = parse_size(setting, total=disk.total)
    if explicit is not None and explicit < LEAST_DISK:
        raise ConfigError(
            f"--disk {setting} is too small: set at least {LEAST_DISK // 10**6}MB, or off"
        )
    if explicit is not None:
        return explicit
    return min((disk.free + _taken(folder)) // 4, MOST_DISK)


def machine_bytes() -> int:
    """Return the bytes of this machine's memory, or its control groups' limit if that is lower."""
    total = int(psutil.virtual_memory().total)
    return min(total, memory_limit() or total)


def format_size(size: int) -> str:
    """Format a number of bytes in decimal units: 8589934592 becomes "8.6 GB"."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= scale:
            number = f"{size / scale:.1f}".removesuffix(".0")
            return f"{number} {unit}"
    return f"{size} bytes"


def _taken(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:  # evicted by another server meanwhile
                continue
    return total


def _positive(size: int, text: object) -> int:
    if size <= 0:
        raise ConfigError(f"a size must be above 0, not {text!r}")
    return size


def _unreadable(text: object) -> ConfigError:
    return ConfigError(f"{text!r} is not a size: write 512MB, 8GB, 16GiB, 25% or auto")
