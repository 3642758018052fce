"""Checks of the machine: processor, system, memory, libraries, limits, and those of Macs only."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from mlxcache.cli.connect import CLONE
from mlxcache.cli.doctor import Finding, judge
from mlxcache.command_buffers import LARGE, buffer_variables
from mlxcache.config import Settings, format_size, left_to_system, machine_bytes, ram_limit
from mlxcache.engine.keep_awake import CAFFEINATE

COMMAND_S = 10.0
"""Timeout of a command in seconds; system_profiler takes seconds on some machines."""

OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""The shell's limit: mlx-lm lowers that of the process when it is imported."""

FEWEST_FILES = 512
"""Minimum limit of open files and connections for a server; a Mac's shells set 256."""

LEAST_MACOS = 14
"""First macOS version for which there are wheels of MLX."""

WIRING_MACOS = 15
"""First macOS version on which MLX can keep the weights wired, that is, never swapped out.
Source: https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.set_wired_limit.html
"""

MOST_WEIGHTS = 0.9
"""Maximum share of the memory for weights; the system and the cache need the rest."""

_SMALLER = "serve a smaller model, or one with fewer bits"
_FAST_BLAS = ("openblas", "mkl_rt", "blis", "armpl", "nvpl")
_NUMPY_BLAS = "scipy_openblas"
"""Part of the name of the library that wheels of NumPy contain; MLX cannot use it."""

TF32, TF32_CHIP, TF32_MACOS = "MLX_ENABLE_TF32", 5, (26, 2)
"""Variable that keeps float32 exact, and the first chip (M5) and macOS on which it is not.
Source: https://github.com/ml-explore/mlx/pull/3894
"""

WATCHDOG = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
"""Variable of the GPU's driver that lets work run for longer while the display is on.
Source: https://github.com/ml-explore/mlx/issues/3267
"""

PANICS = Path("/Library/Logs/DiagnosticReports")
"""Folder of macOS's reports of kernel panics; older ones are in its folder `Retired`."""

PANIC_DAYS = 30
"""Age in days from which a report of a kernel panic is not mentioned."""

Run = Callable[[Sequence[str]], str | None]
"""Function that runs a command and returns its output; None if it fails or this is no Mac."""


@dataclass(frozen=True, slots=True)
class Host:
    """Description of the machine. Fields that may be None are so if it reports no value.

    `macos` is empty on other systems. Memory is in bytes: `working_set` is the maximum that Metal
    recommends, and `wired_mb` what the user has set in its place, in MiB, 0 for the default.
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


def run_command(command: Sequence[str]) -> str | None:
    if sys.platform != "darwin":
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def host(run: Run = run_command) -> Host:
    """Describe this machine. Imports MLX and blocks for seconds."""
    import mlx.core as mx  # noqa: PLC0415 - it takes a while, and --help needs none of it

    from mlxcache.model.device import working_set_bytes  # noqa: PLC0415

    def line_of(*command: str) -> str:
        return (run(command) or "").strip()

    wired = line_of("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb")
    chip = line_of("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
    # platform.mac_ver can report an older version, depending on how Python was built
    macos = line_of("/usr/bin/sw_vers", "-productVersion") or platform.mac_ver()[0]
    total = machine_bytes()
    return Host(
        system=platform.system(),
        processor=platform.machine(),
        chip=chip or str(mx.device_info().get("device_name", "")) or platform.machine(),
        macos=macos,
        cores=os.cpu_count() or 1,
        gpu_cores=_read_gpu_cores(run),
        total=total,
        available=min(total, psutil.virtual_memory().available),
        working_set=working_set_bytes(),
        wired_mb=int(wired) if wired.isdecimal() else None,
        accelerated=mx.default_device() != mx.Device(mx.cpu),
    )


def _read_gpu_cores(run: Run) -> int | None:
    text = run(("/usr/sbin/system_profiler", "SPDisplaysDataType", "-json"))
    try:
        found = json.loads(text or "")["SPDisplaysDataType"]
        return next(int(one["sppci_cores"]) for one in found if "sppci_cores" in one)
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def ram_budget(settings: Settings, host: Host, weights: int) -> int:
    return ram_limit(
        settings.ram,
        machine_bytes=host.total,
        working_set_bytes=host.working_set,
        weights_bytes=weights,
    )


def _version_of(macos: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in macos.split("."))


# -- all machines ------------------------------------------------------------------------------


def examine_system(host: Host) -> Finding:
    system = f"macOS {host.macos}" if host.macos else f"{host.system} {platform.release()}"
    gpu = f", {host.gpu_cores} GPU cores" if host.gpu_cores else ""
    value = f"{host.chip}, {host.cores} cores{gpu}, {system}, Python {platform.python_version()}"
    if not host.macos:
        return Finding("machine", "ok", value)
    native = "use a Python for Apple silicon: this one is translated by Rosetta"
    upgrade = "upgrade to macOS {} or newer"
    for_mlx = upgrade.format(LEAST_MACOS) + " for MLX"
    to_wire = upgrade.format(WIRING_MACOS) + ", which can keep large models wired"
    return judge(
        "machine",
        value,
        (host.processor == "x86_64", "fail", native),
        (_version_of(host.macos) < (LEAST_MACOS,), "fail", for_mlx),
        (_version_of(host.macos) < (WIRING_MACOS,), "warn", to_wire),
    )


def examine_memory(host: Host, ram: int, weights: int, beside: str) -> Finding:
    """Check that the memory for the weights and the budget `ram` is available now.

    `weights` do not count in the budget; `beside`, printed after it, tells whether others do.
    """

    def lower(room: int) -> str:
        return f"lower the budget: --ram {max(100, room * 3 // 4 // 10**6)}MB"

    total, free = host.total, host.available
    close = "close other programs: the weights alone need all available memory"
    close_or_lower = f"close other programs, or {lower(free - weights)}"
    short = ram + weights > free
    return judge(
        "memory",
        f"{format_size(total)}, {format_size(free)} of it available; "
        f"--ram is {format_size(ram)} {beside}",
        (weights > total * MOST_WEIGHTS, "fail", _SMALLER),
        (ram + weights > total, "fail", lower(total - weights)),
        (short and weights > free * MOST_WEIGHTS, "warn", close),
        (short, "warn", close_or_lower),
        figures={
            "total_bytes": total,
            "available_bytes": free,
            "ram_bytes": ram,
            "weights_bytes": weights,
        },
    )


def examine_metal(host: Host, ram: int, weights: int) -> Finding | None:
    if host.working_set is None:
        return None
    limit = host.wired_mb or 0
    own = f"iogpu.wired_limit_mb is {limit}" if limit else "the system's default"
    most = (host.total - left_to_system(host.total)) // 2**20
    wanted = -(-(ram + weights) // 2**20)
    exceeded = ram + weights > host.working_set
    lower = "too little is left for the system: sudo sysctl iogpu.wired_limit_mb=0"
    higher = f"sudo sysctl iogpu.wired_limit_mb={wanted}, until the next restart"
    return judge(
        "Metal",
        f"at most {format_size(host.working_set)} for the GPU ({own})",
        (limit > most, "warn", lower),
        (exceeded and wanted <= most, "warn", higher),
        (exceeded, "warn", _SMALLER),
        figures={"working_set_bytes": host.working_set, "wired_limit_mb": host.wired_mb},
    )


def examine_versions(package: str = "mlxcache") -> Finding:
    wanted = {
        one.name: one.specifier
        for one in map(Requirement, requires(package) or ())
        if one.name in ("mlx", "mlx-lm")
        and (one.marker is None or one.marker.evaluate({"extra": ""}))
    }
    found, wrong = {}, []
    for name, specifier in sorted(wanted.items()):
        try:
            found[name] = version(name)
            fits = specifier.contains(found[name], prereleases=True)
        except PackageNotFoundError:
            found[name], fits = "missing", False
        if not fits:
            wrong.append(f"'{name}{specifier}'")
    value = ", ".join(f"{name} {number}" for name, number in found.items())
    remedy = f"pip install {' '.join(wrong)}"
    return judge("versions", value, (bool(wrong), "fail", remedy), figures=found)


def examine_files(soft: int = OPEN_FILES) -> Finding:
    """Check the limit of open files for a server from the same shell."""
    unlimited = soft in (resource.RLIM_INFINITY, -1)
    remedy = "ulimit -n 4096, in the shell that starts the server"
    return judge(
        "open files",
        "no limit" if unlimited else f"at most {soft}",
        (not unlimited and soft < FEWEST_FILES, "warn", remedy),
        figures={} if unlimited else {"limit": soft},
    )


def examine_blas(
    host: Host, maps: Path = Path("/proc/self/maps"), clone: Path = CLONE
) -> Finding | None:
    """Check that MLX uses a fast BLAS library, where it computes on the CPU of a Linux machine.

    `maps` lists the libraries that this process has loaded, so MLX must be imported first.
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


# -- Macs only ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Power:
    """State of the power supply. A field is None if its value is unknown.

    `charge` is a percentage. `sleep_minutes` is the time without use, 0 if the Mac never sleeps.
    """

    battery: bool | None
    charge: int | None
    low_power: bool | None
    sleep_minutes: int | None


def read_power(run: Run) -> Power:
    supply = run(("/usr/bin/pmset", "-g", "batt")) or ""
    settings = dict(
        re.findall(r"^\s+(\w+)\s+(\d+)", run(("/usr/bin/pmset", "-g")) or "", re.MULTILINE)
    )
    source, charge = re.search(r"drawing from '(.*?)'", supply), re.search(r"(\d+)%", supply)
    # newer versions of macOS have one dial: 0 automatic, 1 low power, 2 high power
    mode = settings.get("powermode", settings.get("lowpowermode"))
    sleep = "0" if settings.get("SleepDisabled") == "1" else settings.get("sleep")
    return Power(
        battery=source[1] == "Battery Power" if source else None,
        charge=int(charge[1]) if charge else None,
        low_power=mode == "1" if mode is not None else None,
        sleep_minutes=int(sleep) if sleep is not None else None,
    )


def examine_mac(
    chip: str,
    macos: str,
    *,
    keep_awake: bool,
    run: Run = run_command,
    environ: Mapping[str, str] = os.environ,
    caffeinate: Path = Path(CAFFEINATE),
    panics: Path = PANICS,
) -> list[Finding]:
    """Check a Mac's power, sleep, precision of float32, GPU, and reports of kernel panics."""
    if not macos:
        return []
    power = read_power(run)
    found = (
        _power(power),
        _sleep(power, keep_awake=keep_awake, missing=not caffeinate.exists()),
        _float32(chip, macos, environ),
        _watchdog(environ),
        _command_buffers(chip, environ),
        _panics(panics),
    )
    return [one for one in found if one is not None]


def _power(power: Power) -> Finding:
    if power.battery is None:
        return Finding("power", "ok", "unknown: pmset reports no power source")
    charge = f", {power.charge}%" if power.charge is not None else ""
    slow = "; low power mode is on, which slows the GPU down" if power.low_power else ""
    return judge(
        "power",
        (f"battery{charge}" if power.battery else "power adapter") + slow,
        (bool(slow), "warn", "sudo pmset -a lowpowermode 0, or System Settings, Battery"),
        (power.battery, "ok", "connect a power adapter before long unattended work"),
        figures={"battery": power.battery, "charge": power.charge, "low_power": power.low_power},
    )


def _sleep(power: Power, *, keep_awake: bool, missing: bool) -> Finding:
    minutes = power.sleep_minutes
    figures = {"keep_awake": keep_awake, "sleep_minutes": minutes}
    if minutes == 0:
        return Finding("sleep", "ok", "this Mac does not sleep when idle", figures=figures)
    if not keep_awake:
        after = f"after {minutes} min" if minutes else "as its settings say"
        value = f"sleeps {after} without a user, also while requests run (--keep-awake off)"
        return Finding("sleep", "warn", value, "serve with --keep-awake on", figures)
    if missing:
        value = f"{CAFFEINATE} is missing: this Mac may sleep while requests run"
        return Finding("sleep", "warn", value, "sudo pmset -c sleep 0", figures)
    value = "kept awake while requests run; a closed lid still puts it to sleep"
    return Finding("sleep", "ok", value, figures=figures)


def _float32(chip: str, macos: str, environ: Mapping[str, str]) -> Finding | None:
    found = re.search(r"\bM(\d+)", chip)
    if found is None or int(found[1]) < TF32_CHIP or _version_of(macos) < TF32_MACOS:
        return None
    if environ.get(TF32) == "0":
        return Finding("float32", "ok", f"exact, as {TF32} is 0")
    value = "TF32: models in float32 multiply with 10 bits of mantissa; others are not affected"
    return Finding("float32", "ok", value, f"{TF32}=0 keeps float32 exact, and is slower")


def _watchdog(environ: Mapping[str, str]) -> Finding:
    if environ.get(WATCHDOG) == "1":
        return Finding("GPU watchdog", "ok", f"relaxed, as {WATCHDOG} is 1")
    value = "macOS may end long GPU work while the display is on"
    remedy = f"{WATCHDOG}=1, if the log says 'Impacting Interactivity'"
    return Finding("GPU watchdog", "ok", value, remedy)


def _command_buffers(chip: str, environ: Mapping[str, str]) -> Finding:
    found = buffer_variables(chip, environ)
    value = ", ".join(f"{name}={size}" for name, size in found.items()) or "MLX's own sizes"
    own = [name for name in LARGE if name in environ]
    value += f"; your own: {', '.join(own)}" if own else ""
    return Finding("command buffers", "ok", value, figures=found)


def _panics(folder: Path) -> Finding:
    name = "kernel panics"
    if not os.access(folder, os.R_OK):
        return Finding(name, "ok", f"unknown: {folder} cannot be read")
    begin = time.time() - PANIC_DAYS * 86400
    paths = [*folder.glob("*.panic"), *folder.glob("Retired/*.panic")]
    found = [one.name for one in paths if one.stat().st_mtime > begin and _names_gpu(one)]
    figures = {"reports": sorted(found)}
    if not found:
        value = f"none of the GPU's driver in {PANIC_DAYS} days"
        return Finding(name, "ok", value, figures=figures)
    value = f"{len(found)} of the GPU's driver (IOGPU) in {PANIC_DAYS} days: {max(found)}"
    remedy = "mlxcache serve --wire off, with a smaller --ram; then update macOS"
    return Finding(name, "warn", value, remedy, figures)


def _names_gpu(report: Path) -> bool:
    """Return whether a panic's text names IOGPU before its list of all loaded extensions."""
    try:
        return b"IOGPU" in report.read_bytes().partition(b"loaded kexts")[0]
    except OSError:  # of another user
        return False
