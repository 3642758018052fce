"""Prevention of idle sleep on a Mac while requests run, with the macOS command caffeinate.

Source: caffeinate(8). The option `-i` prevents idle sleep, but not sleep of the display or after
closing the lid. The option `-w` ends the command when the server process ends for any reason.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

log = logging.getLogger("mlxcache.engine")

CAFFEINATE = "/usr/bin/caffeinate"

GRACE_S = 30.0
"""Seconds that the command runs after the last request: more than between an agent's turns."""

CHECK_S = 1.0
"""Seconds from the command's start to the check that it still runs.

Also the most seconds to wait for the command's end after SIGTERM.
"""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Process(Protocol):
    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


Spawn = Callable[[Sequence[str]], Process]
CallLater = Callable[[float, Callable[[], None]], Timer]


def spawn(command: Sequence[str]) -> Process:
    """Start a command without input and output. Raises OSError.

    `close_fds` is left out because Python's own descriptors are closed on exec anyway. This allows
    subprocess to use posix_spawn, which on macOS does not copy the page tables of a process with a
    large model.
    """
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, close_fds=False)


class KeepAwake:
    """Owner of the server's one caffeinate process, on a Mac, if `on`. Use on the event loop.

    A command that is missing or fails causes one warning and is not started again. Calls block for
    milliseconds, and for `CHECK_S` seconds if the command ignores SIGTERM.
    """

    def __init__(
        self,
        *,
        on: bool,
        call_later: CallLater,
        spawn: Spawn = spawn,
        platform: str = sys.platform,
    ):
        self._usable = on and platform == "darwin"
        self._call_later = call_later
        self._spawn = spawn
        self._process: Process | None = None
        self._end: Timer | None = None

    def note_running(self, requests: int) -> None:
        """Start the command if `requests` is positive; otherwise end it after `GRACE_S` seconds."""
        if not self._usable:
            return
        if not requests:
            if self._process is not None and self._end is None:
                self._end = self._call_later(GRACE_S, self._release)
            return
        self._cancel_end()
        self._check()
        if self._process is None and self._usable:
            self._start()

    def stop(self) -> None:
        """End the command now and never start it again. May be called again."""
        self._release()
        self._usable = False

    def _cancel_end(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _release(self) -> None:
        self._cancel_end()
        self._check()
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(CHECK_S)
        except subprocess.TimeoutExpired:
            log.warning(
                "caffeinate still runs %g s after SIGTERM; it ends with the server", CHECK_S
            )

    def _start(self) -> None:
        command = (CAFFEINATE, "-i", "-w", str(os.getpid()))
        try:
            self._process = self._spawn(command)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._call_later(CHECK_S, self._check)

    def _check(self) -> None:
        status = self._process.poll() if self._process is not None else None
        if status is None:
            return
        self._process = None
        if status >= 0:
            self._fail(f"it ended with status {status}")

    def _fail(self, why: str) -> None:
        self._usable = False
        log.warning("this Mac may sleep while requests run: %s cannot be used: %s", CAFFEINATE, why)
