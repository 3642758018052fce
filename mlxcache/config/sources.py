"""Where settings come from: flags win over the environment, which wins over config.toml.

Every flag `--some-flag` is `MLXCACHE_SOME_FLAG` in the environment and `some_flag` in the file.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from mlxcache.config.rules import read_rules
from mlxcache.config.settings import MOST_DRAFTED, Settings
from mlxcache.config.sizes import read_size
from mlxcache.errors import ConfigError

ENV_PREFIX = "MLXCACHE_"


def default_config_path() -> Path:
    """config.toml in the platform's user configuration directory."""
    return platformdirs.user_config_path("mlxcache") / "config.toml"


def load_settings(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_path: Path | None = None,
) -> Settings:
    """Settings from `flags` (a None is a flag not given), `environ` and a TOML file.

    The file is `config_path`, which must then exist, or `MLXCACHE_CONFIG`, or the default one
    where it exists. An empty variable counts as not set.
    Raises ConfigError, naming the flag, variable or key at fault.
    """
    values = _from_file(_config_file(config_path, environ))
    for name in READERS:
        variable = ENV_PREFIX + name.upper()
        if environ.get(variable):
            values[name] = _read(name, environ[variable], variable)
    for name, value in flags.items():
        if value is not None:
            values[name] = _read(name, value, "--" + name.replace("_", "-"))
    if "num_draft_tokens" in values and "draft_model" not in values:
        raise ConfigError(
            "--num-draft-tokens needs a model that drafts them: add --draft-model PATH|HUB_ID"
        )
    return Settings(**values)


def unknown_variables(
    environ: Mapping[str, str], more: Iterable[str] = ()
) -> list[tuple[str, str | None]]:
    """Variables that look like ours, are set and mean nothing, each with the known one like it.

    Known are all settings, `MLXCACHE_CONFIG` and `more`.
    """
    known = {*more, *(ENV_PREFIX + name.upper() for name in (*READERS, "config"))}
    # Compared without what all have in common, which would make any two of them alike.
    names = [name.removeprefix(ENV_PREFIX) for name in sorted(known)]
    found: list[tuple[str, str | None]] = []
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and environ[name] and name not in known:
            like = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), names, 1)
            found.append((name, ENV_PREFIX + like[0] if like else None))
    return found


def _config_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    if path is None and environ.get(ENV_PREFIX + "CONFIG"):
        path = Path(environ[ENV_PREFIX + "CONFIG"])
    if path is None:
        path = default_config_path()
        return path if path.exists() else None
    return path


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # TOML and UTF-8 errors alike
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for key in table:
        if key not in READERS:
            known = ", ".join(sorted(READERS))
            raise ConfigError(f"unknown key {key!r} in {path}; the keys are {known}")
    return {key: _read(key, value, f"{key} in {path}") for key, value in table.items()}


def _read(name: str, value: object, source: str) -> Any:
    try:
        return READERS[name](value)
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text, not {value!r}")
    return value


def _secret(value: object) -> str:
    if not isinstance(value, str) or not value or not (value.isascii() and value.isprintable()):
        raise ValueError("must be printable ASCII characters")  # the value is not repeated
    return value


def _secrets(value: object) -> tuple[str, ...]:
    """A key, or a list of them."""
    given = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(_secret(one) for one in given))


def _origins(value: object) -> tuple[str, ...]:
    """Origins as browsers send them; a variable has several with commas between."""
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


def _path(value: object) -> Path:
    return Path(value if isinstance(value, Path) else _text(value)).expanduser()


def _files(value: object) -> tuple[Path, ...]:
    """A list of paths; a variable has several with the separator of PATH between them."""
    given = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ValueError(f"must be a file or a list of files, not {value!r}")
    files = tuple(_path(one) for one in given)
    for file in files:
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
    return files


def _number(least: int, most: int, example: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        try:
            number = int(value) if isinstance(value, str | int) else None
        except ValueError:
            number = None
        if number is None or isinstance(value, bool) or not least <= number <= most:
            limits = f"from {least} to {most}" if most < _MANY else f"of at least {least}"
            raise ValueError(f"must be a number {limits}, such as {example}, not {value!r}")
        return number

    return read


def _seconds(value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds <= _LONGEST_S:
        raise ValueError(f"must be a number of seconds above 0, such as 600, not {value!r}")
    return seconds


def _bits(value: object) -> int:
    if isinstance(value, bool) or str(value) not in ("4", "8"):
        raise ValueError(f"must be 4 or 8, not {value!r}")
    return int(str(value))


def _switch(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    known = value if isinstance(value, bool) else words.get(str(value).lower())
    if known is None:
        raise ValueError(f"must be true or false, not {value!r}")
    return known


def _size(value: object) -> str | int:
    if not isinstance(value, str | int):
        raise ValueError(f"must be a size such as 8GB, 25% or auto, not {value!r}")
    read_size(value)
    return value


def _size_or_off(value: object) -> str | int:
    if value is False or (isinstance(value, str) and value.strip().lower() == "off"):
        return "off"
    try:
        return _size(value)
    except ConfigError as error:
        raise ValueError(f"{error}; or off, for none") from error


def _level(value: object) -> str:
    levels = ("debug", "info", "warning", "error")
    if not isinstance(value, str) or value.lower() not in levels:
        raise ValueError(f"must be one of {', '.join(levels)}, not {value!r}")
    return value.lower()


def _table(value: object) -> Mapping[str, Any]:
    """A TOML table as it is; a flag or variable as a JSON object."""
    example = "'{\"enable_thinking\": false}'"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON object such as {example}: {error}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a JSON object such as {example}")
    return value


_MANY = 10**12
_LONGEST_S = 30 * 86400.0
READERS: Mapping[str, Callable[[object], object]] = {
    "model": _text,
    "host": _text,
    "port": _number(0, 65535, 8081),
    "cache_dir": _path,
    "ram": _size,
    "disk": _size_or_off,
    "context": _number(16, _MANY, 32768),
    "max_tokens": _number(1, _MANY, 4096),
    "concurrency": _number(1, 256, 8),
    "queue": _number(0, 100_000, 64),
    "request_timeout": _seconds,
    "prefill_chunk": _number(16, 65536, 2048),
    "api_key": _secrets,
    "api_keys_file": _path,
    "allow_origin": _origins,
    "insecure": _switch,
    "adapter": _text,
    "kv_bits": _bits,
    "draft_model": _text,
    "num_draft_tokens": _number(1, MOST_DRAFTED, 3),
    "chat_template_args": _table,
    "canonicalise": read_rules,
    "no_canonicalise": _switch,
    "no_anticipate": _switch,
    "trust_remote_code": _switch,
    "log_level": _level,
    "warm": _files,
    "record": _path,
}
"""How each setting is read from a flag, a variable or a TOML value; raises ValueError."""
