"""What `mlxcache doctor` finds on a Mac, from what macOS's commands print."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from mlxcache.cli.doctor import Finding, machine
from mlxcache.cli.doctor.command import run_checks
from mlxcache.cli.doctor.machine import Power, examine_mac, read_power
from mlxcache.config import Settings
from tests.cli.macs import BATTERY, DESKTOP, DISPLAYS, LAPTOP, NEWEST, SETTINGS, VIRTUAL, Recorded


def examined(
    mac: Recorded, environ: dict[str, str] | None = None, **more: Any
) -> dict[str, Finding]:
    """The findings by name; caffeinate is there unless `more` says otherwise."""
    host = machine.host(mac)
    options: dict[str, Any] = {"keep_awake": True, "caffeinate": Path(__file__)} | more
    found = examine_mac(host.chip, host.macos, run=mac, environ=environ or {}, **options)
    return {one.name: one for one in found}


@pytest.mark.parametrize(
    ("mac", "chip", "macos", "gpu_cores", "wired_mb"),
    [
        (LAPTOP, "Apple M3 Pro", "15.1", 14, 0),
        (DESKTOP, "Apple M1 Ultra", "14.6.1", 64, 57344),
        (NEWEST, "Apple M5 Max", "26.6.1", 40, 0),
        (VIRTUAL, "Apple M1 (Virtual)", "15.7", None, None),
    ],
)
def test_a_mac_is_named_with_chip_system_and_gpu(
    mac: Recorded, chip: str, macos: str, gpu_cores: int | None, wired_mb: int | None
) -> None:
    host = machine.host(mac)
    assert (host.chip, host.macos, host.gpu_cores, host.wired_mb) == (
        chip, macos, gpu_cores, wired_mb,
    )  # fmt: skip
    value = machine.examine_system(host).value
    assert value.startswith(f"{chip}, ")
    assert f"macOS {macos}," in value
    assert (f"{gpu_cores} GPU cores" in value) == (gpu_cores is not None)


@pytest.mark.parametrize(
    ("mac", "power"),
    [
        (LAPTOP, Power(True, 19, True, 1)),
        (DESKTOP, Power(False, None, None, 0)),
        (NEWEST, Power(False, 80, False, 1)),
        (Recorded({}), Power(None, None, None, None)),
        (Recorded({SETTINGS: " SleepDisabled\t\t1\n powermode            1\n sleep    1\n"}),
         Power(None, None, True, 0)),
    ],
)  # fmt: skip
def test_the_power_supply_is_read(mac: Recorded, power: Power) -> None:
    """Low power mode has two names, and one of them a third value, for high power."""
    assert read_power(mac) == power


def test_low_power_mode_is_a_warning_and_a_battery_a_hint() -> None:
    found = examined(LAPTOP)["power"]
    assert (found.status, "battery, 19%" in found.value) == ("warn", True)
    assert "lowpowermode 0" in str(found.remedy)
    assert examined(NEWEST)["power"].value == "power adapter"
    full = Recorded({**NEWEST.outputs, BATTERY: LAPTOP.outputs[BATTERY]})
    assert examined(full)["power"].status == "ok"
    assert examined(full)["power"].remedy


@pytest.mark.parametrize(
    ("mac", "more", "status", "word"),
    [
        (LAPTOP, {}, "ok", "kept awake"),
        (LAPTOP, {"keep_awake": False}, "warn", "after 1 min"),
        (LAPTOP, {"caffeinate": Path("/no/caffeinate")}, "warn", "missing"),
        (DESKTOP, {"keep_awake": False}, "ok", "does not sleep"),
        (Recorded({**LAPTOP.outputs, SETTINGS: ""}), {"keep_awake": False}, "warn", "settings"),
    ],
)
def test_a_mac_that_sleeps_while_requests_run_is_a_warning(
    mac: Recorded, more: dict[str, Any], status: str, word: str
) -> None:
    found = examined(mac, **more)["sleep"]
    assert (found.status, word in found.value) == (status, True)


def test_fewer_bits_of_float32_are_named_on_the_chips_that_have_them() -> None:
    """From M5 and macOS 26.2 on, unless the variable is 0."""
    assert "TF32" in examined(NEWEST)["float32"].value
    assert "MLX_ENABLE_TF32=0" in str(examined(NEWEST)["float32"].remedy)
    assert examined(NEWEST, {"MLX_ENABLE_TF32": "0"})["float32"].remedy is None
    for mac in (LAPTOP, DESKTOP, VIRTUAL):
        assert "float32" not in examined(mac)
    older = examine_mac("Apple M5", "26.1", keep_awake=True, run=NEWEST, environ={})
    assert "float32" not in [one.name for one in older]


def test_the_watchdogs_variable_is_named_or_noticed() -> None:
    """It is not set by itself: it makes the display wait."""
    name = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
    assert f"{name}=1" in str(examined(LAPTOP)["GPU watchdog"].remedy)
    assert examined(LAPTOP, {name: "1"})["GPU watchdog"].remedy is None


PANIC = r"""{"bug_type":"210","os_version":"macOS 26.4 (25E246)"}
{"panicString":"panic(cpu 9 caller 0xfffffe004b8cd288): %s\nKernel Extensions in backtrace:\n   %s\n
last started kext at 9: com.apple.driver.AppleHIDKeyboard\nloaded kexts:\n
com.apple.iokit.IOGPUFamily\t130.15\ncom.apple.iokit.IOHIDFamily\t2.0"}"""
GPU = PANIC % (
    '"completeMemory() prepare count underflow" @IOGPUMemory.cpp:550',
    "IOGPUFamily(130)",
)
OTHER = PANIC % (
    "watchdog timeout: no checkins from watchdogd",
    "com.apple.driver.AppleARMWatchdog",
)


def test_recent_panics_of_the_gpu_are_a_warning(tmp_path: Path) -> None:
    """Also those that macOS has put aside; not old ones, nor those of other drivers."""
    folder = tmp_path / "reports"
    assert "cannot be read" in examined(LAPTOP, panics=folder)["kernel panics"].value
    (folder / "Retired").mkdir(parents=True)
    days = {"panic-full-1.panic": 2, "panic-full-2.panic": 31, "Retired/panic-full-3.panic": 29}
    (folder / "panic-full-4.panic").write_text(OTHER)
    (folder / "note.txt").write_text(GPU)
    assert examined(LAPTOP, panics=folder)["kernel panics"].status == "ok"
    for name, age in days.items():
        (folder / name).write_text(GPU)
        os.utime(folder / name, (time.time() - age * 86400,) * 2)
    found = examined(LAPTOP, panics=folder)["kernel panics"]
    assert found.status == "warn"
    assert found.figures["reports"] == ["panic-full-1.panic", "panic-full-3.panic"]
    assert "--wire off" in str(found.remedy)


def test_the_sizes_of_command_buffers_are_named() -> None:
    found = examined(LAPTOP)["command buffers"]
    assert found.value == "MLX_MAX_OPS_PER_BUFFER=1000, MLX_MAX_MB_PER_BUFFER=400"
    assert examined(NEWEST)["command buffers"].value == "MLX's own sizes"
    own = examined(LAPTOP, {"MLX_MAX_OPS_PER_BUFFER": "7"})["command buffers"]
    assert own.value.startswith("MLX_MAX_OPS_PER_BUFFER=7, MLX_MAX_MB_PER_BUFFER=400; your own")


def test_elsewhere_there_are_no_such_findings() -> None:
    assert examine_mac("AMD EPYC", "", keep_awake=True, run=Recorded({}), environ={}) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"SPDisplaysDataType": [{"sppci_cores": "x"}]}'])
def test_an_output_that_cannot_be_read_is_no_error(text: str) -> None:
    assert machine.host(Recorded({**LAPTOP.outputs, DISPLAYS: text})).gpu_cores is None


def test_the_command_checks_a_mac_with_its_own_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac = machine.host(LAPTOP)
    monkeypatch.setattr(machine, "host", lambda: mac)
    settings = Settings(cache_dir=tmp_path, keep_awake=False, port=0)
    report = run_checks(settings, quick=True, shown=False)
    found = {one.name: one for one in report.findings}
    assert found["machine"].value.startswith("Apple M3 Pro")
    assert found["sleep"].figures["keep_awake"] is False
    assert {"power", "GPU watchdog"} <= set(found)
