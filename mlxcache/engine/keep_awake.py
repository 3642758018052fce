"""Keep a Mac from idle sleep while requests run, with macOS's own command caffeinate.

Source: caffeinate(8). `-i` prevents idle sleep, but not that of the display or of a closed lid;
`-w` ends the command with the server, however that ends.
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
"""Time after the last request: the turns of an agent are closer together than this."""

CHECK_S = 1.0
"""Time after the start in which a command that cannot work has ended."""


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Cancel the call."""


class Process(Protocol):
    """A command that was started."""

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the command runs."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""


Spawn = Callable[[Sequence[str]], Process]
CallLater = Callable[[float, Callable[[], None]], Timer]


def spawn(command: Sequence[str]) -> Process:
    """Start a command without input and output. Raises OSError.

    Python's own descriptors are closed on exec, so `close_fds` is left out: subprocess can then use
    posix_spawn, which on macOS copies no page tables of a process with a large model.
    """
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, close_fds=False)


class KeepAwake:
    """The one caffeinate of a server. Use on the event loop; calls block for milliseconds.

    `call_later` is that of the event loop. Does nothing unless `on` and on a Mac. A command that is
    missing or fails causes one warning, and is not started again.
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
        """Start the command if requests run; end it `GRACE_S` after the last one."""
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
        """End the command now and for good. May be called again."""
        self._release()
        self._usable = False

    def _cancel_end(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _release(self) -> None:
        """End the command, and wait for its end."""
        self._cancel_end()
        self._check()
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(CHECK_S)
        except subprocess.TimeoutExpired:
            log.warning("caffeinate has not ended; it ends with the server")

    def _start(self) -> None:
        command = (CAFFEINATE, "-i", "-w", str(os.getpid()))
        try:
            self._process = self._spawn(command)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._call_later(CHECK_S, self._check)

    def _check(self) -> None:
        """Handle a command that ended by itself; after a signal it may be started again."""
        status = self._process.poll() if self._process is not None else None
        if status is None:
            return
        self._process = None
        if status >= 0:
            self._fail(f"it ended with status {status}")

    def _fail(self, why: str) -> None:
        self._usable = False
        log.warning("this Mac may sleep while requests run: %s cannot be used: %s", CAFFEINATE, why)
