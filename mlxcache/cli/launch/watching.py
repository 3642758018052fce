"""Progress of long prompts, shown at the terminal of a client that prints nothing meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from mlxcache.cli.launch.setup import Service
from mlxcache.cli.reading import LongReadings, Reading, describe
from mlxcache.cli.remote import Remote
from mlxcache.errors import MlxcacheError

POLL_S = 0.3
_RECENT = 20
_ERASE = "\x1b[1A\r\x1b[2K"
"""Escape sequences that move the cursor up one line and erase it."""


class LineAbove:
    """Line that is rewritten in place while the cursor stays at the start of the next line.

    Output of another program then begins on a line of its own. It is not overwritten, unless `show`
    or `remove` is called after that.
    """

    def __init__(self, out: TextIO):
        self._out = out
        self._text = ""

    @property
    def shown(self) -> bool:
        """True while the line is on the terminal."""
        return bool(self._text)

    def show(self, text: str) -> None:
        """Write `text` in place of the previous text."""
        if text != self._text:
            self._out.write(f"{_ERASE if self._text else ''}{text}\n")
            self._out.flush()
            self._text = text

    def remove(self) -> None:
        """Erase the line from the terminal."""
        if self._text:
            self._out.write(_ERASE)
            self._out.flush()
        self._text = ""

    def leave(self) -> None:
        """Keep the line on the terminal; the next `show` writes a new one."""
        self._text = ""


@contextmanager
def watching(service: Service, *, quiet: bool) -> Iterator[None]:
    """Show the progress of the client's long prompts on standard error while the block runs.

    `quiet` is True if the client prints nothing before its reply. Does nothing if it is False, or
    if standard error is not a terminal.
    """
    if not (quiet and sys.stderr.isatty()):
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(service, sys.stderr, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(POLL_S)


def _watch(service: Service, out: TextIO, ended: threading.Event) -> None:
    """Show the progress of prefills on `out` until `ended` is set or the server does not answer.

    Polls the server every `POLL_S` seconds. Blocks.
    """
    line, long = LineAbove(out), LongReadings()
    remote = Remote(service.url, service.key)
    with suppress(MlxcacheError):
        while not ended.wait(POLL_S):
            running = [one for one in remote.requests(_RECENT) if one["progress"]]
            # of several requests, one may be printed while another is read
            phase = running[0]["progress"]["phase"] if len(running) == 1 else None
            rows = [one for one in running if one["progress"]["phase"] == "prefill"]
            shown = long.update(_reading(one) for one in rows if one["progress"]["done_tokens"])
            if ended.is_set():
                return
            if phase == "prefill" and shown:
                line.show(describe(shown))
            elif phase == "decode":
                line.remove()  # before the client has anything to print
            elif phase is None:
                line.leave()


def _reading(row: dict[str, Any]) -> Reading:
    progress = row["progress"]
    done, total = progress["done_tokens"], progress["total_tokens"]
    return Reading(row["id"], row["session"], done, total, progress.get("left_s"))
