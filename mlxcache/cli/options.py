"""Command-line flags, made from the descriptions of the settings.

A flag's value is passed on as text. `load_settings` parses and checks it, so that a flag, its
variable and its key in config.toml have the same rules and the same error messages.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from mlxcache.config.settings import CONFIG, SETTINGS, Setting
from mlxcache.config.sources import load_settings
from mlxcache.errors import ConfigError

Flags = Mapping[str, Any]
"""Settings given as flags, by name. Values are text, lists of text, or True for a switch."""


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds flags for settings to a command.

    `names` are the names of the settings, by default of all that have flags. The flags appear in
    the help at the position of the command's parameter `flags`, which receives the flags that were
    given.
    """
    settings = [one for one in map(SETTINGS.__getitem__, names or SETTINGS) if not one.only_key]
    added = [
        Parameter(
            one.name,
            Parameter.KEYWORD_ONLY,
            default=_option(one, None),
            annotation=_kind(one),
        )
        for one in settings
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own, hints = signature(command), get_type_hints(command, include_extras=True)
        parameters: list[Parameter] = []
        for name, one in own.parameters.items():
            parameters += added if name == "flags" else [one.replace(annotation=hints[name])]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {one.name: given.pop(one.name) for one in settings}
            command(flags=given_flags(values), **given)

        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def given_flags(arguments: Mapping[str, Any]) -> Flags:
    """Return the settings that were given as flags, from a command's parsed arguments by name.

    Names of other arguments, and flags that were not given, are left out.
    """
    values = {name: value for name, value in arguments.items() if name in SETTINGS}
    return {name: value for name, value in values.items() if value not in (None, [], ())}


def _kind(setting: Setting) -> Any:
    if not setting.metavar:
        return bool | None
    return list[str] | None if setting.repeatable else str | None


def _option(setting: Setting, *default: Any) -> Any:
    """Return typer's description of the flag of `setting`.

    `default` is the flag's default value, and is left out if the description is used inside
    `Annotated`.
    """
    return typer.Option(
        *default,
        setting.flag,
        metavar=setting.metavar,
        help=setting.help,
        show_default=False,
        rich_help_panel=setting.panel,
        autocompletion=_complete_models if setting.name == "model" else None,
    )


def _complete_models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names and aliases of config.toml's models that begin with `incomplete`.

    A file that cannot be read offers none: an error would be printed into the line being typed.
    """
    config = ctx.params.get("config")
    try:
        file = {CONFIG.variable: os.environ.get(CONFIG.variable, "")}
        settings = load_settings({}, file, Path(config) if config else None)
    except ConfigError:
        return []
    names = (name for one in settings.models for name in (one.label, *one.aliases))
    return [name for name in names if name.startswith(incomplete)]


Config = Annotated[Path | None, _option(CONFIG)]
