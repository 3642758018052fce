"""The progress of a prompt in the terminal of a client that prints nothing meanwhile."""

from __future__ import annotations

import io
import os
import pty
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mlxcache.cli import log
from mlxcache.cli.launch import processes as module
from mlxcache.cli.launch.clients import CLIENTS, ClientName, Invocation, Service, Setup
from mlxcache.cli.launch.processes import LineAbove, run_client, watching
from mlxcache.cli.remote import NoServer
from tests.cli.test_log import Screen

SERVICE = Service("http://127.0.0.1:1", "m", 4096)


def row(phase: str | None, done: int = 0, id: str = "a") -> dict[str, Any]:
    progress = {"phase": phase, "done_tokens": done, "total_tokens": 9000, "left_s": 40.0}
    return {"id": id, "session": None, "progress": progress if phase else None}


class Server:
    """A server whose answers follow one another; each is given as often as it is asked for."""

    answers: ClassVar[list[list[dict[str, Any]]]] = []

    def __init__(self, url: str, key: str | None):
        assert (url, key) == (SERVICE.url, None)

    def requests(self, limit: int) -> list[dict[str, Any]]:
        if not self.answers:
            raise NoServer("it ended")
        return self.answers.pop(0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(
    monkeypatch: pytest.MonkeyPatch,
    answers: list[list[dict[str, Any]]],
    out: type[io.StringIO] = Terminal,
) -> str:
    """Return what is written while the server gives these answers."""
    monkeypatch.setattr(module, "Remote", Server)
    monkeypatch.setattr(Server, "answers", answers)
    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(log, "SHOWN_AFTER_S", 0.0)
    written = out()
    module._watch(SERVICE, written, threading.Event())
    return written.getvalue()


def test_the_line_is_rewritten_and_removed_when_the_reply_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the reply is printed where it was."""
    answers = [[row("queued")], [row("prefill", 0)]]
    assert watched(monkeypatch, answers) == ""
    answers = [[row("prefill", 1000), row(None, id="b")], [row("prefill", 5000)]]
    text = watched(monkeypatch, [*answers])
    assert "1,000 of 9,000" in text
    assert Screen(text, 80).text == "reading the prompt: 5,000 of 9,000, about 40 s left\n"
    text = watched(monkeypatch, [*answers, [row("decode", 1)]])
    assert Screen(f"{text}Hello.", 80).text.strip("\n") == "Hello."


def test_without_a_terminal_a_long_prompt_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how long the prompt takes, and where to watch it."""
    answers = [[row("prefill", at)] for at in (1000, 5000)] + [[row("decode", 1)]]
    line = "reading the prompt: 1,000 of 9,000, about 40 s left"
    where = f"to watch it: {SERVICE.url}/dashboard"
    assert watched(monkeypatch, answers, io.StringIO) == f"{line}; {where}\n"


def test_what_a_client_printed_is_never_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of an earlier prompt stays, and beside other requests nothing is written."""
    first = watched(monkeypatch, [[row("prefill", 1000)], [row(None)]])
    both = [[row("prefill", 1000), row("decode", 5, "b")]]
    assert watched(monkeypatch, both) == ""
    out = Terminal(first)
    out.seek(0, io.SEEK_END)
    line = LineAbove(out, "")
    out.write("Done.\n")
    line.remove()
    line.show("reading the prompt")
    shown = Screen(out.getvalue(), 80).text.splitlines()
    assert shown == [
        "reading the prompt: 1,000 of 9,000, about 40 s left",
        "Done.",
        "reading the prompt",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "quiet"),
    [
        (ClientName.CLAUDE, ["-p", "hello"], True),
        (ClientName.CLAUDE, ["--print", "--output-format", "json"], True),
        (ClientName.CLAUDE, ["-p", "--output-format=stream-json"], False),
        (ClientName.CLAUDE, ["hello"], False),
        (ClientName.OPENCODE, ["run", "hello"], True),
        (ClientName.OPENCODE, ["run", "--format", "json", "hello"], False),
        (ClientName.OPENCODE, [], False),
        (ClientName.CODEX, ["exec", "hello"], True),
        (ClientName.CODEX, ["exec", "--json", "hello"], False),
        (ClientName.CODEX, ["-p", "profile"], False),
        (ClientName.QWEN, ["-p", "hello"], True),
        (ClientName.QWEN, ["-p", "hello", "-o", "stream-json"], False),
        (ClientName.PI, ["-p", "hello"], True),
        (ClientName.PI, ["--mode", "json", "-p", "hello"], False),
        (ClientName.COPILOT, ["-p", "hello"], True),
        (ClientName.COPILOT, ["-p", "hello", "--output-format=json"], False),
        (ClientName.CLINE, ["say hello"], False),
        (ClientName.CONTINUE, ["-p", "hello"], True),
        (ClientName.CONTINUE, ["hello"], False),
    ],
)
def test_nothing_is_drawn_over_a_client_that_owns_the_terminal(
    name: ClientName, arguments: list[str], quiet: bool
) -> None:
    """Only a client that prints its reply and ends is quiet."""
    assert CLIENTS[name].is_quiet(arguments) is quiet


@pytest.mark.parametrize(("terminal", "quiet"), [(True, True), (True, False), (False, True)])
def test_a_quiet_client_is_watched(
    terminal: bool, quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs; another one is not."""
    monkeypatch.setattr(module, "Remote", Server)
    monkeypatch.setattr(Server, "answers", [[row("prefill", at)] for at in range(1, 500)])
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(log, "SHOWN_AFTER_S", 0.0)
    ours, theirs = pty.openpty() if terminal else os.pipe()
    words = Invocation(Path("/bin/sleep"), ("0.3",), dict(os.environ), tmp_path, tmp_path)
    with os.fdopen(theirs if terminal else os.dup(theirs), "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with watching(SERVICE, quiet=quiet):
            assert run_client(words, Setup(variables={}), SERVICE) == 0
        time.sleep(0.05)
        stderr.write("end")
        stderr.flush()
        shown = ""
        while not shown.endswith("end"):
            shown += os.read(ours, 100_000).decode()
    os.close(ours)
    assert ("reading the prompt" in shown) is quiet
