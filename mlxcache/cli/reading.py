"""Progress of long prefills, shown as a line at the server's terminal or as lines in its log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mlxcache.cli.output import name_sender

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine

SHOWN_AFTER_S = 1.0
"""Seconds after which a prefill is shown."""

POLL_S = 0.5
"""Interval in seconds between updates of the line."""

REPORT_S = 15.0
"""Interval in seconds between two log lines about one prompt, without a terminal."""

_MINUTES_FROM_S = 120.0

request_log = logging.getLogger("mlxcache.requests")


@dataclass(frozen=True, slots=True)
class Reading:
    """Progress of the prompt of request `id` during prefill.

    `sender`: its session or client, see `name_sender`. `done` of `total` tokens are in the cache.
    `left_s` is the estimated time for the rest in seconds, or None if it is unknown.
    """

    id: str
    sender: str
    done: int
    total: int
    left_s: float | None


def describe(readings: Sequence[Reading]) -> str:
    """Format the progress of prompts as one line of text.

    The tokens of several prompts are added up; the time left is the longest of theirs.
    """
    done, total = (sum(getattr(one, name) for one in readings) for name in ("done", "total"))
    what = "the prompt" if len(readings) == 1 else f"{len(readings)} prompts"
    left = max((one.left_s for one in readings if one.left_s is not None), default=None)
    text = f"reading {what}: {done:,} of {total:,}"
    return text if left is None else f"{text}, about {_round_time(left)} left"


def _round_time(seconds: float) -> str:
    if seconds >= _MINUTES_FROM_S:
        return f"{round(seconds / 60)} min"
    return f"{max(1, round(seconds))} s"


class LongReadings:
    """Filter for prompts whose prefill takes long, which also counts down their time left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen: dict[str, tuple[float, Reading, float]] = {}

    def update(self, readings: Iterable[Reading]) -> list[Reading]:
        """Return those of `readings` whose prefill has taken at least `SHOWN_AFTER_S` seconds.

        The time counts from the first call that was given a reading of the prompt. In each returned
        reading, `left_s` is reduced by the seconds since the prompt's figures last changed. Prompts
        that are not in `readings` are forgotten.
        """
        now, seen, shown = self._clock(), self._seen, []
        self._seen = {}
        for one in readings:
            began, before, at = seen.get(one.id, (now, one, now))
            if before != one:
                before, at = one, now
            self._seen[one.id] = began, before, at
            if now - began >= SHOWN_AFTER_S:
                shown.append(_counted_down(one, now - at))
        return shown


def _counted_down(one: Reading, passed: float) -> Reading:
    left = None if one.left_s is None else max(0.0, one.left_s - passed)
    return Reading(one.id, one.sender, one.done, one.total, left)


class Reports:
    """Schedule of log lines about prompts, for a server without a terminal: one per `REPORT_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._last: dict[str, float] = {}

    def due(self, readings: Iterable[Reading]) -> list[Reading]:
        """Return those of `readings` that need a log line now, and count these lines as written.

        A prompt needs a line `REPORT_S` seconds after the first call that was given a reading of
        it, and again `REPORT_S` seconds after each line. Prompts that are not in `readings` are
        forgotten.
        """
        now, last, found = self._clock(), self._last, []
        self._last = {}
        for one in readings:
            self._last[one.id] = at = last.get(one.id, now)
            if now - at >= REPORT_S:
                self._last[one.id] = now
                found.append(one)
        return found


def can_rewrite(console: Console) -> bool:
    """Return whether a line on `console` can be rewritten in place."""
    return console.is_terminal and not console.is_dumb_terminal


class LastLine:
    """Last line of a terminal, below all other output of `console`. It is rewritten in place."""

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._text = ""

    def show(self, text: str) -> None:
        """Show `text`, cut to the width of the terminal. Empty text removes the line."""
        if text == self._text:
            return
        self._text = text
        if not text:
            self.remove()
            return
        line = Text(text, "cyan", no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(line, console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            self._console.show_cursor(True)  # it stays visible if the process is stopped or killed
        self._live.update(line, refresh=True)

    def remove(self) -> None:
        """Remove the line from the terminal, if it is shown."""
        if self._live is not None:
            self._live.stop()
        self._live = None


async def show_readings(engines: Sequence[Engine], console: Console) -> None:
    """Show the progress of long prefills of all `engines` until cancelled.

    On a terminal it is one line that is rewritten in place, which also shows models being loaded.
    Otherwise a line about each prompt is logged every `REPORT_S` seconds.
    """
    terminal = can_rewrite(console)
    long, reports, line = LongReadings(), Reports(), LastLine(console)
    try:
        while True:
            shown = long.update(one for engine in engines for one in _readings(engine))
            if terminal:
                loads = [f"loading {x.label}: {x.load_share:.0%}" for x in engines if x.load_share]
                line.show("; ".join([*loads, *([describe(shown)] if shown else [])]))
            for one in [] if terminal else reports.due(shown):
                request_log.info("%s  %s", one.sender, describe([one]))
            await asyncio.sleep(POLL_S)
    finally:
        line.remove()


def _readings(engine: Engine) -> list[Reading]:
    return [
        Reading(
            one.id,
            name_sender(one.session, one.client),
            min(one.prompt_tokens, one.cached_tokens + one.fed_tokens),
            one.prompt_tokens,
            engine.prefill_left_s(one),
        )
        for one in engine.running()
        if one.status == "prefill" and (one.cached_tokens or one.fed_tokens)
    ]
