"""Sizes as people write them, and what `--ram` and `--disk` come to here. All results are bytes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Literal

import psutil

from mlxcache.config.cgroups import memory_limit
from mlxcache.errors import ConfigError

MIN_RAM = 64_000_000
"""`auto` never gives less, so that the smallest machine still serves short conversations."""

MOST_DISK = 200 * 10**9
"""`auto` never gives the disk tier more."""

LEAST_DISK = 4_000_000
"""Less has no room for an index, let alone for what it lists."""

Size = int | float | Literal["auto"]
"""Bytes, a share of the memory or the disk (0 < share <= 1), or the server's own choice."""

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]{0,3}|%)")


def read_size(text: str | int) -> Size:
    """What `text` means before the machine is known: bytes (int), a share (float) or "auto".

    Decimal units are powers of 1000 (`KB`, `MB`, `GB`, `TB`, also without the B), binary ones
    powers of 1024 (`KiB`, `MiB`, `GiB`, `TiB`); case does not matter, and a bare number is bytes.
    Raises ConfigError for anything else, for 0, and for more than 100%.
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
            raise ConfigError(f"a percentage must be above 0% and at most 100%, not {text!r}")
        return number / 100
    if unit not in _UNITS:
        raise _unreadable(text)
    return _positive(int(number * _UNITS[unit]), text)


def parse_size(text: str | int, *, total: int) -> int | None:
    """Bytes that `text` stands for on a machine of `total` bytes; None for "auto".

    `512MB` is 512,000,000, `8GiB` is 8 * 2**30, `25%` is a quarter of `total`, an int is bytes.
    Raises ConfigError where `text` is no size.
    """
    size = read_size(text)
    if size == "auto":
        return None
    return int(size * total) if isinstance(size, float) else size


def ram_limit(
    setting: str | int, *, machine_bytes: int, working_set_bytes: int | None, weights_bytes: int
) -> int:
    """The budget in bytes for all that MLX holds besides the weights.

    An explicit size is taken as it is, and a percentage is of `machine_bytes`. `auto` starts from
    what remains after the weights: on Metal three quarters of the rest of `working_set_bytes`
    (the device's recommended working set), elsewhere half of the rest of the machine, so that
    an editor, a browser and the system keep their share; never less than 64 MB.
    Raises ConfigError where `setting` is no size.
    """
    explicit = parse_size(setting, total=machine_bytes)
    if explicit is not None:
        return explicit
    rest = memory_for(machine_bytes, working_set_bytes) - weights_bytes
    return max(rest // 2 if working_set_bytes is None else rest * 3 // 4, MIN_RAM)


def memory_for(machine_bytes: int, working_set_bytes: int | None) -> int:
    """The bytes that a model and its cache can have here: of Metal's working set, if there is one.

    Beyond it the system moves memory to and fro.
    """
    return min(machine_bytes, working_set_bytes or machine_bytes)


def explain_auto(whole: int, weights: int, *, metal: bool) -> str:
    """How `auto` comes to the budget, in words; `whole` is what `memory_for` gives."""
    share = "three quarters" if metal else "half"
    whose = "Metal's recommended" if metal else "this machine's"
    here = f"{whose} {format_size(whole)}"
    return f"{share} of what the weights ({format_size(weights)}) leave of {here}"


def disk_limit(setting: str | int, folder: Path) -> int:
    """The cap in bytes on what the disk tier keeps in `folder`, which need not exist; 0 for "off".

    A percentage is of the whole disk that `folder` is on. `auto` is a quarter of what is free
    there, what `folder` takes counted as free; at most 200 GB.
    Raises ConfigError where `setting` is no size, or one that is of no use.
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
            f"--disk {setting} is too little: give it at least {LEAST_DISK // 10**6}MB, or off"
        )
    if explicit is not None:
        return explicit
    return min((disk.free + _taken(folder)) // 4, MOST_DISK)


def machine_bytes() -> int:
    """This machine's memory, or the container's limit (cgroup) where that is less."""
    total = int(psutil.virtual_memory().total)
    return min(total, memory_limit() or total)


def format_size(size: int) -> str:
    """`size` for a person, in the decimal units that `parse_size` reads: 8589934592 is "8.6 GB"."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= scale:
            number = f"{size / scale:.1f}".removesuffix(".0")
            return f"{number} {unit}"
    return f"{size} bytes"


def _taken(folder: Path) -> int:
    """What the file system counts for all files below `folder`."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:  # another server evicted it just now
                continue
    return total


def _positive(size: int, text: object) -> int:
    if size <= 0:
        raise ConfigError(f"a size must be above 0, not {text!r}")
    return size


def _unreadable(text: object) -> ConfigError:
    return ConfigError(f"{text!r} is no size; write 512MB, 8GB, 16GiB, 25% or auto")
