"""Starting, watching and ending servers."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from mlxcache.bench.process import (
    Launch,
    NotStarted,
    Server,
    parse_against,
    running,
)
from tests.bench import fake_server

FAKE = str(fake_server.__file__)


def fake(mode: str = "") -> Launch:
    return Launch("fake", (sys.executable, FAKE, "{port}", mode), foreign=True)


def test_a_server_is_up_within_the_block_and_gone_with_its_children_after(tmp_path: Path) -> None:
    with running(fake("child"), tmp_path, tmp_path, 20) as server:
        assert server.client.chat([{"role": "user", "content": "hi"}], 3).text == "abc"
        log = next(tmp_path.glob("fake-*.log")).read_text()
        child = psutil.Process(int(log.partition("child ")[2].split()[0]))
        assert server.idle_bytes > child.memory_info().rss > 0
        deadline = time.monotonic() + 5
        while not server.peak_bytes and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.peak_bytes > 0
    assert not server.alive()
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_is_ended_where_the_block_raises(tmp_path: Path) -> None:
    seen: list[Server] = []

    def fail() -> None:
        with running(fake(), tmp_path, tmp_path, 20) as server:
            seen.append(server)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not seen[0].alive()


def test_a_server_that_ends_early_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(NotStarted, match=r"(?s)it ended.*no such flag"),
        running(fake("dies"), tmp_path, tmp_path, 20),
    ):
        pass


def test_a_server_that_answers_nothing_is_given_up(tmp_path: Path) -> None:
    with (
        pytest.raises(NotStarted, match="neither /v1/models nor /health"),
        running(fake("deaf"), tmp_path, tmp_path, 1.0),
    ):
        pass


@pytest.mark.parametrize(
    "text", ["serve {model} {port}", "=serve {model} {port}", "a=serve {port}"]
)
def test_what_is_no_name_and_command_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME="):
        parse_against(text)
