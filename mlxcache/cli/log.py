"""What a running server prints: its log, a line per request, and the progress of long prefills."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mlxcache.cli.output import visible

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine
    from mlxcache.types import RequestRecord

SHOWN_AFTER_S = 1.0
"""Seconds after which a prefill is shown."""

POLL_S = 0.5

REPORT_S = 15.0
"""Seconds between two log lines about one prompt, without a terminal."""

_MINUTES_FROM_S = 120.0

request_log = logging.getLogger("mlxcache.requests")


class ConsoleHandler(logging.Handler):
    """Log handler that prints on a rich console, so that log lines do not break a progress bar."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        style = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}.get(record.levelname, "")
        text = visible(self.format(record))
        if style:
            at, _, rest = text.partition(" ")
            text = f"{at} {record.levelname.lower()}: {rest}"
        self._console.print(Text(text, style))


def configure_logging(console: Console, level: str) -> None:
    """Print log records on `console`: mlxcache's from `level` on, others from warning on."""
    logging.basicConfig(level=logging.WARNING, handlers=[ConsoleHandler(console)], force=True)
    logging.getLogger("mlxcache").setLevel(level.upper())
    # its warnings are about what unknown programs send to the port
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


# -- a line per request ------------------------------------------------------------------------


def log_line(record: RequestRecord, *, several: bool = False) -> str:
    """Format a finished request as one log line; with `several` models, with the model's name."""
    first, decode = record.timing.get("first_token_s"), record.timing.get("decode_s")
    # decode_s begins with the first token, so it measures the steps after it
    steps = record.generated_tokens - 1
    end = record.finish_reason if record.status == "done" else record.status
    if end == "stop_sequence" and record.api != "messages":
        end = "stop"  # as the reply says
    restored = f" ({record.restored_tokens} from disk)" if record.restored_tokens else ""
    fields = [
        name_sender(record.session_id, record.client),
        *((record.model,) if several and record.model else ()),
        f"prompt {record.prompt_tokens}",
        f"cached {record.cached_tokens}" + restored,
        f"fed {record.fed_tokens}",
        f"first token {'-' if first is None else f'{first:.2f} s'}",
        f"{steps / decode:.1f} tok/s" if decode and steps > 0 else "- tok/s",
        f"generated {record.generated_tokens}" + _drafts(record),
        str(end),
    ]
    if record.lost:
        fields.append(_lost(record.lost))
    if record.error:
        fields.append(" ".join(record.error.split()))
    return "  ".join(fields)


def _drafts(record: RequestRecord) -> str:
    if not record.drafted_tokens:
        return ""
    sign = "lost" if record.guess_saved_s < 0 else "saved"
    saved = f"in {record.guess_passes} passes, {abs(record.guess_saved_s):.2f} s {sign}"
    return f" ({record.accepted_tokens} of {record.drafted_tokens} drafts accepted {saved})"


def name_sender(session: str | None, client: str | None) -> str:
    """Name the origin of a request: the id of its session if it has a label, or else its client."""
    return session or (f"client {client}" if client else "-")


def _lost(lost: dict[str, Any]) -> str:
    """Format a prefix loss, without text of the prompt, which must not be logged."""
    if not lost["lost_tokens"]:
        return str(lost["reason"])
    why = f"{lost['reason']}: {lost['cause']}"
    return f"lost {lost['lost_tokens']} ({why}, about {lost['lost_s']:.1f} s)"


# -- the progress of long prefills -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """Progress of the prompt of request `id`: `done` of `total` tokens are in the cache."""

    id: str
    sender: str
    done: int
    total: int
    left_s: float | None


def describe(readings: Sequence[Reading]) -> str:
    """Format the sum of the prompts' tokens, and the longest of their times left, as one line."""
    done, total = sum(one.done for one in readings), sum(one.total for one in readings)
    what = "the prompt" if len(readings) == 1 else f"{len(readings)} prompts"
    left = max((one.left_s for one in readings if one.left_s is not None), default=None)
    text = f"reading {what}: {done:,} of {total:,}"
    return text if left is None else f"{text}, about {_round_time(left)} left"


def _round_time(seconds: float) -> str:
    if seconds >= _MINUTES_FROM_S:
        return f"{round(seconds / 60)} min"
    return f"{max(1, round(seconds))} s"


@dataclass(slots=True)
class _Seen:
    """A prompt that is read, and the times of its begin, its last change and its last log line."""

    began: float
    reading: Reading
    changed: float
    reported: float


class LongReadings:
    """Filter for prompts whose prefill takes long, which also counts down their time left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def update(self, readings: Iterable[Reading]) -> list[Reading]:
        """Return those of `readings` whose prefill has taken at least `SHOWN_AFTER_S` seconds.

        In each, `left_s` is reduced by the seconds since the prompt's figures last changed. Prompts
        that are not in `readings` are forgotten.
        """
        now, before, shown = self._clock(), self._seen, []
        self._seen = {}
        for one in readings:
            seen = before.get(one.id) or _Seen(now, one, now, now)
            if seen.reading != one:
                seen = replace(seen, reading=one, changed=now)
            self._seen[one.id] = seen
            if now - seen.began >= SHOWN_AFTER_S:
                left = None if one.left_s is None else max(0.0, one.left_s - (now - seen.changed))
                shown.append(replace(one, left_s=left))
        return shown

    def due(self, shown: Iterable[Reading]) -> list[Reading]:
        """Return those of the `shown` whose last line in the log is `REPORT_S` ago, or their begin.

        The returned ones count as reported.
        """
        now = self._clock()
        found = [one for one in shown if now - self._seen[one.id].reported >= REPORT_S]
        self._seen |= {one.id: replace(self._seen[one.id], reported=now) for one in found}
        return found


class LastLine:
    """Last line of a terminal, below all other output of `console`. It is rewritten in place."""

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._text = ""

    def show(self, text: str) -> None:
        """Show `text`, cut to the width of the terminal. Empty text removes the line."""
        if not text:
            self.remove()
        if text == self._text:
            return
        self._text = text
        line = Text(text, "cyan", no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(line, console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            self._console.show_cursor(True)  # it stays visible if the process is stopped or killed
        self._live.update(line, refresh=True)

    def remove(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live, self._text = None, ""


async def show_readings(engines: Sequence[Engine], console: Console) -> None:
    """Show the progress of long prefills of all `engines` until cancelled.

    On a terminal it is one line that is rewritten in place, which also shows models being loaded.
    Otherwise a line about each prompt is logged every `REPORT_S` seconds.
    """
    terminal = console.is_terminal and not console.is_dumb_terminal
    long, line = LongReadings(), LastLine(console)
    try:
        while True:
            shown = long.update(one for engine in engines for one in _readings(engine))
            if terminal:
                loads = [f"loading {x.label}: {x.load_share:.0%}" for x in engines if x.load_share]
                line.show("; ".join([*loads, *([describe(shown)] if shown else [])]))
            for one in [] if terminal else long.due(shown):
                request_log.info("%s  %s", one.sender, describe([one]))
            await asyncio.sleep(POLL_S)
    finally:
        line.remove()


def _readings(engine: Engine) -> list[Reading]:
    return [
        Reading(
            one.id,
            name_sender(one.session_id, one.client),
            min(one.prompt_tokens, one.cached_tokens + one.fed_tokens),
            one.prompt_tokens,
            engine.prefill_left_s(one),
        )
        for one in engine.running()
        if one.status == "prefill" and (one.cached_tokens or one.fed_tokens)
    ]
