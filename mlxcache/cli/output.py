"""What the person at the terminal sees: progress, a line per request, errors.

A terminal gets colour and a moving bar; a file or a pipe gets plain lines.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.text import Text

from mlxcache.errors import ConfigError, MlxcacheError
from mlxcache.types import RequestRecord

_STEP = 0.1

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys or that turn lines around; not ends of lines, nor tabs."""


def visible(text: str) -> str:
    """`text`, which a client or a stranger's file may have chosen, as a terminal only shows it."""
    return UNSEEN.sub("", text)


def console(*, stderr: bool = False) -> Console:
    """A console for lines that are meant to be read as they are."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def reporting() -> Iterator[None]:
    """Turn what mlxcache raises on purpose into a sentence and an exit status (2: wrong usage)."""
    try:
        yield
    except MlxcacheError as error:
        console(stderr=True).print(Text.assemble(("Error: ", "bold red"), visible(str(error))))
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


class Loading:
    """Shows what is being loaded; call it with what and the share done, from any thread.

    A share is from 0 to 1, or None where nobody knows.
    """

    def __init__(self, console: Console):
        self._console = console
        self._shown: tuple[str, int] | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, what: str, share: float | None) -> None:
        """Show one step; on a plain output at most one line per tenth."""
        if self._console.is_terminal:
            total = None if share is None else 1.0
            self._bar.update(self._task, description=what, total=total, completed=share or 0.0)
            return
        step = (what, 0 if share is None else int(share / _STEP))
        if step != self._shown:
            self._shown = step
            percent = "" if share is None else f" {share:.0%}"
            self._console.print(f"{what}{percent}")


class ConsoleHandler(logging.Handler):
    """Log records as lines of the console, so that a bar and a log share one terminal."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print `record`; a warning or worse says so."""
        style = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}.get(record.levelname, "")
        text = visible(self.format(record))
        if style:
            time, _, rest = text.partition(" ")
            text = f"{time} {record.levelname.lower()}: {rest}"
        self._console.print(Text(text, style))


def configure_logging(console: Console, level: str) -> None:
    """Log mlxcache from `level` on, and warnings of everything else."""
    logging.basicConfig(level=logging.WARNING, handlers=[ConsoleHandler(console)], force=True)
    logging.getLogger("mlxcache").setLevel(level.upper())
    # Its warnings are of what strangers send to the port, and their advice is for programmers.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


def log_line(record: RequestRecord) -> str:
    """One request in one line: who, what was reused, how fast, how it ended."""
    first, decode = record.timing.get("first_token_s"), record.timing.get("decode_s")
    # decode_s begins with the first token, so it measures the steps after it
    steps = record.generated_tokens - 1
    speed = f"{steps / decode:.1f} tok/s" if decode and steps > 0 else "- tok/s"
    end = record.finish_reason if record.status == "done" else record.status
    restored = f" ({record.restored_tokens} from disk)" if record.restored_tokens else ""
    drafted, accepted = record.drafted_tokens, record.accepted_tokens
    fields = [
        f"session {(record.session or '-')[-8:]}",
        f"prompt {record.prompt_tokens}",
        f"cached {record.cached_tokens}" + restored,
        f"fed {record.fed_tokens}",
        f"first token {'-' if first is None else f'{first:.2f} s'}",
        speed,
        f"generated {record.generated_tokens}"
        + (f" ({accepted} of {drafted} drafts accepted)" if drafted else ""),
        str(end),
    ]
    if record.lost:
        fields.append(_lost(record.lost))
    if record.error:
        fields.append(" ".join(record.error.split()))
    return "  ".join(fields)


def _lost(lost: dict[str, Any]) -> str:
    """Why a prefix was lost; nothing of its text, for logs are read by others too."""
    if not lost["lost_tokens"]:
        return str(lost["reason"])
    why = f"{lost['reason']}: {lost['cause']}"
    return f"lost {lost['lost_tokens']} ({why}, about {lost['lost_s']:.1f} s)"
