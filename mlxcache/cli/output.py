"""Output for people: consoles, errors, the log and its line per request.

Colours are used on a terminal only; a file or a pipe receives plain lines.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from mlxcache.errors import ConfigError, MlxcacheError

if TYPE_CHECKING:
    from mlxcache.types import RequestRecord

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that change the direction of text, except newline and tab."""


def visible(text: str) -> str:
    """Return `text` without the characters in `UNSEEN`, which could change what a terminal shows.

    Use it for text that comes from clients or from files of other machines.
    """
    return UNSEEN.sub("", text)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints lines unchanged: without markup, highlighting or wrapping."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def reporting() -> Iterator[None]:
    """Report a MlxcacheError as one line on standard error and exit.

    The exit status is 2 for a ConfigError, else 1.
    """
    try:
        yield
    except MlxcacheError as error:
        console(stderr=True).print(Text.assemble(("Error: ", "bold red"), visible(str(error))))
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


class ConsoleHandler(logging.Handler):
    """Log handler that prints on a rich console, so that log lines do not break a progress bar."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print `record`. The level is named for warnings and errors only."""
        style = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}.get(record.levelname, "")
        text = visible(self.format(record))
        if style:
            time, _, rest = text.partition(" ")
            text = f"{time} {record.levelname.lower()}: {rest}"
        self._console.print(Text(text, style))


def configure_logging(console: Console, level: str) -> None:
    """Print log records on `console`: mlxcache's from `level` on, others from warning on."""
    logging.basicConfig(level=logging.WARNING, handlers=[ConsoleHandler(console)], force=True)
    logging.getLogger("mlxcache").setLevel(level.upper())
    # its warnings are about what unknown programs send to the port
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


def log_line(record: RequestRecord, *, several: bool = False) -> str:
    """Format the record of a finished request as one log line.

    The line has the session, token counts, the time to the first token, the speed, how the request
    ended, and the lost prefix if there is one. With `several` models, it has the model's name too.
    """
    first, decode = record.timing.get("first_token_s"), record.timing.get("decode_s")
    # decode_s begins with the first token, so it measures the steps after it
    steps = record.generated_tokens - 1
    speed = f"{steps / decode:.1f} tok/s" if decode and steps > 0 else "- tok/s"
    end = record.finish_reason if record.status == "done" else record.status
    restored = f" ({record.restored_tokens} from disk)" if record.restored_tokens else ""
    drafted, accepted = record.drafted_tokens, record.accepted_tokens
    fields = [
        name_sender(record.session, record.client),
        *((record.model,) if several and record.model else ()),
        f"prompt {record.prompt_tokens}",
        f"cached {record.cached_tokens}" + restored,
        f"fed {record.fed_tokens}",
        f"first token {'-' if first is None else f'{first:.2f} s'}",
        speed,
        f"generated {record.generated_tokens}"
        + (f" ({accepted} of {drafted} drafts accepted{_saved(record)})" if drafted else ""),
        str(end),
    ]
    if record.lost:
        fields.append(_lost(record.lost))
    if record.error:
        fields.append(" ".join(record.error.split()))
    return "  ".join(fields)


def _saved(record: RequestRecord) -> str:
    """Format how many passes checked a reply's drafted tokens, and the time saved or lost."""
    sign = "lost" if record.guess_saved_s < 0 else "saved"
    return f" in {record.guess_passes} passes, {abs(record.guess_saved_s):.2f} s {sign}"


def name_sender(session: str | None, client: str | None) -> str:
    """Name the origin of a request for the log: `session` and the end of its label, or `client`.

    The argument `session` is the label of the request's session. If it is None, `client`, the
    name of the client program, is used. If both are None, the result is `session -`.
    """
    if session or not client:
        return f"session {(session or '-')[-8:]}"
    return f"client {client}"


def _lost(lost: dict[str, Any]) -> str:
    """Format the size and cause of a prefix loss, the field `lost` in `GET /v1/requests`.

    Text of the prompt is left out, because it must not be logged.
    """
    if not lost["lost_tokens"]:
        return str(lost["reason"])
    why = f"{lost['reason']}: {lost['cause']}"
    return f"lost {lost['lost_tokens']} ({why}, about {lost['lost_s']:.1f} s)"
