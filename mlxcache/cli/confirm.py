"""Confirmation of commands that remove or replace something, by a question or by --yes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mlxcache.errors import ConfigError, MlxcacheError

Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", metavar="", help="Do not ask first; needed without a terminal."),
]


def require_terminal_or_yes(*, yes: bool) -> None:
    """Raise ConfigError if confirmation is needed but no terminal is connected.

    `yes`: the command was given --yes, so no confirmation is needed.
    """
    if not yes and not can_ask():
        raise ConfigError(
            "this command asks before it removes or replaces something, and there is no terminal "
            "to ask at: add --yes"
        )


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation on standard error, and return if the answer is yes. Blocks.

    With `yes` (the command was given --yes), returns without asking. Raises ConfigError without a
    terminal, and MlxcacheError for another answer.
    """
    require_terminal_or_yes(yes=yes)
    if not yes and not typer.confirm(question, err=True):
        raise MlxcacheError("Nothing was changed.")


def can_ask() -> bool:
    """Return whether a question can be asked: standard input and standard error are terminals."""
    return sys.stdin.isatty() and sys.stderr.isatty()
