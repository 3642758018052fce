"""Start of a server as a process, like a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

READY_SECONDS = 90.0
COMMAND = ("mlxcache.cli.main",)
"""Module, and its first arguments, that serve."""


def default_signals() -> None:
    """Undo in a new process what it inherits: background jobs ignore Ctrl-C, nohup ignores SIGHUP.

    A `preexec_fn` for `subprocess.Popen`. It takes no lock.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Process(Protocol):
    """What `Served` needs of a `subprocess.Popen`."""

    pid: int
    returncode: Any

    @property
    def stdout(self) -> IO[str] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Sequence[str], dict[str, str]], Process]
"""Starts a Python module with its arguments, in an environment."""


def started(command: Sequence[str], environ: dict[str, str]) -> Process:
    """Start a Python module with its arguments, as a user would."""
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )


class Served:
    """A process of `mlxcache serve`. `lines`: its output so far. `home`: its HOME."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        home: Path,
        environ: dict[str, str],
        command: tuple[str, ...] = COMMAND,
        start: Start = started,
    ):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLXCACHE_", "XDG_"))}
        self.home = home
        self.lines: list[str] = []
        self.process = start(
            [*command, "serve", "--port", "0", *arguments],
            kept | {"HOME": str(home), "PYTHONUNBUFFERED": "1"} | environ,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        """All lines so far."""
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = READY_SECONDS) -> re.Match[str]:
        """Wait for the first match of `pattern` in the output.

        Raises AssertionError after `seconds`, or if the process ends without a match.
        """
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.output, re.MULTILINE)) is None:
            if self.process.poll() is not None:
                self._reader.join(5)
                found = re.search(pattern, self.output, re.MULTILINE)
                assert found, f"the server ended: {self.output}"
                return found
            assert time.monotonic() < end, f"no {pattern!r} in: {self.output}"
            time.sleep(0.02)
        return found

    @property
    def url(self) -> str:
        """Address of the server; blocks until it is ready."""
        return self.wait_for(r"^Address +(\S+)$")[1]

    def stop(self, number: int = signal.SIGTERM, seconds: float = 10.0) -> int:
        """Send a signal, wait for the end of the process, and return its exit status."""
        self.process.send_signal(number)
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status


@contextmanager
def served(
    *arguments: str,
    home: Path,
    environ: dict[str, str] | None = None,
    command: tuple[str, ...] = COMMAND,
) -> Iterator[Served]:
    """Start a server on a free port, and kill it at the end if it still runs."""
    with served_by(started, arguments, home, environ or {}, command) as server:
        yield server


@contextmanager
def served_by(
    start: Start,
    arguments: tuple[str, ...],
    home: Path,
    environ: dict[str, str],
    command: tuple[str, ...],
) -> Iterator[Served]:
    """`served`, with a process of `start`."""
    server = Served(arguments, home, environ, command, start)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
