"""Arguments and options of commands, as typer describes them."""

from __future__ import annotations

from typing import Any

import typer


def option(metavar: str, help: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, metavar=metavar, help=help, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, **more)


def switch(help: str, *flags: str) -> Any:
    """Describe a flag without a value; unless `flags` are named, it would have a --no- form too."""
    return typer.Option(*flags, metavar="", help=help)
