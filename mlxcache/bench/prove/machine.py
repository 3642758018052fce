"""Description of the machine for a report, without anything that identifies its user."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from mlxcache import __version__
from mlxcache.bench.prove.privacy import scrub
from mlxcache.command_buffers import read_chip

UNIQUE = ("uuid", "pci_bus_id", "registry_id", "serial")
"""Fields of MLX's device that no two machines share."""

PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-13", "mlx-lm")


def describe_machine() -> dict[str, Any]:
    """Return a description of the machine, of MLX's device and of the installed versions.

    Keys: `chip`, `cores`, `memory_bytes`, `system`, `power` (`mains`, `battery`, or None without a
    battery), `device`, `device_info`, `python`, `mlxcache` and `versions` (by package). Text that
    identifies the machine or its user is removed.
    """
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    found: dict[str, Any] = {
        "chip": _chip(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": _system(),
        "power": None if battery is None else "mains" if battery.power_plugged else "battery",
        "device": str(mx.default_device()),
        "device_info": device_info(),
        "python": platform.python_version(),
        "mlxcache": _own_version(),
        "versions": _versions(),
    }
    return _scrubbed(found)


def device_info() -> dict[str, Any]:
    """Return MLX's description of its default device, such as its `device_name` and `memory_size`.

    Left out or cut: fields that identify this one device (`UNIQUE`), names of the user and of
    hosts, and paths.
    """
    info: Mapping[str, Any] = mx.device_info()
    return _scrubbed({name: info[name] for name in sorted(info) if name not in UNIQUE})


def _scrubbed(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: scrub(one) if isinstance(one, str) else one for name, one in found.items()}


def _chip() -> str:
    if sys.platform == "darwin":
        return read_chip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} ({platform.machine()})"
    return f"{platform.system()} {platform.release()} ({platform.machine()})"


def _own_version() -> str:
    """Return the version of mlxcache.

    In a clone it includes the commit, with `-dirty` if files differ from it.
    """
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return __version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    command.append("--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git
        return __version__
    commit = done.stdout.strip()
    return f"{__version__}, commit {commit}" if commit else __version__


def load_average() -> str:
    """Return the system's load average over the last 1, 5 and 15 minutes as text."""
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
