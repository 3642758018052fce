"""Output for people: consoles, errors, questions before something is removed, progress bars.

Colours are used on a terminal only; a file or a pipe receives plain lines.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from mlxcache.config import format_size
from mlxcache.config.flags import switch
from mlxcache.errors import ConfigError, MlxcacheError

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that change the direction of text, except newline and tab."""

_WIDTH = 80

Yes = Annotated[
    bool,
    switch("Do not ask first; needed without a terminal.", "--yes", "-y"),
]


def visible(text: str) -> str:
    """Return `text`, of clients or other machines, without what could change a terminal."""
    return UNSEEN.sub("", text)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints lines unchanged: without markup, highlighting or wrapping."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def narrow_console() -> Console:
    """Return a console of at most 80 columns, for text that is wrapped."""
    width = Console().width if Console().is_terminal else _WIDTH
    return Console(highlight=False, markup=False, width=min(width, _WIDTH))


@contextmanager
def reporting() -> Iterator[None]:
    """Report a MlxcacheError as one line on standard error; exit with 2 for ConfigError, else 1."""
    try:
        yield
    except MlxcacheError as error:
        console(stderr=True).print(Text.assemble(("Error: ", "bold red"), visible(str(error))))
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


def require_terminal_or_yes(*, yes: bool) -> None:
    """Raise ConfigError without --yes if there is no terminal to ask at."""
    if not yes and not can_ask():
        raise ConfigError(
            "this command asks before it removes or replaces something, and there is no terminal "
            "to ask at: add --yes"
        )


def confirm(question: str, *, yes: bool) -> None:
    """Ask on standard error, unless --yes was given; raise MlxcacheError if the answer is no."""
    require_terminal_or_yes(yes=yes)
    if not yes and not typer.confirm(question, err=True):
        raise MlxcacheError("Nothing was changed.")


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


# -- progress bars, shown on a terminal only and removed when done ------------------------------

Step = Callable[[int, int], None]
"""Function that is called with the amount done and the total, which is 0 while unknown.

The unit is bytes, tokens or files."""

_TENTH = 0.1


def byte_bar(what: str, *, shown: bool = True) -> AbstractContextManager[Step]:
    """Show a bar of bytes and their speed on standard error; yield a function to update it."""
    from rich.progress import TransferSpeedColumn  # noqa: PLC0415 - takes 20 ms

    return _bar(what, format_size, TransferSpeedColumn(), shown)


def count_bar(what: str, *, shown: bool = True) -> AbstractContextManager[Step]:
    """Show a bar of a count and the time passed, as `byte_bar` does."""
    from rich.progress import TimeElapsedColumn  # noqa: PLC0415 - as above

    return _bar(what, "{:,}".format, TimeElapsedColumn(), shown)


@contextmanager
def _bar(
    what: str, format: Callable[[int], str], last: ProgressColumn, shown: bool
) -> Iterator[Step]:
    from rich.progress import BarColumn, SpinnerColumn, TextColumn  # noqa: PLC0415 - as above

    out = console(stderr=True)
    count = TextColumn("{task.fields[count]}")
    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), count, last)
    with _progress(out, *columns, shown=shown) as bar:
        task = bar.add_task("", total=None, count="")

        def step(done: int, total: int) -> None:
            count = f"{format(done)} of {format(total)}" if total else ""
            bar.update(task, completed=done, total=total or None, count=count)

        yield step


@contextmanager
def loading_bar(console: Console) -> Iterator[Callable[[str, float | None], None]]:
    """Show the progress of loading a model on `console`; yield a function to update it.

    It takes the name of a step and the fraction done, None if unknown. Any thread may call it.
    Without a terminal, a line is printed for each tenth of each step.
    """
    from rich import progress as rich  # noqa: PLC0415 - as above

    shown: tuple[str, int] | None = None
    columns = (
        *(rich.SpinnerColumn(), rich.TextColumn("{task.description}")),
        *(rich.BarColumn(), rich.TaskProgressColumn()),
    )
    with _progress(console, *columns) as bar:
        task = bar.add_task("starting", total=None)

        def step(what: str, share: float | None) -> None:
            nonlocal shown
            if console.is_terminal:
                total = None if share is None else 1.0
                bar.update(task, description=what, total=total, completed=share or 0.0)
                return
            now = (what, 0 if share is None else int(share / _TENTH))
            if now != shown:
                shown = now
                console.print(what if share is None else f"{what} {share:.0%}")

        yield step


def _progress(console: Console, *columns: ProgressColumn, shown: bool = True) -> Progress:
    from rich.progress import Progress  # noqa: PLC0415 - as above

    shown = shown and console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=not shown)
