"""Output for people: consoles, errors, and questions before something is removed or replaced.

Colours are used on a terminal only; a file or a pipe receives plain lines.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mlxcache.errors import ConfigError, MlxcacheError

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that change the direction of text, except newline and tab."""

_WIDTH = 80

Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", metavar="", help="Do not ask first; needed without a terminal."),
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
