"""Parsers of setting values from flags, environment variables and TOML values.

Flags and variables are text; TOML values have types. Each function raises ValueError or ConfigError
with the reason, to which the caller adds the name of the source.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlxcache.config.sizes import LEAST_RAM, read_size
from mlxcache.errors import ConfigError

NO_LIMIT = 10**12
"""An upper bound of `read_number` that error messages do not mention."""

LONGEST_S = 30 * 86400.0
"""Longest period in seconds that `read_seconds` accepts."""


_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def read_text(value: object) -> str:
    """Return a text unchanged. Raises ValueError if it is empty, and for any other type."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text that is not empty, not {value!r}")
    return value


def read_secrets(value: object) -> tuple[str, ...]:
    """Read an API key or a list of API keys, and remove duplicates.

    Raises ValueError for a key that is empty or not printable ASCII; the message does not repeat
    the key.
    """
    given = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(_secret(one) for one in given))


def _secret(value: object) -> str:
    if not isinstance(value, str) or not value or not (value.isascii() and value.isprintable()):
        raise ValueError("must be printable ASCII characters")
    return value


def read_origins(value: object) -> tuple[str, ...]:
    """Read web origins from a list or from a text that separates them by commas.

    Origins are normalised to the form in which browsers send them. Raises ValueError for anything
    that is not an origin, such as a wildcard.
    """
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ValueError(f"must be an origin or a list of origins, not {value!r}")
    return tuple(dict.fromkeys(_origin(one) for one in given))


def _origin(value: object) -> str:
    text = str(value).strip().rstrip("/").lower()
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9._~%\[\]:-]+", text):
        raise ValueError(
            f"must be an origin such as http://localhost:3000, not {value!r} (each page is named: "
            "there is no wildcard)"
        )
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", lambda m: m[1] or m[2], text)


def read_path(value: object) -> Path:
    """Read a path and expand `~`. It need not exist. Raises ValueError for an empty text."""
    return Path(value if isinstance(value, Path) else read_text(value)).expanduser()


def read_files(value: object) -> tuple[Path, ...]:
    """Read the paths of existing files from a list or from a text."""
    given = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ValueError(f"must be a file or a list of files, not {value!r}")
    files = tuple(read_path(one) for one in given)
    for file in files:
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
    return files


def read_number(least: int, most: int, *, example: int) -> Callable[[object], int]:
    """Return a parser of whole numbers from `least` to `most`, both included."""

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
    """Read a period in seconds. Raises ValueError unless it is above 0 and at most `LONGEST_S`."""
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


def read_kv_bits(value: object) -> int:
    """Read the number of bits of a quantised KV cache. Raises ValueError unless it is 4 or 8."""
    if isinstance(value, bool) or str(value) not in ("4", "8"):
        raise ValueError(f"must be 4 or 8, not {value!r}")
    return int(str(value))


def read_speculate(value: object) -> str:
    """Parse the setting `speculate`: "off" or "auto" in any case, or false, which means "off"."""
    if value is False:  # TOML and YAML writers know off as a boolean
        return "off"
    if str(value).lower() not in ("off", "auto"):
        raise ValueError(f"must be off or auto, not {value!r}")
    return str(value).lower()


def read_switch(value: object) -> bool:
    """Read a boolean, or one of the texts true, yes, 1, false, no and 0 in any case."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    known = value if isinstance(value, bool) else words.get(str(value).lower())
    if known is None:
        raise ValueError(f"must be true or false, not {value!r}")
    return known


def read_on_off(value: object) -> bool:
    """Read "on" or "off" in any case, or a boolean in the forms that `read_switch` accepts."""
    words = {"on": True, "off": False}
    known = words.get(value.strip().lower()) if isinstance(value, str) else None
    try:
        return read_switch(value) if known is None else known
    except ValueError as error:
        raise ValueError(f"must be on or off, not {value!r}") from error


def check_size(value: object) -> str | int:
    """Return a size unchanged, after checking that `read_size` accepts it.

    Raises ValueError for other types than text and whole numbers, and ConfigError for a text or a
    number that is not a size, or so small that its unit was probably forgotten.
    """
    if not isinstance(value, str | int):
        raise ValueError(f"must be a size such as 8GB, 25% or auto, not {value!r}")
    read_size(str(value))
    return value


def check_ram(value: object) -> str | int:
    """Return the size of `--ram` unchanged, after checking it as `check_size` does."""
    try:
        return check_size(value)
    except ConfigError as error:
        raise ValueError(f"{error} (at least {LEAST_RAM}, and more for a larger model)") from error


def check_size_or_off(value: object) -> str | int:
    """Return the size of `--disk` unchanged, or "off", after checking it as `check_size` does."""
    if value is False or (isinstance(value, str) and value.strip().lower() == "off"):
        return "off"
    try:
        return check_size(value)
    except ConfigError as error:
        raise ValueError(f"{error}; or off, for none") from error


def read_level(value: object) -> str:
    """Return the name of a log level in lower case. Raises ValueError for an unknown one."""
    levels = ("debug", "info", "warning", "error")
    if not isinstance(value, str) or value.lower() not in levels:
        raise ValueError(f"must be one of {', '.join(levels)}, not {value!r}")
    return value.lower()


def read_table(value: object) -> Mapping[str, Any]:
    """Return a TOML table unchanged, or parse a text that holds a JSON object."""
    example = "'{\"enable_thinking\": false}'"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON object such as {example}: {error}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a JSON object such as {example}")
    return value
