"""Escape sequences in names from clients and snapshots never reach the terminal."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
import typer
from rich.console import Console

from mlxcache.api.http import read_client_name, read_session_label
from mlxcache.cli import show
from mlxcache.cli.log import ConsoleHandler
from mlxcache.cli.output import reporting
from mlxcache.cli.top import LiveState, render
from mlxcache.errors import MlxcacheError

EVIL = "a\x1b]52;c;cm0gLXJm\x1b\\\x9b2J\x07b\u202e"
HARMLESS = "a]52;c;cm0gLXJm\\2Jb"
ORDERS = ("\x1b]52", "\x9b", "\x07", "\u202e", "\x1b\\")


def harmless(text: str) -> None:
    assert HARMLESS in text
    assert not any(order in text for order in ORDERS)


def test_tables_and_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    session = {"name": None, "title": EVIL, "label": None}
    show.print_table((("name", "left"),), [[EVIL]], cut=0)
    harmless(capsys.readouterr().out)
    show.print_facts((("client", f"{EVIL}\nid  ses_1"),))
    printed = capsys.readouterr().out
    harmless(printed)
    assert len(printed.strip().splitlines()) == 1
    harmless(show.session_name(session))
    show.print_json([EVIL])
    printed = capsys.readouterr().out
    assert not any(order in printed for order in ORDERS)
    assert json.loads(printed) == [EVIL]
    with pytest.raises(typer.Exit), reporting():
        raise MlxcacheError(f"made with the model {EVIL}")
    harmless(capsys.readouterr().err)


def test_the_log() -> None:
    out = io.StringIO()
    handler = ConsoleHandler(Console(file=out, force_terminal=True, width=200))
    handler.emit(logging.makeLogRecord({"msg": EVIL + "\nmore", "levelname": "INFO"}))
    harmless(out.getvalue())
    assert len(out.getvalue().splitlines()) == 2


def test_top() -> None:
    row: dict[str, Any] = {
        "id": "r", "session": EVIL, "client": None, "created_at": 0.0, "cached_tokens": 0,
        "restored_tokens": 0, "fed_tokens": 1, "generated_tokens": 1, "status": "done",
        "finish_reason": "stop", "error": None, "progress": None,
        "timing": {"first_token_s": None},
    }  # fmt: skip
    state = LiveState()
    state.apply("requests", {"data": [row]}, 0.0)
    out = io.StringIO()
    picture = render(state, "http://x", width=120, height=None, now=1.0)
    Console(file=out, force_terminal=True, width=120).print(picture)
    harmless(out.getvalue())


def test_labels_and_clients_from_headers() -> None:
    assert read_session_label({"x-session-id": EVIL.replace("\u202e", "")}) == HARMLESS
    assert read_client_name({"user-agent": EVIL.replace("\u202e", "") + "/1"}) == f"{HARMLESS}/1"
