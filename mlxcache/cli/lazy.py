"""Commands whose modules are imported only when they run.

Importing HTTP clients, numpy or MLX takes up to seconds, for which `--version`, `--help` and shell
completion must not wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
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
    """Command group that imports each command only when it is called or completed.

    Until then, a placeholder represents the command in the help.
    """

    lazy: Mapping[str, Lazy] = {}

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        return _hide_flag_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            better = _improve(error.message)
            if better == error.message:
                raise
            raise typer.BadParameter(
                better, ctx=error.ctx, param=error.param, param_hint=error.param_hint
            ) from None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """Import the command named first in `args`, in place of its placeholder."""
        name = args[0] if args else ""
        if name in self.lazy:
            self.add_command(load(name, self.lazy[name]), name)
        found = super().resolve_command(ctx, args)
        for command in _commands(found[1]):
            _hide_flag_types(command.get_params(ctx))
        return found


def lazy_group(commands: Mapping[str, Lazy]) -> type[LazyGroup]:
    """Return a group of `commands` by name; the app also needs `add_placeholders` for its help."""
    return type("Commands", (LazyGroup,), {"lazy": dict(commands)})


def add_placeholders(app: typer.Typer, commands: Mapping[str, Lazy]) -> None:
    for name, one in commands.items():
        app.command(name, help=one.help)(_placeholder)


def load(name: str, command: Lazy) -> Any:
    """Import a command and return it as a click command or group."""
    module, _, attribute = command.target.partition(":")
    found: typer.Typer | Callable[..., None] = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        made.command(name)(found)
        found = made
    return get_command(found)


def load_all(app: typer.Typer, commands: Mapping[str, Lazy]) -> Any:
    """Import all commands and return the click group of `app` with them, for documentation."""
    group: Any = get_command(app)
    for name, one in commands.items():
        group.add_command(load(name, one), name)
    return group


def _commands(command: Any) -> Iterator[Any]:
    if command is not None:
        yield command
        for below in getattr(command, "commands", {}).values():
            yield from _commands(below)


def _improve(message: str) -> str:
    """Remove pydantic's prefix, and suggest the allowed value most similar to the wrong one."""
    message = message.removeprefix("Value error, ")
    wrong = re.fullmatch(r"'(.+)' is not one of ('.+')\.", message)
    if wrong is None:
        return message
    like = get_close_matches(wrong[1], re.findall(r"'([^']+)'", wrong[2]), 1)
    return f"{message[:-1]}: did you mean {like[0]}?" if like else message


def _hide_flag_types(parameters: list[Any]) -> list[Any]:
    """Give flags an empty metavar: otherwise typer's help would show `<bool>` beside them."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


def _placeholder() -> None:
    """Stand for a command that is not imported yet."""
