"""The sleep assertion, with a stand-in for pmset."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxcache.bench import outside as module
from mlxcache.bench.context import QUICK, Clock, Context, Subject
from mlxcache.bench.findings import Findings, NotApplicable
from mlxcache.bench.outside import asserting, awake

LINE = '   pid {pid}(caffeinate): [0x1] 00:00:01 PreventUserIdleSystemSleep named: "caffeinate"'


class Server:
    """A server whose request lasts until the assertion was looked at three times."""

    def __init__(self, assertions: Path, holds: bool, lets_go: bool):
        self.client = self.server = self
        self.assertions, self.holds, self.lets_go = assertions, holds, lets_go
        self.looked = threading.Event()

    def chat(self, *_: Any) -> None:
        before = self.assertions.read_text()
        if self.holds:
            self.assertions.write_text(before + LINE.format(pid=42))
        self.looked.wait(1.0)
        if self.lets_go:
            self.assertions.write_text(before)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Play the scenario on a Mac with another caffeinate, and return what was found."""
    assertions, command = tmp_path / "assertions", tmp_path / "pmset"
    assertions.write_text(LINE.format(pid=7) + "\n")
    command.write_text(f"#!/bin/sh\ncat {assertions}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(module, "PATIENCE_S", 0.5)

    def run(holds: bool, lets_go: bool) -> Findings:
        server, found = Server(assertions, holds, lets_go), Findings("awake", "m")

        class Prepared(Context):
            @contextmanager
            def serving(self, *_: str, **variables: str) -> Iterator[Any]:
                yield server

            @property
            def filler(self) -> Any:
                return self

            def text(self, *_: object) -> str:
                return "text"

        subject = Subject(tmp_path, "m", {})
        awake(Prepared(subject, QUICK, Clock(9), tmp_path, 10**9, found, lambda _: None))
        return found

    return run


def test_an_assertion_that_comes_and_goes_is_found(play: Any) -> None:
    """Another program's is not taken for it."""
    assert play(True, True).notes
    assert asserting() == {7}


def test_an_assertion_that_never_comes_is_a_failure(play: Any) -> None:
    """The request ends without one."""
    with pytest.raises(ValueError, match="no caffeinate while"):
        play(False, True)


def test_an_assertion_that_stays_is_a_failure(play: Any) -> None:
    """It would keep the Mac awake for ever."""
    with pytest.raises(ValueError, match="still held"):
        play(True, False)


def test_elsewhere_it_does_not_apply(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux servers do not go to sleep by themselves."""
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(NotApplicable):
        play(True, True)
