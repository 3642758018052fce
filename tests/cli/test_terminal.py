"""Terminal output: progress bars, tables of 80 columns, unbroken commands, and JSON on request."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlxcache.cli import progress
from mlxcache.cli.doctor.command import print_findings
from mlxcache.cli.doctor.finding import Finding
from mlxcache.cli.lazy import load_all
from mlxcache.cli.main import COMMANDS as LAZY
from mlxcache.cli.main import app
from mlxcache.cli.remote import Remote
from mlxcache.cli.server import print_welcome
from mlxcache.cli.sessions import print_sessions
from mlxcache.config import load_settings
from mlxcache.config.models import Route
from mlxcache.errors import ConfigError
from mlxcache.model.demo import DEMO_NOTICE
from mlxcache.types import ModelInfo

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


COMMANDS = commands(load_all(app, LAZY))


@pytest.mark.parametrize("path", [path for path in COMMANDS if path[0] not in QUIET], ids=" ".join)
def test_every_command_that_prints_a_result_takes_json(path: tuple[str, ...]) -> None:
    """Programs read the result as JSON."""
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
    """The installed completion completes the names of clients."""
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
    """The name is shortened; ids and figures are not."""
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
    }
    print_sessions([one])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    for whole in ("ses_0123456789ab", "1,234,567", "123.4 GB", "999.9 MB", "mixed", "59 min ago"):
        assert whole in lines[1]


def test_sessions_of_several_clients_have_a_column_of_clients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of one client have none, and a session without a client a dash."""
    one: dict[str, Any] = {
        "id": "ses_1",
        "name": "a",
        "title": None,
        "label": None,
        "tokens": 1,
        "ram_bytes": 0,
    }
    one |= {"disk_bytes": 0, "tier": None, "pinned": False, "last_used_at": time.time()}
    clients = ["claude-cli/2.1.330", "codex-tui/0.169.0", None]
    print_sessions([one | {"client": client} for client in clients])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in shown] == ["client", "claude", "codex", "-"]
    print_sessions([one | {"client": "claude-cli/2.1.330"}] * 2)
    assert "client" not in capsys.readouterr().out


def test_remedies_and_notices_are_never_broken_or_boxed() -> None:
    """Text meant for copying stays on one line at any width."""
    remedy = f"pip install --force-reinstall {'x' * 100} {'y' * 100}"
    console = Console(file=io.StringIO(), width=60)
    print_findings(console, [Finding("a", "ok", "well"), Finding("bb", "warn", "w " * 60, remedy)])
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert remedy in [line.strip() for line in lines]
    assert max(len(line) for line in lines if remedy not in line) <= 60
    terminal = Console(file=io.StringIO(), width=60, force_terminal=True, soft_wrap=True)
    info = ModelInfo("demo", 100, 100, 1, "llama", False, True, is_demo=True)
    figures = {"ram": {"limit_bytes": 1}, "disk": {"used_bytes": 0, "limit_bytes": 0}}
    launch = f"{'/a' * 60}/mlxcache launch --url http://h:1"
    print_welcome(terminal, "http://h:1", info, figures, launch=launch, has_key=False)
    assert isinstance(terminal.file, io.StringIO)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.file.getvalue()).splitlines()
    assert {DEMO_NOTICE, "cd YOUR-PROJECT", launch} <= set(shown)


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
    out = Console(file=io.StringIO(), width=200)
    info = ModelInfo("demo", 100, 100, 1, "llama", False, True)
    figures = {"ram": {"limit_bytes": 100}, "disk": disk}
    print_welcome(out, "http://x", info, figures, launch="launch", has_key=False)
    assert isinstance(out.file, io.StringIO)
    assert said in out.file.getvalue()


def test_bars_are_shown_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar shows the amount done and the total; a pipe gets nothing."""
    for terminal in (False, True):
        out = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        monkeypatch.setattr(progress, "console", lambda *, stderr, out=out: out)
        with progress.count_bar("reading the files") as step:
            step(1, 0)
            step(3, 12)
        with progress.byte_bar("writing") as step:
            step(3_000, 12_000_000)
        assert isinstance(out.file, io.StringIO)
        text = out.file.getvalue()
        assert bool(text) is terminal
        assert not terminal or ("3 of 12" in text and "3 KB of 12 MB" in text)


class Slow(BaseHTTPRequestHandler):
    """A server whose warm request ends once its progress was requested."""

    asked: ClassVar = threading.Event()

    def do_GET(self) -> None:
        self.server.count += 1  # type: ignore[attr-defined]
        new = self.server.count > 1  # type: ignore[attr-defined]
        old = {"id": "a", "api": "warm", "prompt_tokens": 9, "cached_tokens": 9, "fed_tokens": 0}
        now = {"id": "b", "api": "warm", "prompt_tokens": 70, "cached_tokens": 8, "fed_tokens": 20}
        self.answer({"data": [now, old] if new else [old]})
        if new:
            self.asked.set()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.wait(60)
        self.answer({"prompt_tokens": 70})

    def answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def test_warming_reports_its_progress() -> None:
    """Progress is that of the new warm request, not of an earlier one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.count = 0  # type: ignore[attr-defined]
        many = threading.Thread(target=server.serve_forever)
        many.start()
        steps: list[tuple[int, int]] = []
        try:
            found = Remote(f"http://127.0.0.1:{server.server_port}").warm(
                b"Be brief.", lambda done, total: steps.append((done, total))
            )
        finally:
            server.shutdown()
            many.join()
    assert found == {"prompt_tokens": 70}
    assert set(steps) == {(28, 70)}


def test_drafted_tokens_need_a_draft_model(tmp_path: Path) -> None:
    """The setting without a draft model is an error, from the environment and from a file."""
    with pytest.raises(ConfigError, match="--draft-model"):
        load_settings({"num_draft_tokens": "4"}, {}, None)
    file = tmp_path / "config.toml"
    file.write_text('model = "m"\nnum_draft_tokens = 4\n')
    with pytest.raises(ConfigError, match="--draft-model"):
        load_settings({}, {}, file)
    assert load_settings({"draft_model": "d"}, {}, file).num_draft_tokens == 4


def test_a_limit_of_guesses_needs_guesses(tmp_path: Path) -> None:
    """The setting without --speculate auto is an error, and so is a value that is neither."""
    with pytest.raises(ConfigError, match="--speculate auto"):
        load_settings({"speculate_tokens": "4"}, {}, None)
    with pytest.raises(ConfigError, match="off or auto"):
        load_settings({"speculate": "on"}, {}, None)
    file = tmp_path / "config.toml"
    file.write_text('model = "m"\nspeculate = false\n')
    assert load_settings({}, {}, file).speculate == "off"


def test_the_banner_lists_several_models() -> None:
    """Each with the names and patterns that lead to it."""
    out = Console(file=io.StringIO(), width=200)
    info = ModelInfo("org/large", 100, 100, 1, "llama", False, True)
    models = [
        {"label": "large", "aliases": ["big"], "default": True},
        {"label": "small", "aliases": [], "default": False},
    ]
    figures = {"ram": {"limit_bytes": 100}, "disk": {"used_bytes": 0, "limit_bytes": 0}}
    print_welcome(
        out,
        "http://x",
        info,
        figures | {"models": models},
        launch="launch",
        has_key=False,
        routes=[Route("claude-haiku-*", "Small")],
    )
    assert isinstance(out.file, io.StringIO)
    said = out.file.getvalue()
    assert "\nModels   large, big, and for all other names\n" in said
    assert "\n         small, claude-haiku-*, loaded at its first request\n" in said
    assert "\nRAM      100 bytes, with the weights of all models\n" in said
