"""Terminal output: progress bars, tables of 80 columns, unbroken commands, and JSON on request."""

from __future__ import annotations

import io
import re
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlxcache.cli import output
from mlxcache.cli.doctor import Finding
from mlxcache.cli.doctor.command import print_findings
from mlxcache.cli.main import app, load_all
from mlxcache.cli.remote import Remote
from mlxcache.cli.server import print_welcome
from mlxcache.cli.sessions import print_sessions
from mlxcache.config.models import Route
from mlxcache.model.demo import DEMO_NOTICE
from mlxcache.types import ModelInfo
from tests.cli.answering import answering

QUIET = {"serve", "bench", "prove"}
"""Commands without --json: one logs, the others have an output format of their own."""


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, (*path, name))
        else:
            found[*path, name] = command
    return found


COMMANDS = commands(load_all())
INFO = ModelInfo("demo", 100, 100, 1, "llama", False, True)
FIGURES = {"ram": {"limit_bytes": 100}, "bytes_per_token": 0, "bytes_per_checkpoint": 0}


@pytest.mark.parametrize("path", [path for path in COMMANDS if path[0] not in QUIET], ids=" ".join)
def test_every_command_that_prints_a_result_takes_json(path: tuple[str, ...]) -> None:
    assert any("--json" in parameter.opts for parameter in COMMANDS[path].params)


@pytest.mark.parametrize("path", list(COMMANDS), ids=" ".join)
def test_every_command_takes_the_short_flag_for_help(path: tuple[str, ...]) -> None:
    """The help fits 80 columns."""
    result = CliRunner().invoke(app, [*path, "-h"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "<bool>" not in result.output


def test_completion_can_be_installed() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    assert "--install-completion" in result.output
    assert "<bool>" not in result.output
    result = CliRunner().invoke(
        app, env={"_MLXCACHE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "mlxcache launch c"}
    )
    assert "claude" in result.output


def test_the_longest_sessions_fit_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("COLUMNS", "80"), ("FORCE_COLOR", "1"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TERM", "xterm")
    one = {
        "id": "ses_0123456789ab",
        "name": "fix the parser of dates in the importer",
        "tokens": 1_234_567,
        "ram_bytes": 123_400_000_000,
        "disk_bytes": 999_900_000,
        "tier": "mixed",
        "pinned": True,
        "last_used_at": time.time() - 3599,
        "figures": {"requests": 3, "generated_tokens": 40},
    }
    print_sessions([one])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    for whole in ("ses_0123456789ab", "1,234,567", "123.4 GB", "999.9 MB", "mixed", "59 min ago"):
        assert whole in lines[1]


def test_the_list_tells_clients_and_what_has_no_reply(capsys: pytest.CaptureFixture[str]) -> None:
    """One client has no column, a session without a client a dash, and a fork no requests yet."""
    one: dict[str, Any] = {
        "id": "ses_1",
        "name": "a",
        "title": None,
        "label": None,
        "tokens": 1,
        "ram_bytes": 0,
    }
    one |= {"disk_bytes": 0, "tier": None, "pinned": False, "last_used_at": time.time()}
    one |= {"figures": {"requests": 1, "generated_tokens": 4}}
    clients = ["claude-cli/2.1.330", "codex-tui/0.169.0", None]
    print_sessions([one | {"client": client} for client in clients])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in shown] == ["client", "claude", "codex", "-"]
    print_sessions([one | {"client": "claude-cli/2.1.330"}] * 2)
    assert "client" not in capsys.readouterr().out
    without = {"figures": {"requests": 1, "generated_tokens": 0}, "client": None}
    print_sessions([one | without, one | {"figures": {"requests": 0, "generated_tokens": 0}}])
    shown = [line.split()[:5] for line in capsys.readouterr().out.splitlines()]
    assert shown[1:] == [["ses_1", "no", "reply", "yet:", "a"], ["ses_1", "a", "1", "-", "-"]]


def test_remedies_and_notices_are_never_broken_or_boxed() -> None:
    remedy = f"pip install --force-reinstall {'x' * 100} {'y' * 100}"
    console = Console(file=io.StringIO(), width=60)
    print_findings(console, [Finding("a", "ok", "well"), Finding("bb", "warn", "w " * 60, remedy)])
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert remedy in [line.strip() for line in lines]
    assert max(len(line) for line in lines if remedy not in line) <= 60
    terminal = Console(file=io.StringIO(), width=60, force_terminal=True, soft_wrap=True)
    info = ModelInfo("demo", 100, 100, 1, "llama", False, True, is_demo=True)
    figures = FIGURES | {"disk": {"used_bytes": 0, "limit_bytes": 0}}
    launch = f"{'/a' * 60}/mlxcache launch --url http://h:1"
    print_welcome(terminal, "http://h:1", info, figures, launch=launch)
    assert isinstance(terminal.file, io.StringIO)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.file.getvalue()).splitlines()
    assert {DEMO_NOTICE, "cd YOUR-PROJECT", launch, "Ctrl-C stops."} <= set(shown)
    assert f"Other clients: {'/a' * 60}/mlxcache connect --url http://h:1" in shown
    assert "ANTHROPIC_" not in terminal.file.getvalue()


def welcomed(disk: dict[str, object], **more: Any) -> str:
    out = Console(file=io.StringIO(), width=200)
    figures = FIGURES | {"disk": disk, "models": more.pop("models", ())}
    print_welcome(out, "http://x", INFO, figures, launch="launch", **more)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize(
    ("disk", "said"),
    [
        ({"used_bytes": 0, "limit_bytes": 0, "reason": None}, "off: computed prefixes are lost"),
        (
            {"used_bytes": 0, "limit_bytes": 0, "reason": "The disk is full."},
            "off, computed prefixes are lost when the server ends. The disk is full.",
        ),
        (
            {"used_bytes": 5_000_000, "limit_bytes": 9_000_000, "reason": "2 GB are kept free."},
            "when the server ends; the 5 MB there are still read. 2 GB are kept free.",
        ),
        ({"used_bytes": 5_000_000, "limit_bytes": 9_000_000, "reason": None}, "9 MB, 5 MB of it"),
    ],
)
def test_the_banner_says_why_the_disk_tier_is_off(disk: dict[str, object], said: str) -> None:
    assert said in welcomed(disk)


def test_bars_are_shown_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (False, True):
        out = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        monkeypatch.setattr(output, "console", lambda *, stderr, out=out: out)
        with output.count_bar("reading the files") as step:
            step(1, 0)
            step(3, 12)
        with output.byte_bar("writing") as step:
            step(3_000, 12_000_000)
        assert isinstance(out.file, io.StringIO)
        text = out.file.getvalue()
        assert bool(text) is terminal
        assert not terminal or ("3 of 12" in text and "3 KB of 12 MB" in text)


def test_warming_reports_its_progress() -> None:
    """Progress is that of the new warm request, not of an earlier one."""
    old = {"id": "a", "api": "warm", "prompt_tokens": 9, "cached_tokens": 9, "fed_tokens": 0}
    now = {"id": "b", "api": "warm", "prompt_tokens": 70, "cached_tokens": 8, "fed_tokens": 20}
    listed, asked = iter([[old]]), threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> Any:
        if request.command == "POST":
            asked.wait(60)
            return {"prompt_tokens": 70}
        rows = next(listed, None)
        if rows is None:
            asked.set()
        return {"data": rows or [now, old]}

    steps: list[tuple[int, int]] = []
    with answering(answer) as url:
        found = Remote(url).warm(b"Be brief.", lambda done, total: steps.append((done, total)))
    assert found == {"prompt_tokens": 70}
    assert set(steps) == {(28, 70)}


def test_the_banner_lists_several_models() -> None:
    models = [
        {"label": "large", "aliases": ["big"], "default": True},
        {"label": "small", "aliases": [], "default": False},
    ]
    disk: dict[str, object] = {"used_bytes": 0, "limit_bytes": 0}
    said = welcomed(disk, models=models, routes=[Route("claude-haiku-*", "Small")])
    assert "\nModels   large, big, and for all other names\n" in said
    assert "\n         small, claude-haiku-*, loaded at its first request\n" in said
    assert "\nRAM      100 bytes, with the weights of all models\n" in said
