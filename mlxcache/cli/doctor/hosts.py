"""Checks of the machines among which a model is to be divided."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlxcache.cli.doctor.finding import Finding
from mlxcache.cli.ranks import LOCAL, launch_command, read_hosts
from mlxcache.config import Settings
from mlxcache.errors import ConfigError

ANSWER_S = 20.0
"""Most seconds for the answer of one machine."""

_CONNECT = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_QUESTION = (
    "import importlib.metadata as m, json, os, sys; "
    "print(json.dumps([{p: m.version(p) for p in sys.argv[2:]}, os.path.isdir(sys.argv[1])]))"
)

Run = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command, and return its exit status and output. Blocks up to `ANSWER_S` (20) seconds.

    If the command cannot be run or takes longer, the exit status is 255, like that of an ssh which
    cannot connect, and the reason is in the standard error. Raises nothing then.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 255, "", str(error))


def examine_hosts(settings: Settings, run: Run = run_command) -> list[Finding]:
    """Log in to each machine of `--hosts` or `--hostfile`, and check packages and the model.

    Each must have the same versions of mlxcache, mlx and mlx-lm as this machine and, if the model
    is a folder here, a folder with the same path. Returns a finding about the settings, then one
    for each other machine. `run` runs a command, as `run_command` does. One of the two settings
    must be given. Blocks for seconds.
    """
    from mlxcache.ranks.group import versions  # noqa: PLC0415 - imports MLX

    try:
        settings.check_divisible()
        names = _names(settings)
    except ConfigError as error:
        return [Finding("machines", "fail", str(error), "see docs/ranks.md")]
    path = Path(settings.model or "").expanduser()
    model = path.absolute() if path.is_dir() else None
    here = Finding("machines", "ok", f"{len(names)}, of which this is the first")
    others = dict.fromkeys(name for name in names[1:] if name != LOCAL)
    return [here, *(_examine(name, model, versions(), run) for name in others)]


def _names(settings: Settings) -> list[str]:
    """Return the names by which ssh reaches the machines of `--hosts` or `--hostfile`.

    The first is this machine. Raises ConfigError if the setting or the file is not valid.
    """
    file = settings.hostfile
    if file is None:
        return [str(one["ssh"]) for one in read_hosts(settings.hosts or "")]
    launch_command(file, [])  # raises if it is missing
    try:
        read: Any = json.loads(file.read_bytes())
        return [str(one["ssh"]) for one in (read["hosts"] if isinstance(read, dict) else read)]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--hostfile {file} cannot be read: {error!r}") from error


def _examine(name: str, model: Path | None, mine: dict[str, str], run: Run) -> Finding:
    """Ask the machine `name` by ssh for its versions, and whether it has the folder `model`.

    The status is `fail` if the machine cannot be reached, differs in a version or lacks `model`.
    `model` is None if the model is not a folder here. `mine`: this machine's versions by package.
    `run`: as `run_command`.
    """
    title = f"machine {name}"
    question = shlex.join([sys.executable, "-c", _QUESTION, str(model or ""), *mine])
    answer = run([*_CONNECT, name, question])
    words = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
    if answer.returncode == 255:  # of ssh itself
        remedy = f"let this machine log in there without a password: ssh-copy-id {name}"
        return Finding(title, "fail", f"cannot be reached by ssh: {words[-1]}", remedy)
    try:
        theirs, has_model = json.loads(answer.stdout)
    except ValueError:
        remedy = "install the same version of mlxcache there, in the same folder"
        return Finding(title, "fail", f"{sys.executable} does not run there: {words[-1]}", remedy)
    if theirs != mine:
        differing = [
            f"{name} {theirs[name]}, here {own}"
            for name, own in mine.items()
            if theirs[name] != own
        ]
        remedy = "install the same versions on all machines"
        return Finding(title, "fail", "; ".join(differing), remedy)
    if model is not None and not has_model:
        remedy = "copy it there, into a folder with the same path"
        return Finding(title, "fail", f"there is no model in {model}", remedy)
    return Finding(title, "ok", "reached by ssh, with the same versions")
