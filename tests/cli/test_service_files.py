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

from mlxcache.cli.options import SERVICE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "service"
UNIT, PLIST = FOLDER / "mlxcache.service", FOLDER / "mlxcache.plist"


def test_every_file_is_documented() -> None:
    """And none is named that is not there."""
    named = re.findall(r"examples/service/([\w.]+)", (ROOT / "docs" / "operations.md").read_text())
    assert set(named) == {path.name for path in FOLDER.iterdir()}


def clone(folder: Path) -> Path:
    """A folder like a clone, with the real scripts; every program in its .venv prints its name."""
    shutil.copytree(ROOT / "bin", folder / "bin")
    shutil.copytree(FOLDER, folder / "examples" / "service")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("mlxcache", "python", "ruff", "mypy", "lint-imports", "mkdocs"):
        (programs / name).write_text('#!/bin/sh\necho "$0 $*"\n')
        (programs / name).chmod(0o755)
    subprocess.run(
        ["sh", "-ec", "cat pyproject.toml constraints.txt | cksum > .venv/.installed"],
        cwd=folder,
        check=True,
    )
    return folder.resolve()


def documented(beginning: str, folder: Path, home: Path) -> None:
    """Run the commands of the page that begin with `beginning` up to those of the system."""
    code = re.search(
        rf"^mkdir -p {re.escape(beginning)}.*?(?=^(?:launchctl|systemctl) )",
        (ROOT / "docs" / "operations.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert code is not None
    environ = {"HOME": str(home), "PATH": "/bin:/usr/bin"}
    subprocess.run(["sh", "-ec", code[0]], cwd=folder, env=environ, check=True)


def installed(tmp_path: Path) -> bytes:
    """The plist as the documented lines make it in a clone."""
    documented("~/Library", clone(tmp_path / "clone"), tmp_path)
    return installed_text(tmp_path)


def test_the_plist_starts_the_server_again_where_it_failed(tmp_path: Path) -> None:
    """As the documented line installs it, with whole paths, which launchd needs."""
    found = plistlib.loads(installed(tmp_path))
    assert found["Label"] == PLIST.stem
    assert list(found["EnvironmentVariables"]) == [SERVICE]
    assert found["ProgramArguments"] == [f"{tmp_path}/clone/bin/mlxcache", "serve"]
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
    installed(tmp_path)
    plist = tmp_path / "Library" / "LaunchAgents" / "mlxcache.plist"
    done = subprocess.run(
        ["plutil", "-lint", str(plist)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip().endswith("OK")) == (0, True), done.stdout


def test_the_unit_starts_the_server_again_where_it_failed_but_for_wrong_settings() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(UNIT)
    service = unit["Service"]
    assert service["ExecStart"].endswith("/mlxcache serve")
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == "2"
    assert int(service["TimeoutStopSec"]) > 10
    assert int(unit["Unit"]["StartLimitBurst"]) > 1


def test_the_unit_s_command_is_the_linked_script_of_a_clone(tmp_path: Path) -> None:
    """The documented commands put it where ExecStart expects it."""
    folder = clone(tmp_path / "clone")
    documented("~/.local/bin", folder, tmp_path)
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(tmp_path / ".config" / "systemd" / "user" / UNIT.name)
    command = unit["Service"]["ExecStart"].replace("%h", str(tmp_path))
    assert output(command.split(), tmp_path) == f"{folder}/.venv/bin/mlxcache serve\n"


SCRIPTS = sorted(path.name for path in (ROOT / "bin").iterdir() if path.name[0] != "_")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_works_through_links(name: str, tmp_path: Path) -> None:
    folder = clone(tmp_path / "clone")
    for links in ("first", "second"):
        (tmp_path / links).mkdir()
    (tmp_path / "first" / "one").symlink_to(folder / "bin" / name)
    (tmp_path / "second" / "two").symlink_to("../first/one")
    printed = output([str(tmp_path / "second" / "two"), "argument"], tmp_path)
    assert printed.startswith(f"{folder}/.venv/bin/")


def output(command: list[str], cwd: Path) -> str:
    """What a command prints; it must succeed."""
    environ = {"HOME": str(cwd), "PATH": "/bin:/usr/bin"}
    return subprocess.run(
        command, cwd=cwd, env=environ, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


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
