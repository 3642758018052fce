"""The command that is printed to be pasted into another terminal, in any folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxcache.cli.connect import CLONE, find_on_path, launch_command, own_command
from mlxcache.cli.options import find_server
from mlxcache.cli.remote import NoServer
from mlxcache.config.folder import default_cache_dir

HERE = "http://127.0.0.1:8081"


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\necho "$0"\n')
    path.chmod(0o755)
    return path


def test_in_a_clone_it_is_the_script_of_the_clone(tmp_path: Path) -> None:
    """A shell in another folder runs it, whatever characters its path has."""
    clone = tmp_path / "it's a clone"
    script = program(clone / "bin" / "mlxcache")
    inner = program(clone / ".venv" / "bin" / "mlxcache")
    python = str(inner.with_name("python"))
    line = own_command(str(clone / ".venv"), python, str(inner), clone)
    done = subprocess.run(["sh", "-c", line], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(script)


def test_the_clones_own_scripts_are_not_the_programs_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bin/anyclaude runs `launch anyclaude`, which would run it again."""
    monkeypatch.setenv("PATH", f"{CLONE / 'bin'}:{tmp_path}")
    assert find_on_path("anyclaude") is None
    own = program(tmp_path / "anyclaude")
    assert find_on_path("anyclaude") == str(own)


def test_elsewhere_it_is_the_program_that_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path becomes absolute; a module that was run is the program beside Python."""
    called = program(tmp_path / "links" / "mlxcache")
    inner = program(tmp_path / "venv" / "bin" / "mlxcache")
    python, clone = str(inner.with_name("python")), tmp_path / "site-packages"
    monkeypatch.chdir(tmp_path)
    prefix = str(tmp_path / "venv")
    assert own_command(prefix, python, "links/mlxcache", clone) == str(called)
    assert own_command(prefix, python, "mlxcache/cli/main.py", clone) == str(inner)


def test_without_a_program_it_is_python_with_the_module(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    line = own_command(str(tmp_path), str(python), "main.py", tmp_path)
    assert line == f"{python} -m mlxcache.cli.main"
    line = line.replace(str(python), sys.executable)
    done = subprocess.run(
        ["sh", "-c", f"{line} --version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("mlxcache ")


def test_launch_gets_the_address_where_it_would_not_find_the_server(tmp_path: Path) -> None:
    """On another port, with another host, or with another cache folder."""
    default = default_cache_dir()
    assert launch_command(HERE, default) == f"{own_command()} launch"
    for url in ("http://127.0.0.1:8082", "http://192.168.1.7:8081"):
        assert launch_command(url, default) == f"{own_command()} launch --url {url}"
    assert launch_command(HERE, tmp_path) == f"{own_command()} launch --url {HERE}"


def test_a_command_without_a_server_names_the_command_that_starts_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it can be pasted in any folder."""
    monkeypatch.setenv("MLXCACHE_PORT", "9")
    with pytest.raises(NoServer, match=re.escape(f"start one with `{own_command()} serve`")):
        find_server(None, None, tmp_path)
