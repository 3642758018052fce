"""The line that tells how far a long prompt is computed: at a terminal, and in a log."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from typing import Any

import pytest
from rich.console import Console

from mlxcache.cli import log
from mlxcache.cli.log import (
    ConsoleHandler,
    LastLine,
    LongReadings,
    Reading,
    describe,
    show_readings,
)
from mlxcache.types import RequestRecord


def one(done: int = 9_929, left_s: float | None = 40.2, id: str = "a") -> Reading:
    return Reading(id, "ses_00001234abcd", done, 29_863, left_s)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("readings", "text"),
    [
        ([one()], "reading the prompt: 9,929 of 29,863, about 40 s left"),
        ([one(left_s=None)], "reading the prompt: 9,929 of 29,863"),
        ([one(left_s=0.0)], "reading the prompt: 9,929 of 29,863, about 1 s left"),
        ([one(left_s=190.0)], "reading the prompt: 9,929 of 29,863, about 3 min left"),
        ([one(), one(71, 55.0, "b")], "reading 2 prompts: 10,000 of 59,726, about 55 s left"),
    ],
)
def test_the_line_has_tokens_and_time(readings: list[Reading], text: str) -> None:
    """Several prompts are added up."""
    assert describe(readings) == text


def test_a_short_prefill_is_not_shown_and_the_time_is_counted_down() -> None:
    """Until the next chunk brings a new estimate."""
    clock = Clock()
    long = LongReadings(clock)
    assert long.update([one(left_s=40.0)]) == []
    clock.now += 2
    assert long.update([one(left_s=40.0)]) == [one(left_s=38.0)]
    clock.now += 50
    assert long.update([one(left_s=40.0)]) == [one(left_s=0.0)]
    assert long.update([one(12_000, 33.0)]) == [one(12_000, 33.0)]
    assert long.update([]) == []
    assert long.update([one(12_000, 33.0)]) == []  # another one begins


def test_the_log_gets_a_line_now_and_then() -> None:
    """The first after `REPORT_S`, then one per `REPORT_S`."""
    clock = Clock()
    long = LongReadings(clock)
    lines = []
    for _ in range(50):
        lines += long.due(long.update([one()]))
        clock.now += 1
    assert len(lines) == 3


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)


def test_the_line_is_rewritten_in_place_below_the_log() -> None:
    """Log lines stay whole above it, it never wraps, and nothing of it is left at the end."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, color_system=None, soft_wrap=True)
    log = ConsoleHandler(console)
    line = LastLine(console)
    line.show(describe([one()]))
    first = out.getvalue()
    assert "\n" not in first
    assert plain(first).startswith("reading the prompt: 9,929 of 29,863, ab")
    log.emit(logging.LogRecord("mlxcache", logging.INFO, "", 0, "a request " * 6, (), None))
    line.show(describe([one(12_000)]))
    line.show(describe([one(12_000)]))
    assert out.getvalue().count("12,000") == 1  # the same text is not written again
    line.show("")
    screen = Screen(out.getvalue(), width=40)
    assert "a request a request" in screen.text
    assert "reading" not in screen.text
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")


class Screen:
    """The lines that a terminal shows, for the control codes that Rich writes for a live line."""

    def __init__(self, output: str, width: int):
        self.lines, row, column = [""], 0, 0
        for code in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.|\n", output):
            if code == "\n":
                row, column = row + 1, 0
                self.lines += [""] * (row + 1 - len(self.lines))
            elif code == "\r":
                column = 0
            elif code == "\x1b[2K":
                self.lines[row] = ""
            elif code.startswith("\x1b["):
                row -= int(code[2:-1]) if code.endswith("A") else 0
            else:
                line = self.lines[row].ljust(column)
                self.lines[row] = line[:column] + code + line[column + 1 :]
                column += 1

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Engine:
    """An engine with one request, which feeds 1,000 tokens between two looks at it."""

    load_share: float | None = None

    def __init__(self) -> None:
        self.record = RequestRecord(
            "a", "label", "chat", None, "prefill", 0.0, prompt_tokens=30_000
        )
        self.record.session_id = "ses_00001234abcd"
        self.replying = asyncio.Event()

    def running(self) -> list[RequestRecord]:
        if self.record.fed_tokens == 30_000:
            self.record.status = "decode"
            self.replying.set()
        self.record.fed_tokens = min(30_000, self.record.fed_tokens + 1_000)
        return [self.record]

    def prefill_left_s(self, record: RequestRecord) -> float | None:
        return (30_000 - record.fed_tokens) / 100 if record.fed_tokens > 1_000 else None


@pytest.mark.parametrize("kind", ["terminal", "dumb terminal", "pipe"])
async def test_a_server_shows_how_far_a_prompt_is(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in place at a terminal, gone when the reply begins; else a few lines of the log.

    A dumb terminal cannot rewrite a line.
    """
    terminal = kind == "terminal"
    monkeypatch.setenv("TERM", "dumb" if kind == "dumb terminal" else "xterm")
    for name, value in (("SHOWN_AFTER_S", 0.01), ("POLL_S", 0.005), ("REPORT_S", 0.04)):
        monkeypatch.setattr(log, name, value)
    out = io.StringIO()
    console = Console(file=out, force_terminal=kind != "pipe", width=80, color_system=None)
    engine: Any = Engine()
    with caplog.at_level(logging.INFO, "mlxcache"):
        showing = asyncio.create_task(show_readings([engine], console))
        await engine.replying.wait()
        await asyncio.sleep(0.02)
        if terminal:
            assert "reading" not in Screen(out.getvalue(), 80).text
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
    lines = [one.getMessage() for one in caplog.records]
    if terminal:
        assert re.search(r"reading the prompt: \d+,000 of 30,000, about \d+ s left", out.getvalue())
        assert lines == []
    else:
        assert out.getvalue() == ""
        assert 1 <= len(lines) < 8
        assert re.fullmatch(
            r"ses_00001234abcd  reading the prompt: \d+,000 of 30,000, about \d+ (s|min) left",
            lines[0],
        )
