"""Sources of settings: flags override environment variables, which override config.toml.

The flag `--some-flag` is `MLXCACHE_SOME_FLAG` in the environment and `some_flag` in the file.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from mlxcache.config.settings import CONFIG, ENV_PREFIX, SETTINGS, Setting, Settings
from mlxcache.errors import ConfigError
from mlxcache.utf8 import NotUtf8, read_utf8


def default_config_path() -> Path:
    """Return the path of config.toml in the platform's user configuration directory."""
    return platformdirs.user_config_path("mlxcache") / "config.toml"


def load_settings(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_path: Path | None = None,
) -> Settings:
    """Read settings from flags, environment variables and a TOML file.

    A flag that is None was not given, and an empty variable counts as not set. The file is
    `config_path` or the one that `MLXCACHE_CONFIG` names, which must exist; otherwise it is the
    default file, if that exists. Raises ConfigError with the name of the flag, variable or key.
    """
    values = _from_file(_config_file(config_path, environ))
    for name, setting in SETTINGS.items():
        if environ.get(setting.variable):
            values[name] = _read(setting, environ[setting.variable], setting.variable)
    for name, value in flags.items():
        if value is not None:
            values[name] = _read(SETTINGS[name], value, SETTINGS[name].flag)
    if "num_draft_tokens" in values and "draft_model" not in values:
        raise ConfigError("--num-draft-tokens needs a draft model: add --draft-model PATH|HUB_ID")
    return Settings(**values)


def unknown_variables(
    environ: Mapping[str, str], more: Iterable[str] = ()
) -> list[tuple[str, str | None]]:
    """Return unknown variables that begin with MLXCACHE_, each with the most similar known one.

    `environ`: the environment variables. The second item of a pair is None if no known variable is
    similar. The variables of all settings, `MLXCACHE_CONFIG` and those in `more` are known.
    """
    known = {*more, *(one.variable for one in (*SETTINGS.values(), CONFIG))}
    # compared without the common prefix, which would make any two of them similar
    names = [name.removeprefix(ENV_PREFIX) for name in sorted(known)]
    found: list[tuple[str, str | None]] = []
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and environ[name] and name not in known:
            like = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), names, 1)
            found.append((name, ENV_PREFIX + like[0] if like else None))
    return found


def _config_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    if path is None and environ.get(CONFIG.variable):
        path = Path(environ[CONFIG.variable])
    if path is None:
        path = default_config_path()
        return path if path.exists() else None
    return path


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(read_utf8(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except NotUtf8 as error:
        raise ConfigError(f"{path} {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for key in table:
        if key not in SETTINGS:
            known = ", ".join(sorted(SETTINGS))
            raise ConfigError(f"unknown key {key!r} in {path}; the keys are {known}")
    return {key: _read(SETTINGS[key], value, f"{key} in {path}") for key, value in table.items()}


def _read(setting: Setting, value: object, source: str) -> Any:
    try:
        return setting.read(value)
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"{source}: {error}") from error
