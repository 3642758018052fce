"""What `bin/` shows while it installs: `bin/_install.py`, with a stand-in for pip."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.served import default_signals

BIN = Path(__file__).parents[1] / "bin"
PIP = """
import os, sys, time
assert sys.argv[1] == "install"
raw = "--progress-bar=raw" in sys.argv
print("Obtaining file:///a/clone")
print("Collecting mlx<0.33,>=0.32 (from mlxcache==0.1.0)")
print("  Downloading mlx_metal-0.32.4-py3-none-any.whl (38.2 MB)")
for part in (0, 12, 24, 40) if raw else ():
    print(f"Progress {part} of 40", flush=True)
    time.sleep(0.15)
print("Installing collected packages: mlx, mlxcache", flush=True)
time.sleep(0.6)
os.makedirs(os.environ["PYTHONPATH"] + "/mlx-0.32.4.dist-info", exist_ok=True)
time.sleep(0.6)
if "broken" in sys.argv:
    print("ERROR: No matching distribution found for mlx", file=sys.stderr)
    sys.exit(3)
print("Successfully installed mlx-0.32.4")
"""
CODE = """
import os, pathlib, sys
sys.path.insert(0, sys.argv.pop(1))
import _install
_install.REPORT_S, _install.SITE = 0.1, pathlib.Path(os.environ["PYTHONPATH"])
sys.exit(_install.main(sys.argv[1:]))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text('__version__ = "26.1"')
    (tmp_path / "pip" / "__main__.py").write_text(PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    return [sys.executable, "-c", CODE, str(BIN)]


def test_a_terminal_shows_one_line_in_place(command: list[str]) -> None:
    """With the package, its size, how far it is, and the time; nothing is left at the end."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    text = shown.decode()
    assert process.returncode == 0
    assert "\n" not in text
    assert "looking for mlx, 0 s" in text
    assert "downloading mlx_metal (38.2 MB), 30%, 0 s" in text
    assert "installed 1 of 2 packages, " in text
    assert text.endswith("\r\x1b[2K")


def test_without_a_terminal_there_is_a_line_now_and_then(command: list[str]) -> None:
    """Pip before 24.1 shows no progress of a file."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert 2 <= len(lines) <= 8
    assert all(line.startswith("  ") and line.endswith(" s") for line in lines)
    assert "\x1b" not in done.stderr
    folder = Path(os.environ["PYTHONPATH"]) / "pip" / "__init__.py"
    folder.write_text('__version__ = "24.0"')
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "%" not in done.stderr


def test_a_failure_shows_the_end_of_the_output_and_keeps_the_status(command: list[str]) -> None:
    """So that the scripts in bin/ stop too."""
    done = subprocess.run([*command, "broken"], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "ERROR: No matching distribution found for mlx" in done.stderr
    assert "pip ended with status 3" in done.stderr


VENV = """
import pathlib, sys, time
assert sys.argv[1] == "--clear", sys.argv
if {slow}:
    pathlib.Path({begun!r}).touch()
    time.sleep(30)
made = pathlib.Path(sys.argv[2], "bin", "python")
made.parent.mkdir(parents=True)
made.write_text("#!/bin/sh\\nexec " + sys.executable + ' "$@"')
made.chmod(0o755)
"""
SLOW_PIP = """
import pathlib, sys, time

if sys.argv[1] == "install":
    print("Collecting mlx", flush=True)
    pathlib.Path({begun!r}).touch()
    time.sleep(30)
"""


NOTING_PIP = """
import sys

if sys.argv[1] == "install":
    with open({noted!r}, "a") as file:
        print(*sys.argv, file=file)
"""


def make_clone(folder: Path, programs: dict[str, str]) -> Path:
    """A clone with an empty environment, and stand-ins for `programs`, which run with -m."""
    for name, code in programs.items():
        (folder / "modules" / name).mkdir(parents=True)
        (folder / "modules" / name / "__init__.py").write_text('__version__ = "26.1"')
        (folder / "modules" / name / "__main__.py").write_text(code)
    clone = folder / "clone"
    (clone / "bin").mkdir(parents=True)
    for name in ("_env.sh", "_install.py", "_missing.py", "test"):
        (clone / "bin" / name).write_text((BIN / name).read_text())
    for name in ("pyproject.toml", "constraints.txt"):
        (clone / name).write_text("")
    return clone


def test_tests_that_are_named_install_what_they_import(tmp_path: Path) -> None:
    """All of the tests' packages only if one of them is missing, also for a file they import."""
    noted, venv = tmp_path / "noted", VENV.format(begun="", slow=False)
    pip, tests = NOTING_PIP.format(noted=str(noted)), tmp_path / "clone" / "tests"
    clone = make_clone(tmp_path, {"venv": venv, "pip": pip, "pytest": "print('run')"})
    tests.mkdir()
    (tests / "test_few.py").write_text("import json")
    (tests / "helper.py").write_text("def late():\n    import absent_package")
    (tests / "test_more.py").write_text("from tests import helper")

    def installed(*arguments: str) -> list[str]:
        noted.write_text("")
        done = subprocess.run(
            ["/bin/sh", str(clone / "bin" / "test"), *arguments],
            env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "modules")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "run\n"
        return [line.partition("--editable ")[2] for line in noted.read_text().splitlines()]

    few = installed("tests/test_few.py::test_x", "-q")
    assert [one.partition(" ")[0] for one in few] == [str(clone)]
    assert installed("tests/test_few.py") == []
    assert installed("tests/test_more.py") == [f"{clone}[test] --progress-bar=raw", ""]
    for all_there in (["tests/test_few.py"], ["tests"], ["-k", "x"], []):
        assert installed(*all_there) == []


@pytest.mark.parametrize("during", ["venv", "pip"])
def test_ctrl_c_ends_in_one_line_that_says_what_to_do(tmp_path: Path, during: str) -> None:
    """Whatever runs at that moment: making the environment, or pip. No traceback."""
    begun = tmp_path / "begun"
    values = {"begun": str(begun), "slow": during == "venv"}
    programs = {"venv": VENV.format(**values), "pip": SLOW_PIP.format(**values)}
    clone = make_clone(tmp_path, programs)
    script = clone / "bin" / "start"
    script.write_text('. "$(dirname "$0")/_env.sh"; environment; echo started')
    process = subprocess.Popen(
        ["/bin/sh", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,  # noqa: PLW1509 - it takes no lock
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "modules")},
    )
    end = time.monotonic() + 20
    while not begun.exists():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "Interrupted. Start it again to continue."
    assert errors.count("Interrupted") == 1
    assert errors.count("\n") == (2 if during == "venv" else 3)
