"""The server that `mlxcache launch` starts: its port, log and end; and abandoned settings files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxcache.cli.launch import launching
from mlxcache.cli.launch.processes import StartedServer, find_free_port, open_log
from mlxcache.cli.remote import Remote
from mlxcache.store.lock import serving
from tests.cli.answering import answering
from tests.cli.launch.conftest import Here
from tests.served import Served, default_signals

SECONDS = 60.0


class Other(ExitStack):
    """Another mlxcache server that serves. `posted`: paths of POST requests."""

    def __init__(self, port: int, *models: dict[str, Any]):
        super().__init__()
        listed = models or ({"id": "others", "context_length": 9000},)
        self.posted: list[str] = []

        def answer(request: BaseHTTPRequestHandler) -> Any:
            if request.command == "GET":
                return {"data": listed}
            self.posted.append(request.path)
            return {"id": request.path.split("/")[-2], "context_length": 7000}

        self.url = self.enter_context(answering(answer, port=port))


@pytest.fixture(autouse=True)
def claude(here: Here) -> None:
    here.install("claude", "opencode")


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def quicker(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Other]]:
    """Another server takes the first server's port when that is about to be started."""
    made: list[Other] = []
    real = subprocess.Popen

    def start(command: Any, *args: Any, **more: Any) -> Any:
        if "serve" in command and not made:
            made.append(Other(int(command[command.index("--port") + 1])))
        return real(command, *args, **more)

    monkeypatch.setattr(subprocess, "Popen", start)
    yield made
    for one in made:
        one.close()


def test_another_server_on_the_port_is_not_used_if_it_serves_another_model(
    here: Here, toy: Any, quicker: list[Other]
) -> None:
    """The error is the same as for a server that ran before."""
    port = str(find_free_port("127.0.0.1"))
    result = here.launch("claude", "--model", str(toy("llama")), "--port", port, status=1)
    assert "Another server started first" in result.stderr
    assert "serves others" in result.stderr
    assert not here.output.exists()
    assert quicker


def test_another_server_on_the_port_is_used_if_no_model_was_given(
    here: Here, quicker: list[Other]
) -> None:
    result = here.launch("claude", "--port", str(find_free_port("127.0.0.1")), "--ram", "1GB")
    url = quicker[0].url
    assert f"Another server started first at {url}" in result.stderr
    assert f"Using the server that runs at {url}. It serves others." in result.stderr
    assert "--ram changes nothing" in result.stderr
    assert "keeps running" not in result.stderr
    assert here.variables["ANTHROPIC_BASE_URL"] == url


MODELS: tuple[dict[str, Any], ...] = (
    {"id": "large", "context_length": 9000, "aliases": ["big"], "display_name": "org/large"},
    {"id": "small", "context_length": 5000, "aliases": ["quick"], "display_name": "org/small"},
    {"id": "idle", "aliases": [], "display_name": "idle"},
)


@pytest.fixture
def several() -> Iterator[Other]:
    """A running server with three models, one of which was never loaded."""
    with Other(0, *MODELS) as server:
        yield server


@pytest.mark.parametrize(
    ("flags", "sent", "small"),
    [
        ((), ("large", "9000"), None),
        (("--model", "big"), ("large", "9000"), None),
        (("--model", "org/small"), ("small", "5000"), None),
        (("--model", "idle"), ("idle", "7000"), None),
        (("--model", "large", "--small-model", "quick"), ("large", "9000"), "small"),
    ],
)
def test_the_client_gets_the_model_that_was_asked_for(
    here: Here, several: Other, flags: tuple[str, ...], sent: tuple[str, str], small: str | None
) -> None:
    """By name, id or alias, with its own context; one that was never loaded is loaded for that."""
    result = here.launch("claude", "--url", several.url, *flags)
    found = here.variables
    assert f"It serves {sent[0]}." in result.stderr
    assert (found["ANTHROPIC_MODEL"], found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]) == sent
    assert found.get("ANTHROPIC_DEFAULT_HAIKU_MODEL") == small
    assert several.posted == (["/v1/models/idle/load"] if sent[0] == "idle" else [])


def test_other_clients_get_the_name_of_a_model_that_is_not_the_default(
    here: Here, several: Other
) -> None:
    asked: tuple[tuple[list[str], str, str], ...] = (
        ([], "current-model", "current-model"),
        (["--model", "small"], "small", "small"),
        (["--small-model", "small"], "current-model", "small"),
    )
    for flags, sent, small in asked:
        here.launch("opencode", "--url", several.url, *flags)
        found = json.loads(here.variables["OPENCODE_CONFIG_CONTENT"])
        assert (found["model"], found["small_model"]) == (f"mlxcache/{sent}", f"mlxcache/{small}")
        assert {sent, small} == set(found["provider"]["mlxcache"]["models"])


def test_a_model_that_is_not_served_is_an_error(here: Here, several: Other) -> None:
    wrong = here.launch("claude", "--url", several.url, "--model", "tiny", status=1).stderr
    assert "serves large, small, idle. Name one of them with --model to use it" in wrong
    wrong = here.launch("claude", "--url", several.url, "--small-model", "tiny", status=1).stderr
    assert "has no model 'tiny' for --small-model; its models are large, small, idle." in wrong
    result = here.launch("pi", "--url", several.url, "--small-model", "x", status=2)
    assert "--small-model is only for claude and opencode" in result.stderr
    assert not here.output.exists()


@pytest.mark.slow
def test_with_port_0_another_free_port_is_tried(here: Here, toy: Any, quicker: list[Other]) -> None:
    flags = ("--model", str(toy("llama")), "--ram", "200MB", "--disk", "off", "--port", "0")
    result = here.launch("claude", *flags, "--stop-after")
    assert "started first" in result.stderr
    assert here.variables["ANTHROPIC_BASE_URL"] != quicker[0].url


def test_a_server_elsewhere_is_asked_also_where_the_port_is_0(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Port 0 is for a server that is started on this machine."""
    monkeypatch.setenv("MLXCACHE_PORT", "0")
    url = "https://mac.example"
    monkeypatch.setattr(Remote, "answers", lambda self: self.url == url)
    assert launching.Launch({}, None, url).running
    assert not launching.Launch({}, None, None).running


def test_a_started_server_is_recognised_by_its_note_or_its_listening_socket(
    tmp_path: Path,
) -> None:
    other = Other(0)
    code = (
        "import socket, sys, time\nsys.stdin.readline()\n"
        "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert not StartedServer(process, tmp_path, other.url, tmp_path).listens()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        url = f"http://127.0.0.1:{process.stdout.readline().decode().strip()}"
        assert StartedServer(process, tmp_path, url, tmp_path).listens()
        assert not StartedServer(process, tmp_path, other.url, tmp_path).listens()
        with serving(tmp_path, other.url, "m"):
            itself: Any = SimpleNamespace(pid=os.getpid())
            assert StartedServer(itself, tmp_path, other.url, tmp_path).listens()
            assert not StartedServer(process, tmp_path, other.url, tmp_path).listens()
    finally:
        process.kill()
        process.communicate()
        other.close()


def test_a_log_that_another_server_writes_is_kept(tmp_path: Path) -> None:
    """A second server on the port logs to another file; a later one uses the first again."""
    path, file = open_log(tmp_path, 80)
    script = "echo loading; exec sleep 60"
    with file, subprocess.Popen(["sh", "-c", script], stdout=file) as running:
        until(path.read_bytes)
        other, beside = open_log(tmp_path, 80)
        beside.close()
        assert other == tmp_path / f"serve-80-{os.getpid()}.log"
        assert path.read_text() == "loading\n"
        running.kill()
    again, file = open_log(tmp_path, 80)
    file.close()
    assert again == path
    assert path.stat().st_size == 0
    assert path.stat().st_mode & 0o777 == 0o600


def started_launch(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlxcache.cli.main", "launch", "claude", *arguments]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        preexec_fn=default_signals,  # noqa: PLW1509 - it takes no lock
    )


def servers_of(pid: int) -> list[psutil.Process]:
    """The servers among a command's children; the first child is the client's `--version`."""
    found: list[psutil.Process] = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if "serve" in child.cmdline() else []
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_the_server_loads_ends_that_server_too(
    here: Here, toy: Any, number: int
) -> None:
    flags = ("--model", str(toy("llama")), "--ram", "200MB", "--disk", "off", "--port", "0")
    process = started_launch(*flags)
    children: list[psutil.Process] = []
    try:
        until(lambda: servers_of(process.pid))
        children = psutil.Process(process.pid).children()
        process.send_signal(number)
        _, told = process.communicate(timeout=SECONDS)
        assert process.returncode in (128 + number, 1), told  # 1: as typer ends for Ctrl-C
        assert not any(child.is_running() for child in children)
    finally:
        for child in children:
            if child.is_running():
                child.kill()
    assert b"Stopping the server" in told
    assert not here.output.exists()


@pytest.mark.slow
def test_the_settings_file_of_a_killed_command_is_removed_after_its_client_ended(
    here: Here, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next command, since it may hold a key; files of others are kept."""
    theirs = here.home / ".claude" / "settings.json"
    theirs.parent.mkdir()
    theirs.write_text(json.dumps({"env": {"ANTHROPIC_AUTH_TOKEN": "sk"}}))
    foreign = here.temporary / "mlxcache-launch-notes"
    foreign.mkdir()
    (foreign / "notes").write_text("x")

    def files() -> list[Path]:
        return list(here.temporary.glob("mlxcache-launch-*/settings.json"))

    here.wait.touch()
    process = started_launch("--url", server.url)
    pid = here.output.with_name("output.pid")
    until(pid.exists)
    client = int(pid.read_text())
    (left,) = files()
    assert left.stat().st_mode & 0o777 == 0o600
    process.kill()
    process.wait()
    monkeypatch.setenv("FAKE_WAIT", str(here.folder / "no"))
    here.launch("claude", "--url", server.url)
    assert files() == [left]  # its client still runs
    os.kill(client, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(client))
    here.launch("claude", "--url", server.url)
    assert files() == []
    assert not left.parent.exists()
    assert (foreign / "notes").exists()
