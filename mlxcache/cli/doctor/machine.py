"""Checks of the machine: processor, operating system, memory, libraries and limits."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from mlxcache.cli.doctor.finding import Finding
from mlxcache.cli.doctor.mac import (
    Run,
    read_gpu_cores,
    read_kernel,
    read_version,
    run_command,
    version_of,
)
from mlxcache.cli.own_command import CLONE
from mlxcache.config import format_size, left_to_system, machine_bytes

FEWEST_FILES = 512
"""Minimum limit of open files and connections for a server; a Mac's shells set 256."""

LEAST_MACOS = 14
"""First macOS version for which there are wheels of MLX."""

WIRING_MACOS = 15
"""First macOS version on which MLX can keep the weights wired.
Source: https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.set_wired_limit.html
"""

MOST_WEIGHTS = 0.9
"""Maximum share of the memory for weights; the system and the cache need the rest."""

_FAST_BLAS = ("openblas", "mkl_rt", "blis", "armpl", "nvpl")
_NUMPY_BLAS = "scipy_openblas"
"""Part of the name of the library that wheels of NumPy contain; MLX cannot use it."""


@dataclass(frozen=True, slots=True)
class Host:
    """Description of the machine.

    `system` is that of `platform.system`, such as "Darwin". `processor` is the architecture, such
    as "arm64", and `chip` the name, such as "Apple M4". `macos` is the version of macOS, empty on
    other systems. `cores` are those of the CPU. `total` and `available` are memory in bytes.
    `working_set` is the maximum of memory in bytes that Metal recommends. `wired_mb` is the maximum
    in MiB that the user has set in its place (`iogpu.wired_limit_mb`), 0 for the system's default.
    `accelerated` is True if MLX computes on a GPU. Fields that may be None are so if the machine
    reports no value.
    """

    system: str
    processor: str
    chip: str
    macos: str
    cores: int
    gpu_cores: int | None
    total: int
    available: int
    working_set: int | None
    wired_mb: int | None
    accelerated: bool


def host(run: Run = run_command) -> Host:
    """Describe this machine. Imports MLX and blocks for seconds.

    `run` runs the commands of macOS that report hardware.
    """
    import mlx.core as mx  # noqa: PLC0415 - it takes a while, and --help needs none of it

    from mlxcache.model.device import working_set_bytes  # noqa: PLC0415

    wired = read_kernel(run, "iogpu.wired_limit_mb")
    memory = psutil.virtual_memory()
    total = machine_bytes()
    return Host(
        system=platform.system(),
        processor=platform.machine(),
        chip=read_kernel(run, "machdep.cpu.brand_string") or _device_name(mx.device_info()),
        macos=read_version(run) or platform.mac_ver()[0],
        cores=os.cpu_count() or 1,
        gpu_cores=read_gpu_cores(run),
        total=total,
        available=min(total, memory.available),
        working_set=working_set_bytes(),
        wired_mb=int(wired) if wired and wired.isdecimal() else None,
        accelerated=mx.default_device() != mx.Device(mx.cpu),
    )


def _device_name(info: Mapping[str, str | int]) -> str:
    return str(info.get("device_name", "")) or platform.machine()


def examine_system(host: Host) -> Finding:
    """Check that MLX runs natively on this system and processor.

    On a Mac, also check that macOS is not too old for MLX (`fail`), or to keep the weights wired,
    that is, never swapped out (`warn`).
    """
    mac = f"macOS {host.macos}" if host.macos else f"{host.system} {platform.release()}"
    gpu = f", {host.gpu_cores} GPU cores" if host.gpu_cores else ""
    value = f"{host.chip}, {host.cores} cores{gpu}, {mac}, Python {platform.python_version()}"
    if host.macos and host.processor == "x86_64":
        remedy = "use a Python for Apple silicon: this one is translated by Rosetta"
        return Finding("machine", "fail", value, remedy)
    if host.macos and version_of(host.macos) < (LEAST_MACOS,):
        return Finding("machine", "fail", value, f"upgrade to macOS {LEAST_MACOS} or newer for MLX")
    if host.macos and version_of(host.macos) < (WIRING_MACOS,):
        remedy = f"upgrade to macOS {WIRING_MACOS} or newer, which can keep large models wired"
        return Finding("machine", "warn", value, remedy)
    return Finding("machine", "ok", value)


def examine_memory(host: Host, ram: int, weights: int, beside: str) -> Finding:
    """Check that the memory for the weights and the budget is available now.

    The status is `fail` if the machine has too little memory at all. `ram` is the budget and
    `weights` the weights that do not count in it, in bytes. `beside` is printed after the budget
    and tells whether it includes weights, such as "in addition to the model's 8 GB of weights".
    """
    value = (
        f"{format_size(host.total)}, {format_size(host.available)} of it available; "
        f"--ram is {format_size(ram)} {beside}"
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
        remedy = f"lower the budget: --ram {_lower_ram(host.total - weights)}"
        return Finding("memory", "fail", value, remedy, figures)
    if ram + weights > host.available:
        if weights > host.available * MOST_WEIGHTS:
            remedy = "close other programs: the weights alone need all available memory"
            return Finding("memory", "warn", value, remedy, figures)
        lower = _lower_ram(host.available - weights)
        remedy = f"close other programs, or lower the budget: --ram {lower}"
        return Finding("memory", "warn", value, remedy, figures)
    return Finding("memory", "ok", value, figures=figures)


def _lower_ram(room: int) -> str:
    """Return 3/4 of `room` bytes, at least 100 MB, as a value for `--ram` such as "750MB"."""
    return f"{max(100, room * 3 // 4 // 10**6)}MB"


def examine_metal(host: Host, ram: int, weights: int) -> Finding | None:
    """Check that the weights and the budget together are within Metal's limit of memory.

    `ram` is the budget and `weights` the weights that do not count in it, in bytes. Also warns of a
    limit that the user has set too high. Returns None on a machine without Metal.
    """
    if host.working_set is None:
        return None
    own = f"iogpu.wired_limit_mb is {host.wired_mb}" if host.wired_mb else "the system's default"
    value = f"at most {format_size(host.working_set)} for the GPU ({own})"
    figures = {"working_set_bytes": host.working_set, "wired_limit_mb": host.wired_mb}
    most = (host.total - left_to_system(host.total)) // 2**20
    if host.wired_mb and host.wired_mb > most:
        remedy = "too little is left for the system: sudo sysctl iogpu.wired_limit_mb=0"
        return Finding("Metal", "warn", value, remedy, figures)
    needed = ram + weights
    if needed > host.working_set:
        wanted = -(-needed // 2**20)
        remedy = "serve a smaller model, or one with fewer bits"
        if wanted <= most:
            remedy = f"sudo sysctl iogpu.wired_limit_mb={wanted}, until the next restart"
        return Finding("Metal", "warn", value, remedy, figures)
    return Finding("Metal", "ok", value, figures=figures)


def examine_versions(package: str = "mlxcache") -> Finding:
    """Check that the installed mlx and mlx-lm have versions which `package` accepts.

    `package` is an installed package; its requirements tell the ranges of versions.
    """
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
    """Check the limit of open files and connections for a server started from this shell.

    Warns if it is below `FEWEST_FILES` (512). `limit`: the limit to check, None for this process's.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    unlimited = soft in (resource.RLIM_INFINITY, -1)
    value = "no limit" if unlimited else f"at most {soft}"
    if not unlimited and soft < FEWEST_FILES:
        remedy = "ulimit -n 4096, in the shell that starts the server"
        return Finding("open files", "warn", value, remedy, {"limit": soft})
    return Finding("open files", "ok", value, figures={} if unlimited else {"limit": soft})


def examine_blas(
    host: Host, maps: Path = Path("/proc/self/maps"), clone: Path = CLONE
) -> Finding | None:
    """Check that MLX uses a fast BLAS library, on Linux if MLX computes on the CPU.

    `maps` is the file in which Linux lists the libraries that this process has loaded, so MLX must
    be imported first. The remedy names the script bin/serve of the git clone in `clone`, if it
    exists. Returns None on other machines, where BLAS does not matter, or if `maps` is unreadable.
    """
    if host.system != "Linux" or host.accelerated:
        return None
    try:
        loaded = {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if line}
    except OSError:
        return None
    fast = sorted(
        one for one in loaded if _NUMPY_BLAS not in one and any(name in one for name in _FAST_BLAS)
    )
    if fast:
        return Finding("BLAS", "ok", fast[0])
    value = "the reference library: prompts are computed many times slower than with OpenBLAS"
    start = "LD_PRELOAD=libopenblas.so.0 mlxcache serve"
    if (clone / "bin" / "serve").is_file():
        start = "bin/serve, which preloads it"
    remedy = f"apt install libopenblas0-pthread, then start with {start}"
    return Finding("BLAS", "warn", value, remedy)
