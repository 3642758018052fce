"""Checks of the port, running servers, the shared remote, and the machines of a divided model."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from mlxcache.cli import show
from mlxcache.cli.connect import own_command
from mlxcache.cli.doctor import Finding
from mlxcache.cli.listen import IN_USE, CannotListen, PortTaken, listen
from mlxcache.cli.ranks import LOCAL, launch_command, read_hosts
from mlxcache.config import Settings
from mlxcache.errors import ConfigError, MlxcacheError, RemoteUnavailable
from mlxcache.store.lock import servers

# -- the port and running servers --------------------------------------------------------------


def examine_port(settings: Settings) -> Finding:
    if settings.port == 0:
        return Finding("port", "ok", "0: any free port")
    try:
        for one in listen(settings.host, settings.port):
            one.close()
    except PortTaken as error:
        if error.serves:
            return Finding("port", "ok", f"{settings.port}: mlxcache serves there")
        value = f"{settings.port} {IN_USE} {error.holder}"
        remedy = "stop it, or use another port: --port 0 picks a free one"
        return Finding("port", "fail", value, remedy)
    except CannotListen as error:
        return Finding("port", "fail", str(error), "set --host to an address of this machine")
    return Finding("port", "ok", f"{settings.port} of {settings.host} is free")


def examine_servers(settings: Settings, url: str) -> list[Finding]:
    known = [one.url for one in servers(settings.cache_dir)]
    urls = known if url in known else [*known, url]
    key = next(iter(settings.api_key), None)
    found = [_server(one, key, named=one in known) for one in urls]
    shown = [one for one in found if one is not None]
    return shown or [Finding("server", "ok", f"none runs: start one with {own_command()} serve")]


def _server(url: str, key: str | None, *, named: bool) -> Finding | None:
    from mlxcache.cli.remote import Remote  # noqa: PLC0415 - takes 50 ms

    remote = Remote(url, key)
    health = remote.health()
    if health is None:
        value = f"{url} does not answer"
        return Finding("server", "warn", value, "wait, or restart it") if named else None
    if health.get("status") != "ok":
        value = f"{url}: {health.get('status', 'not ready')}"
        remedy = "see its log; the status is 503 while the model loads"
        return Finding("server", "warn", value, remedy)
    models: list[dict[str, Any]] = []
    with suppress(MlxcacheError):  # as with a wrong key
        models = remote.models()
    value = f"{url} serves {health['model']}"
    if len(models) > 1:
        states = (f"{one['id']} ({show.model_state(one)})" for one in models)
        value = f"{url} serves {', '.join(states)}"
    if (equal := health.get("equal_passes")) is not None:
        listed = ", ".join(map(str, equal)) or "none but one"
        value += f"; tokens of a pass that give the bits of passes over one: {listed}"
    return Finding("server", "ok", value)


# -- the shared remote -------------------------------------------------------------------------


def examine_remote(settings: Settings) -> Finding:
    """Open the remote, check its key, and write, read and delete a small object. Blocks.

    No marker is written: the first server that uses the remote writes it, with its key.
    """
    from mlxcache.remote.objects import TRIAL, open_configured  # noqa: PLC0415 - only with --remote

    try:
        objects = open_configured(settings, marks=False)
    except ConfigError as error:
        return Finding("remote", "fail", str(error), "see docs/servers.md")
    content, found, took = str(time.time_ns()).encode(), None, 0.0
    with closing(objects), suppress(RemoteUnavailable):  # which its state tells
        began = time.perf_counter()
        objects.put(TRIAL, content)
        found = objects.get(TRIAL)
        took = time.perf_counter() - began
        objects.delete(TRIAL)
    figures = objects.figures()
    if figures["state"] != "ok":
        value = f"{figures['url']} is {figures['state']}: {figures['reason']}"
        remedy = "servers run without it; check the address, the credentials and the network"
        return Finding("remote", "warn", value, remedy)
    if found != content:
        value = f"{figures['url']} did not return what was written"
        return Finding("remote", "fail", value, "use storage that is consistent")
    sealed = "sealed" if figures["sealed"] else "not sealed: add --remote-key-file"
    value = f"{figures['url']} writes and reads in {1000 * took:.0f} ms; {sealed}"
    return Finding("remote", "ok", value, figures={"round_trip_s": round(took, 3)})


# -- machines among which a model is divided ---------------------------------------------------

ANSWER_S = 20.0
"""Most seconds for the answer of one machine."""

_CONNECT = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_QUESTION = (
    "import importlib.metadata as m, json, os, sys; "
    "print(json.dumps([{p: m.version(p) for p in sys.argv[2:]}, os.path.isdir(sys.argv[1])]))"
)
_SSH_FAILED = 255

Run = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, _SSH_FAILED, "", str(error))


def examine_hosts(settings: Settings, run: Run = run_command) -> list[Finding]:
    """Log in to each machine of `--hosts` or `--hostfile`, and check packages and the model."""
    if not (settings.hosts or settings.hostfile):
        return []
    from mlxcache.ranks.group import versions  # noqa: PLC0415 - imports MLX

    try:
        settings.check_divisible()
        names = _names(settings)
    except ConfigError as error:
        return [Finding("machines", "fail", str(error), "see docs/servers.md")]
    path = Path(settings.model or "").expanduser()
    model = path.absolute() if path.is_dir() else None
    here = Finding("machines", "ok", f"{len(names)}, of which this is the first")
    others = dict.fromkeys(name for name in names[1:] if name != LOCAL)
    return [here, *(_examine(name, model, versions(), run) for name in others)]


def _names(settings: Settings) -> list[str]:
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
    title = f"machine {name}"
    question = shlex.join([sys.executable, "-c", _QUESTION, str(model or ""), *mine])
    answer = run([*_CONNECT, name, question])
    words = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
    if answer.returncode == _SSH_FAILED:
        remedy = f"let this machine log in there without a password: ssh-copy-id {name}"
        return Finding(title, "fail", f"cannot be reached by ssh: {words[-1]}", remedy)
    try:
        theirs, has_model = json.loads(answer.stdout)
    except ValueError:
        remedy = "install the same version of mlxcache there, in the same folder"
        return Finding(title, "fail", f"{sys.executable} does not run there: {words[-1]}", remedy)
    if theirs != mine:
        both = ((name, theirs[name], own) for name, own in mine.items())
        differing = "; ".join(f"{name} {one}, here {own}" for name, one, own in both if one != own)
        return Finding(title, "fail", differing, "install the same versions on all machines")
    if model is not None and not has_model:
        remedy = "copy it there, into a folder with the same path"
        return Finding(title, "fail", f"there is no model in {model}", remedy)
    return Finding(title, "ok", "reached by ssh, with the same versions")
