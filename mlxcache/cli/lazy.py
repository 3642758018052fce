"""Commands whose modules are imported when they run: `--version`, `--help` and TAB do not wait.

A module of a command imports an HTTP client, numpy or MLX, which takes up to seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command


class Lazy(NamedTuple):
    """A command: the `module:name` of its function or Typer app, and its line in the help."""

    target: str
    help: str


class LazyGroup(TyperGroup):
    """A group whose commands are placeholders until one is called or completed."""

    lazy: Mapping[str, Lazy] = {}

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """Replace the placeholder of the command that `args` name, then resolve it."""
        name = args[0] if args else ""
        if name in self.lazy:
            self.add_command(load(name, self.lazy[name]), name)
        return super().resolve_command(ctx, args)


def lazy_group(commands: Mapping[str, Lazy]) -> type[LazyGroup]:
    """Make the class of a group of `commands`; see `add_placeholders`."""
    return type("Commands", (LazyGroup,), {"lazy": dict(commands)})


def add_placeholders(app: typer.Typer, commands: Mapping[str, Lazy]) -> None:
    """Add a placeholder for each command, which the help lists."""
    for name, one in commands.items():
        app.command(name, help=one.help)(_placeholder)


def load(name: str, command: Lazy) -> Any:
    """Import a command, as typer's command or group."""
    module, _, attribute = command.target.partition(":")
    found: typer.Typer | Callable[..., None] = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        made.command(name)(found)
        found = made
    return get_command(found)


def load_all(app: typer.Typer, commands: Mapping[str, Lazy]) -> Any:
    """Import all commands; returns typer's group of them, as documentation needs it."""
    group: Any = get_command(app)
    for name, one in commands.items():
        group.add_command(load(name, one), name)
    return group


def _placeholder() -> None:
    """Stand in for a command that is not imported yet."""
