"""The machine: processor, system, memory, libraries and limits."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from mlxcache.cli.doctor.finding import Finding
from mlxcache.config import format_size, machine_bytes

FEWEST_FILES = 512
"""Open files and connections that a server should be allowed; a Mac's shells allow 256."""

WIRING_MACOS = 15
"""The first macOS on which MLX can keep the weights wired.
Source: https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.set_wired_limit.html
"""

MOST_WIRED = 0.95
"""Of the memory; with more of it wired the system has been seen to panic.
Source: https://github.com/ml-explore/mlx-lm/issues/883
"""

MOST_WEIGHTS = 0.9
"""Of the memory; the rest is for the system and what is cached."""

_SYSCTL = "/usr/sbin/sysctl"
_FAST_BLAS = ("openblas", "mkl_rt", "blis", "armpl", "nvpl")


@dataclass(frozen=True, slots=True)
class Host:
    """What the machine is. Sizes in bytes; None where it has no such thing.

    `working_set` is what Metal recommends at most, `wired_mb` the user's own limit instead of it,
    0 for the system's.
    """

    system: str
    processor: str
    chip: str
    macos: str
    cores: int
    total: int
    available: int
    working_set: int | None
    wired_mb: int | None
    accelerated: bool


def sysctl(name: str) -> str | None:
    """A value of the kernel's on a Mac; None elsewhere."""
    if sys.platform != "darwin":
        return None
    try:
        done = subprocess.run(
            [_SYSCTL, "-n", name], capture_output=True, text=True, timeout=2, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def host(ask: Callable[[str], str | None] = sysctl) -> Host:
    """This machine. Imports MLX."""
    import mlx.core as mx  # noqa: PLC0415 - it takes a while, and --help needs none of it

    from mlxcache.model.device import working_set_bytes  # noqa: PLC0415

    wired = ask("iogpu.wired_limit_mb")
    memory = psutil.virtual_memory()
    total = machine_bytes()
    return Host(
        system=platform.system(),
        processor=platform.machine(),
        chip=ask("machdep.cpu.brand_string") or _device_name(mx.device_info()),
        macos=platform.mac_ver()[0],
        cores=os.cpu_count() or 1,
        total=total,
        available=min(total, memory.available),
        working_set=working_set_bytes(),
        wired_mb=int(wired) if wired and wired.isdecimal() else None,
        accelerated=mx.default_device() != mx.Device(mx.cpu),
    )


def _device_name(info: Mapping[str, str | int]) -> str:
    return str(info.get("device_name", "")) or platform.machine()


def examine_system(host: Host) -> Finding:
    """The system and its processor, and whether MLX is at its best there."""
    mac = f"macOS {host.macos}" if host.macos else f"{host.system} {platform.release()}"
    value = f"{host.chip}, {host.cores} cores, {mac}, Python {platform.python_version()}"
    if host.macos and host.processor == "x86_64":
        remedy = "run it with a Python for Apple silicon: this one is translated (Rosetta)"
        return Finding("machine", "fail", value, remedy)
    if host.macos and int(host.macos.split(".")[0]) < WIRING_MACOS:
        remedy = f"macOS {WIRING_MACOS} or newer keeps large models in memory (wired)"
        return Finding("machine", "warn", value, remedy)
    return Finding("machine", "ok", value)


def examine_memory(host: Host, ram: int, weights: int, whose: str) -> Finding:
    """Whether there is room now for `weights` and the budget `ram` beside them, in bytes."""
    value = (
        f"{format_size(host.total)}, {format_size(host.available)} of it available; "
        f"--ram takes {format_size(ram)} beside {whose} weights"
    )
    figures = {
        "total_bytes": host.total,
        "available_bytes": host.available,
        "ram_bytes": ram,
        "weights_bytes": weights,
    }
    if weights > host.total * MOST_WEIGHTS:
        remedy = "serve a smaller model, or one with fewer bits"
        return Finding("memory", "fail", value, remedy, figures)
    if ram + weights > host.total:
        remedy = f"give less: --ram {_less(host.total - weights)}"
        return Finding("memory", "fail", value, remedy, figures)
    if ram + weights > host.available:
        if weights > host.available * MOST_WEIGHTS:
            remedy = "close other programs: the weights alone take all that is available"
            return Finding("memory", "warn", value, remedy, figures)
        remedy = f"close other programs, or give less: --ram {_less(host.available - weights)}"
        return Finding("memory", "warn", value, remedy, figures)
    return Finding("memory", "ok", value, figures=figures)


def _less(room: int) -> str:
    """Three quarters of `room` as --ram takes it."""
    return f"{max(100, room * 3 // 4 // 10**6)}MB"


def examine_metal(host: Host, ram: int, weights: int) -> Finding | None:
    """Whether weights and budget are within what Metal keeps on the device; None without Metal."""
    if host.working_set is None:
        return None
    own = f"iogpu.wired_limit_mb is {host.wired_mb}" if host.wired_mb else "the system's own limit"
    value = f"{format_size(host.working_set)} for the GPU at most ({own})"
    figures = {"working_set_bytes": host.working_set, "wired_limit_mb": host.wired_mb}
    if host.wired_mb and host.wired_mb * 2**20 > MOST_WIRED * host.total:
        remedy = "that leaves the system too little: sudo sysctl iogpu.wired_limit_mb=0"
        return Finding("Metal", "warn", value, remedy, figures)
    needed = ram + weights
    if needed > host.working_set:
        wanted, most = -(-needed // 2**20), int(MOST_WIRED * 0.9 * host.total) // 2**20
        remedy = "serve a smaller model, or one with fewer bits"
        if wanted <= most:
            remedy = f"sudo sysctl iogpu.wired_limit_mb={wanted}, until the next restart"
        return Finding("Metal", "warn", value, remedy, figures)
    return Finding("Metal", "ok", value, figures=figures)


def examine_versions(package: str = "mlxcache") -> Finding:
    """Whether the installed mlx and mlx-lm are of the range that this package asks for."""
    wanted = {
        one.name: one
        for one in map(Requirement, requires(package) or ())
        if one.name in ("mlx", "mlx-lm")
        and (one.marker is None or one.marker.evaluate({"extra": ""}))
    }
    found, wrong = {}, []
    for name, requirement in sorted(wanted.items()):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
            wrong.append(f"'{name}{requirement.specifier}'")
            continue
        if not requirement.specifier.contains(found[name], prereleases=True):
            wrong.append(f"'{name}{requirement.specifier}'")
    value = ", ".join(f"{name} {number}" for name, number in found.items())
    if wrong:
        remedy = f"pip install {' '.join(wrong)}"
        return Finding("versions", "fail", value, remedy, found)
    return Finding("versions", "ok", value, figures=found)


def examine_files(limit: int | None = None) -> Finding:
    """How many files and connections a server started from here may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    unlimited = soft in (resource.RLIM_INFINITY, -1)
    value = "as many as it likes" if unlimited else f"{soft} at most"
    if not unlimited and soft < FEWEST_FILES:
        remedy = "ulimit -n 4096, in the shell that starts the server"
        return Finding("open files", "warn", value, remedy, {"limit": soft})
    return Finding("open files", "ok", value, figures={} if unlimited else {"limit": soft})


def examine_blas(host: Host, maps: Path = Path("/proc/self/maps")) -> Finding | None:
    """On Linux without an accelerator: whether MLX multiplies with a fast library.

    Once MLX is imported, for what counts is what is loaded. None where that does not matter.
    """
    if host.system != "Linux" or host.accelerated:
        return None
    try:
        loaded = {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if line}
    except OSError:
        return None
    fast = sorted(one for one in loaded if any(name in one for name in _FAST_BLAS))
    if fast:
        return Finding("BLAS", "ok", fast[0])
    value = "the reference library: prompts are computed many times slower than they need be"
    remedy = "apt install libopenblas0-pthread, and start with bin/serve, which preloads it"
    return Finding("BLAS", "warn", value, remedy)
