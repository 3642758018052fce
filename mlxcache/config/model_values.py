"""Parsers of the settings that name models: texts, the tables of [models], and routes.

Each function raises ValueError or ConfigError with the reason, to which the caller adds the name of
the source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxcache.config.models import Keep, ModelEntry, Route
from mlxcache.config.sizes import read_size
from mlxcache.config.values import (
    NO_LIMIT,
    check_size,
    read_duration,
    read_number,
    read_table,
    read_text,
)
from mlxcache.errors import ConfigError

read_context = read_number(16, NO_LIMIT, example=32768)
"""Parser of a context length in tokens."""


def read_model_names(value: object) -> tuple[str, ...]:
    """Parse the setting `model`: a path, Hub id or name of a model, or a list of them.

    The first of a list is the default model. Raises ValueError if the list is empty or names a
    model twice.
    """
    given = value if isinstance(value, list | tuple) else [value]
    names = tuple(read_text(one) for one in given)
    if not names:
        raise ValueError("must name a model, not an empty list")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names {name} twice")
    return names


def read_models(value: object) -> tuple[ModelEntry, ...]:
    """Parse the section [models] of config.toml, which has a table for each model by its name.

    Returns the entries in the order of the tables. A tuple of entries is returned unchanged. Raises
    ValueError for anything else: also for an unknown key, a value that is not valid, and a table
    without `path`.
    """
    if isinstance(value, tuple) and all(isinstance(one, ModelEntry) for one in value):
        return value
    if not isinstance(value, Mapping) or not value:
        raise ValueError("must have a table [models.NAME] for each model")
    return tuple(_entry(str(name), table) for name, table in value.items())


def _entry(name: str, table: object) -> ModelEntry:
    if not name.strip():
        raise ValueError("a table's name must not be empty: write [models.NAME]")
    if not isinstance(table, Mapping):
        raise ValueError(f'{name} must be a table: [models.{name}] and below it path = "..."')
    values: dict[str, Any] = {}
    for key, given in table.items():
        if key not in _KEYS:
            hint = f'; a name with a dot needs quotes: [models."{name}.{key}"]'
            raise ValueError(
                f"unknown key {key!r} in {name}; the keys are {', '.join(_KEYS)}"
                f"{hint if isinstance(given, Mapping) else ''}"
            )
        field, read = _KEYS[key]
        try:
            values[field] = read(given)
        except (ValueError, TypeError, ConfigError) as error:
            raise ValueError(f"{key} of {name} {error}") from error
    if "model" not in values:
        raise ValueError(f'{name} has no path: add path = "FOLDER" or path = "HUB_ID"')
    return ModelEntry(name=name, **values)


def read_keep(value: object) -> Keep:
    """Parse how long an unused model stays loaded: "always", "demand", or a duration.

    A text such as "idle 10m", or a number of seconds, becomes seconds. "always" and "demand"
    (until another model needs the memory) are returned as they are. Raises ValueError for anything
    else.
    """
    if value == "always":
        return "always"
    if value == "demand":
        return "demand"
    text = value.removeprefix("idle ") if isinstance(value, str) else value
    try:
        if isinstance(value, str) and text == value:
            raise ValueError
        return read_duration(text)
    except ValueError as error:
        raise ValueError(
            f"must be always, demand, or idle and a duration, such as 'idle 10m', not {value!r}"
        ) from error


def read_share(value: object) -> str | int:
    """Return a model's limit of memory, such as "8GB" or "50%", unchanged, after checking it.

    Raises ValueError for "auto", and ValueError or ConfigError for what is not a size.
    """
    found = check_size(value)
    if read_size(found) == "auto":
        raise ValueError(f"must be a size such as 8GB or 50%, not {value!r}")
    return found


def read_idle(value: object) -> float | None:
    """Read the duration of `--idle-unload` in seconds; None for "off" or false.

    Raises ValueError for anything else that `read_duration` does not accept.
    """
    if value is False or (isinstance(value, str) and value.strip().lower() == "off"):
        return None
    try:
        return read_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}; or off") from error


def read_names(value: object) -> tuple[str, ...]:
    """Return an alias of a model, or a list of aliases, as a tuple without duplicates.

    Raises ValueError for anything else, and for an empty alias.
    """
    given = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(read_text(one) for one in given))


def read_routes(value: object) -> tuple[Route, ...]:
    """Parse routes: a text `PATTERN=NAME`, a list of such texts, or a table from pattern to name.

    A text that is not in a list may contain several, separated by commas. A tuple of routes is
    returned unchanged. Raises ValueError for anything else.
    """
    if isinstance(value, tuple) and all(isinstance(one, Route) for one in value):
        return value
    if isinstance(value, Mapping):
        return tuple(Route(read_text(one), read_text(name)) for one, name in value.items())
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ValueError(f"must be PATTERN=NAME or a table, not {value!r}")
    return tuple(_route(one) for one in given)


def _route(text: object) -> Route:
    pattern, _, name = text.rpartition("=") if isinstance(text, str) else ("", "", "")
    if not pattern.strip() or not name.strip():
        raise ValueError(f"must be PATTERN=NAME, such as 'claude-haiku-*=small', not {text!r}")
    return Route(pattern.strip(), name.strip())


_KEYS: Mapping[str, tuple[str, Callable[[object], Any]]] = {
    "path": ("model", read_text),
    "aliases": ("aliases", read_names),
    "context": ("context", read_context),
    "keep": ("keep", read_keep),
    "ram": ("ram", read_share),
    "adapter": ("adapter", read_text),
    "draft_model": ("draft_model", read_text),
    "chat_template_args": ("chat_template_args", read_table),
}
"""Keys of a table [models.NAME], each with its field of `ModelEntry` and its parser."""
