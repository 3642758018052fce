"""The files that run mlxcache as a service say what the systems understand."""

from __future__ import annotations

import configparser
import os
import plistlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "service"
UNIT, PLIST = FOLDER / "mlxcache.service", FOLDER / "mlxcache.plist"


def test_every_file_is_documented() -> None:
    """And none is named that is not there."""
    named = re.findall(r"examples/service/([\w.]+)", (ROOT / "docs" / "service.md").read_text())
    assert set(named) == {path.name for path in FOLDER.iterdir()}


def installed(tmp_path: Path) -> bytes:
    """The plist as the documented line makes it."""
    code = re.search(
        r"mkdir -p ~/Library.*\n(sed -e .*? \\\n.*?\.plist\n)",
        (ROOT / "docs" / "service.md").read_text(),
    )
    assert code is not None
    (tmp_path / "mlxcache").write_text("#!/bin/sh\n")
    (tmp_path / "mlxcache").chmod(0o755)
    environ = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/bin:/usr/bin"}
    subprocess.run(["sh", "-ec", code[0]], cwd=ROOT, env=environ, check=True)
    return (tmp_path / "Library" / "LaunchAgents" / "mlxcache.plist").read_bytes()


def test_the_plist_starts_the_server_again_where_it_failed(tmp_path: Path) -> None:
    """As the documented line installs it, with whole paths, which launchd needs."""
    found = plistlib.loads(installed(tmp_path))
    assert found["Label"] == PLIST.stem
    assert found["ProgramArguments"] == [str(tmp_path / "mlxcache"), "serve"]
    assert found["RunAtLoad"] is True
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["ExitTimeOut"] > 10
    assert found["Umask"] == 0o077
    for name in ("WorkingDirectory", "StandardOutPath", "StandardErrorPath"):
        assert found[name].startswith(str(tmp_path))
    assert b"HOME/" not in installed_text(tmp_path)


def installed_text(tmp_path: Path) -> bytes:
    return (tmp_path / "Library" / "LaunchAgents" / "mlxcache.plist").read_bytes()


@pytest.mark.skipif(shutil.which("plutil") is None, reason="plutil is a command of macOS")
def test_a_mac_understands_the_plist(tmp_path: Path) -> None:
    """As launchd reads it."""
    installed(tmp_path)
    plist = tmp_path / "Library" / "LaunchAgents" / "mlxcache.plist"
    done = subprocess.run(
        ["plutil", "-lint", str(plist)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip().endswith("OK")) == (0, True), done.stdout


def test_the_unit_starts_the_server_again_where_it_failed_but_for_wrong_settings() -> None:
    """Within limits."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(UNIT)
    service = unit["Service"]
    assert service["ExecStart"].endswith("/mlxcache serve")
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == "2"
    assert int(service["TimeoutStopSec"]) > 10
    assert int(unit["Unit"]["StartLimitBurst"]) > 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """Every key and value of it; what it does not know it would only tell in a log."""
    command = tmp_path / ".local" / "bin" / "mlxcache"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(UNIT)],
        env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
