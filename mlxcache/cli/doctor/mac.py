"""Checks for Macs only: power, sleep, precision of float32, the GPU's watchdog, kernel panics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxcache.cli.doctor.finding import Finding
from mlxcache.command_buffers import LARGE, buffer_variables
from mlxcache.engine.keep_awake import CAFFEINATE

COMMAND_S = 10.0
"""Timeout of a command in seconds; system_profiler takes seconds on some machines."""

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


def run_command(command: Sequence[str]) -> str | None:
    """Run a command of macOS and return its standard output. Blocks up to `COMMAND_S` seconds.

    Returns None if the command fails or takes longer, or if this machine is not a Mac.
    """
    if sys.platform != "darwin":
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def read_kernel(run: Run, name: str) -> str | None:
    """Read the sysctl value `name` of the kernel, such as `machdep.cpu.brand_string`.

    `run`: runs the command `sysctl`; see `Run`. Returns None if there is no such value or this
    machine is not a Mac.
    """
    return (run(("/usr/sbin/sysctl", "-n", name)) or "").strip() or None


def read_version(run: Run) -> str | None:
    """Read the version of macOS, such as `26.1`; None on other systems.

    `run` runs the command `sw_vers`, because `platform.mac_ver` can report an older version,
    depending on how Python was built.
    """
    return (run(("/usr/bin/sw_vers", "-productVersion")) or "").strip() or None


def read_gpu_cores(run: Run) -> int | None:
    """Read the number of GPU cores with the command system_profiler; None if it reports none."""
    text = run(("/usr/sbin/system_profiler", "SPDisplaysDataType", "-json"))
    try:
        found = json.loads(text or "")["SPDisplaysDataType"]
        return next(int(one["sppci_cores"]) for one in found if "sppci_cores" in one)
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


@dataclass(frozen=True, slots=True)
class Power:
    """State of the power supply. A field is None if its value is unknown.

    `battery` tells whether the Mac runs on battery, and `charge` is the battery's percentage.
    `low_power` tells whether Low Power Mode is on. `sleep_minutes` is the time without use after
    which the Mac sleeps, 0 if it never does.
    """

    battery: bool | None
    charge: int | None
    low_power: bool | None
    sleep_minutes: int | None


def read_power(run: Run) -> Power:
    """Read the power source and the settings of sleep and power now in effect, by `pmset`.

    All fields are None if this machine is not a Mac.
    """
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
    """Check a Mac's power, sleep, precision of float32, GPU, and reports of kernel panics.

    `chip` is the Mac's processor, such as "Apple M4", and `macos` the version of macOS; if it is
    empty, the machine is not a Mac, and the result is empty. `keep_awake` is the server's setting
    of that name, for which the program at `caffeinate` is needed. `run` runs commands of macOS.
    `environ` may hold variables of MLX and Metal that affect precision, command buffers and the
    watchdog. `panics`: the folder of reports.
    """
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
    value = f"battery{charge}" if power.battery else "power adapter"
    figures = {"battery": power.battery, "charge": power.charge, "low_power": power.low_power}
    if power.low_power:
        remedy = "sudo pmset -a lowpowermode 0, or System Settings, Battery"
        value += "; low power mode is on, which slows the GPU down"
        return Finding("power", "warn", value, remedy, figures)
    if power.battery:
        remedy = "connect a power adapter before long unattended work"
        return Finding("power", "ok", value, remedy, figures)
    return Finding("power", "ok", value, figures=figures)


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
    """Report whether MLX multiplies float32 as TF32 (10 bits of mantissa) on this Mac.

    The variable MLX_ENABLE_TF32 in `environ` can prevent that. Returns None for chips and versions
    of macOS on which MLX never uses TF32.
    """
    found = re.search(r"\bM(\d+)", chip)
    if found is None or int(found[1]) < TF32_CHIP or version_of(macos) < TF32_MACOS:
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
    """Report the limits of MLX's command buffers, and those that the user has set."""
    found = buffer_variables(chip, environ)
    value = ", ".join(f"{name}={size}" for name, size in found.items())
    own = [name for name in LARGE if name in environ]
    value = value or "MLX's own sizes"
    value += f"; your own: {', '.join(own)}" if own else ""
    return Finding("command buffers", "ok", value, figures=found)


def _panics(folder: Path) -> Finding:
    """Look for reports of kernel panics of the last `PANIC_DAYS` days in the GPU's driver."""
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


def version_of(macos: str) -> tuple[int, ...]:
    """Parse a version of macOS: `26.1` becomes (26, 1). A part that is not a number becomes 0."""
    return tuple(int(part) if part.isdecimal() else 0 for part in macos.split("."))
