"""Parsers of setting values from flags, environment variables and TOML values.

Flags and variables are text; TOML values have types. Each function raises ValueError or ConfigError
with the reason, to which the caller adds the name of the source.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlxcache.config.models import Keep, ModelEntry, Route
from mlxcache.config.sizes import LEAST_RAM, read_size
from mlxcache.errors import ConfigError

NO_LIMIT = 10**12

LONGEST_S = 30 * 86400.0

KVBits = int | Literal["auto"] | None
"""Bits of keys and values, None for those of the model."""

_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def read_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text that is not empty, not {value!r}")
    return value


def read_secrets(value: object) -> tuple[str, ...]:
    """Read an API key or a list of API keys; messages do not repeat the key."""
    return tuple(dict.fromkeys(_secret(one) for one in _several(value)))


def _several(value: object, separator: str | None = None) -> Sequence[object]:
    """Return a list as it is, and a text, divided by `separator`, or any other value as a list."""
    if isinstance(value, list | tuple):
        return value
    return value.split(separator) if separator and isinstance(value, str) else [value]


def _secret(value: object) -> str:
    if not isinstance(value, str) or not value or not (value.isascii() and value.isprintable()):
        raise ValueError("must be printable ASCII characters")
    return value


def read_origins(value: object) -> tuple[str, ...]:
    """Read web origins from a list or from a text that separates them by commas.

    Origins are normalised to the form in which browsers send them.
    """
    return tuple(dict.fromkeys(_origin(one) for one in _several(value, ",")))


def _origin(value: object) -> str:
    text = str(value).strip().rstrip("/").lower()
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9._~%\[\]:-]+", text):
        raise ValueError(
            f"must be an origin such as http://localhost:3000, not {value!r} (each page is named: "
            "there is no wildcard)"
        )
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", lambda m: m[1] or m[2], text)


def read_path(value: object) -> Path:
    return Path(value if isinstance(value, Path) else read_text(value)).expanduser()


def read_files(value: object) -> tuple[Path, ...]:
    given = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ValueError(f"must be a file or a list of files, not {value!r}")
    files = tuple(read_path(one) for one in given)
    for file in files:
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
    return files


def read_number(least: int, most: int, *, example: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        try:
            number = int(value) if isinstance(value, str | int) else None
        except ValueError:
            number = None
        if number is None or isinstance(value, bool) or not least <= number <= most:
            limits = f"from {least} to {most}" if most < NO_LIMIT else f"of at least {least}"
            raise ValueError(f"must be a number {limits}, such as {example}, not {value!r}")
        return number

    return read


def read_seconds(value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds <= LONGEST_S:
        raise ValueError(f"must be a number of seconds above 0, such as 600, not {value!r}")
    return seconds


def read_duration(value: object) -> float:
    """Read a duration in seconds from a number or a text such as `90s`, `15m`, `1h` or `2d`."""
    example = "must be a duration above 0, such as 15m, 1h or 90s"
    match = re.fullmatch(r"([0-9.]+) *([smhd]?)", str(value).strip().lower())
    try:
        seconds = float(match[1]) * _UNITS_S[match[2]] if match else math.nan
    except ValueError:
        seconds = math.nan
    if isinstance(value, bool) or not seconds > 0:
        raise ValueError(f"{example}, not {value!r}")
    if seconds > LONGEST_S:
        raise ValueError(f"{example}, and at most 30d, not {value!r}")
    return seconds


def read_kv_bits(value: object) -> KVBits:
    if str(value).lower() == "auto":
        return "auto"
    if isinstance(value, bool) or str(value) not in ("4", "8"):
        raise ValueError(f"must be 4, 8 or auto, not {value!r}")
    return int(str(value))


def read_speculate(value: object) -> str:
    if value is False:  # TOML and YAML writers know off as a boolean
        return "off"
    if str(value).lower() not in ("off", "auto", "exact"):
        raise ValueError(f"must be off, auto or exact, not {value!r}")
    return str(value).lower()


def read_switch(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    known = value if isinstance(value, bool) else words.get(str(value).lower())
    if known is None:
        raise ValueError(f"must be true or false, not {value!r}")
    return known


def read_on_off(value: object) -> bool:
    words = {"on": True, "off": False}
    known = words.get(value.strip().lower()) if isinstance(value, str) else None
    try:
        return read_switch(value) if known is None else known
    except ValueError as error:
        raise ValueError(f"must be on or off, not {value!r}") from error


def check_size(value: object) -> str | int:
    """Return a size unchanged, after checking that `read_size` accepts it."""
    if not isinstance(value, str | int):
        raise ValueError(f"must be a size such as 8GB, 25% or auto, not {value!r}")
    read_size(str(value))
    return value


def check_ram(value: object) -> str | int:
    try:
        return check_size(value)
    except ConfigError as error:
        raise ValueError(f"{error} (at least {LEAST_RAM}, and more for a larger model)") from error


def _is_off(value: object) -> bool:
    return value is False or (isinstance(value, str) and value.strip().lower() == "off")


def check_size_or_off(value: object) -> str | int:
    if _is_off(value):
        return "off"
    try:
        return check_size(value)
    except ConfigError as error:
        raise ValueError(f"{error}; or off, for none") from error


def read_level(value: object) -> str:
    levels = ("debug", "info", "warning", "error")
    if not isinstance(value, str) or value.lower() not in levels:
        raise ValueError(f"must be one of {', '.join(levels)}, not {value!r}")
    return value.lower()


def read_table(value: object) -> Mapping[str, Any]:
    example = "'{\"enable_thinking\": false}'"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON object such as {example}: {error}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a JSON object such as {example}")
    return value


# -- models: names, the tables of [models], routes ----------------------------------------------

read_context = read_number(16, NO_LIMIT, example=32768)


def read_model_names(value: object) -> tuple[str, ...]:
    """Parse the setting `model`: a path, Hub id or name of a model, or a list of them."""
    if isinstance(value, Mapping):
        tables = [name for name, table in value.items() if isinstance(table, Mapping)]
        raise ValueError(
            f"is a path or Hub id, not a table: did you mean [models.{(tables or ['NAME'])[0]}]?"
        )
    names = tuple(read_text(one) for one in _several(value))
    if not names:
        raise ValueError("must name a model, not an empty list")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names {name} twice")
    return names


def read_models(value: object) -> tuple[ModelEntry, ...]:
    """Parse the section [models] of config.toml, which has a table for each model by its name.

    A tuple of entries is returned unchanged.
    """
    if isinstance(value, tuple) and all(isinstance(one, ModelEntry) for one in value):
        return value
    if not isinstance(value, Mapping) or not value:
        raise ValueError("must have a table [models.NAME] for each model")
    return tuple(_model_entry(str(name), table) for name, table in value.items())


def _model_entry(name: str, table: object) -> ModelEntry:
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
    """Parse how long an unused model stays loaded: "always", "demand", or "idle" and a duration.

    A duration, also as a number of seconds, becomes seconds.
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
    found = check_size(value)
    if read_size(found) == "auto":
        raise ValueError(f"must be a size such as 8GB or 50%, not {value!r}")
    return found


def read_idle(value: object) -> float | None:
    """Read the duration of `--idle-unload` in seconds; None for "off" or false."""
    if _is_off(value):
        return None
    try:
        return read_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}; or off") from error


def read_names(value: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(read_text(one) for one in _several(value)))


def read_routes(value: object) -> tuple[Route, ...]:
    """Parse routes: a text `PATTERN=NAME`, a list of such texts, or a table from pattern to name.

    A text that is not in a list may contain several, separated by commas. A tuple of routes is
    returned unchanged.
    """
    if isinstance(value, tuple) and all(isinstance(one, Route) for one in value):
        return value
    if isinstance(value, Mapping):
        return tuple(Route(read_text(one), read_text(name)) for one, name in value.items())
    return tuple(_route(one) for one in _several(value, ","))


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
