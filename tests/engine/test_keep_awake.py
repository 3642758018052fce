"""A Mac is kept awake while requests run, by one command that ends with them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxcache.engine import keep_awake
from mlxcache.engine.engine import Engine
from mlxcache.engine.keep_awake import CAFFEINATE, CHECK_S, GRACE_S, KeepAwake, Process, spawn
from mlxcache.types import Job, Prompt, token_ids
from tests.engine.running import started

COMMAND = (CAFFEINATE, "-i", "-w", str(os.getpid()))


class Command:
    """A command that runs until it is terminated or given a `status`."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.stubborn = False

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        if not self.stubborn:
            self.status = -15

    def wait(self, timeout: float | None = None) -> int:
        if self.status is None:
            raise subprocess.TimeoutExpired("caffeinate", timeout or 0.0)
        return self.status


class Due:
    """A call at a time of the fake clock."""

    def __init__(self, at: float, action: Callable[[], None]):
        self.at, self.action, self.cancelled = at, action, False

    def cancel(self) -> None:
        self.cancelled = True


class Mac:
    """A Mac with a fake clock, and all commands that were started on it."""

    def __init__(self, *, on: bool = True, platform: str = "darwin", fails: str | None = None):
        self.now = 0.0
        self.due: list[Due] = []
        self.started: list[tuple[str, ...]] = []
        self.commands: list[Command] = []
        self.fails = fails
        self.awake = KeepAwake(
            on=on, call_later=self.call_later, spawn=self.spawn, platform=platform
        )

    def call_later(self, seconds: float, action: Callable[[], None]) -> Due:
        self.due.append(Due(self.now + seconds, action))
        return self.due[-1]

    def spawn(self, command: Sequence[str]) -> Process:
        self.started.append(tuple(command))
        if self.fails is not None:
            raise FileNotFoundError(2, self.fails)
        self.commands.append(Command())
        return self.commands[-1]

    def wait(self, seconds: float) -> None:
        """Let the clock go on, and make the calls that are due."""
        self.now += seconds
        due, self.due = self.due, [one for one in self.due if one.at > self.now]
        for one in due:
            if one.at <= self.now and not one.cancelled:
                one.action()

    @property
    def held(self) -> bool:
        """True while a command keeps this Mac awake."""
        return any(one.status is None for one in self.commands)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_one_command_runs_while_requests_do_and_ends_a_little_later() -> None:
    """It ends with this process at the latest, and lets the display sleep."""
    mac = Mac()
    for running in (1, 2, 1):
        mac.awake.note_running(running)
        mac.wait(100)
        assert mac.held
    mac.awake.note_running(0)
    mac.wait(GRACE_S - 1)
    assert mac.held
    mac.wait(1)
    assert not mac.held
    assert mac.started == [COMMAND]
    assert "-d" not in mac.started[0]


def test_turns_of_an_agent_do_not_start_it_again() -> None:
    mac = Mac()
    for _ in range(5):
        mac.awake.note_running(1)
        mac.wait(5)
        mac.awake.note_running(0)
        mac.wait(GRACE_S - 1)
        assert mac.held
    mac.wait(1)
    assert not mac.held
    assert len(mac.started) == 1
    mac.awake.note_running(1)
    assert mac.held
    assert len(mac.started) == 2


@pytest.mark.parametrize(("on", "platform"), [(False, "darwin"), (True, "linux")])
def test_nothing_happens_if_switched_off_or_elsewhere(
    on: bool, platform: str, caplog: pytest.LogCaptureFixture
) -> None:
    mac = Mac(on=on, platform=platform)
    mac.awake.note_running(1)
    mac.wait(2)
    mac.awake.stop()
    assert (mac.started, mac.due, caplog.records) == ([], [], [])


@pytest.mark.parametrize(
    ("fails", "words"), [("No such file or directory", "No such file"), (None, "status 64")]
)
def test_a_command_that_cannot_be_used_causes_one_warning(
    fails: str | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Soon after its start, while the request may run for an hour."""
    mac = Mac(fails=fails)
    mac.awake.note_running(1)
    for command in mac.commands:
        command.status = 64
    mac.wait(CHECK_S)
    (said,) = warnings(caplog)
    assert "may sleep" in said
    assert words in said
    for running in (2, 0, 1):
        mac.awake.note_running(running)
        mac.wait(GRACE_S)
    assert len(mac.started) == len(warnings(caplog)) == 1


def test_a_command_that_the_user_ended_starts_again_with_the_next_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As `killall caffeinate` does, which may have been for another one."""
    mac = Mac()
    mac.awake.note_running(1)
    mac.commands[0].status = -15
    mac.awake.note_running(2)
    assert mac.held
    assert len(mac.started) == 2
    assert warnings(caplog) == []


def test_stopping_ends_it_at_once_and_for_good() -> None:
    mac = Mac()
    mac.awake.note_running(2)
    mac.awake.stop()
    assert not mac.held
    mac.awake.note_running(1)
    mac.awake.note_running(0)
    mac.awake.stop()
    assert len(mac.started) == 1


def test_a_command_that_does_not_end_stops_no_server(caplog: pytest.LogCaptureFixture) -> None:
    """It ends with the process, by `-w`."""
    mac = Mac()
    mac.awake.note_running(1)
    mac.commands[0].stubborn = True
    mac.awake.stop()
    assert len(warnings(caplog)) == 1


async def test_an_engine_holds_it_from_the_first_request_to_the_end(toy, tmp_path: Path) -> None:
    mac = Mac()
    async with started(toy("llama"), tmp_path, make=partial(Engine, awake=mac.awake)) as engine:
        assert not mac.held
        streams = [
            await engine.submit(Job(id, Prompt(token_ids(range(at, at + 40))), max_tokens=4))
            for id, at in (("a", 10), ("b", 60))
        ]
        assert mac.held
        for stream in streams:
            async for _ in stream:
                assert mac.held
        assert [one.at for one in mac.due if not one.cancelled] == [CHECK_S, GRACE_S]
    assert not mac.held
    assert mac.started == [COMMAND]


def really_awake(processes: list[Any], platform: str) -> KeepAwake:
    def begin(command: Sequence[str]) -> Process:
        processes.append(spawn(command))
        return processes[-1]

    return KeepAwake(on=True, call_later=Mac().call_later, spawn=begin, platform=platform)


def test_a_real_command_is_started_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script stands for caffeinate, which only a Mac has."""
    script, note = tmp_path / "caffeinate", tmp_path / "note"
    script.write_text(f'#!/bin/sh\necho "$@" > {note}.new && mv {note}.new {note}\nexec sleep 60\n')
    script.chmod(0o755)
    monkeypatch.setattr(keep_awake, "CAFFEINATE", str(script))
    processes: list[Any] = []
    awake = really_awake(processes, "darwin")
    awake.note_running(1)
    while not note.exists():
        assert processes[0].poll() is None
    assert note.read_text().split() == ["-i", "-w", str(os.getpid())]
    awake.stop()
    assert processes[0].returncode == -15


@pytest.mark.skipif(sys.platform != "darwin", reason="caffeinate is a command of macOS")
def test_a_mac_has_the_command_and_notes_what_it_asks_for() -> None:
    processes: list[Any] = []
    awake = really_awake(processes, sys.platform)
    awake.note_running(1)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            processes[0].wait(CHECK_S)
        listed = subprocess.check_output(["/usr/bin/pmset", "-g", "assertions"], text=True)
        assert "(caffeinate)" in listed
    finally:
        awake.stop()
