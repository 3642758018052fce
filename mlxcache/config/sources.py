"""Sources of settings: flags override environment variables, which override config.toml.

The flag `--some-flag` is `MLXCACHE_SOME_FLAG` in the environment and `some_flag` in the file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from mlxcache.config.models import ModelEntry, Route, check_names, check_routes, find_model
from mlxcache.config.settings import CONFIG, ENV_PREFIX, SETTINGS, Setting, Settings
from mlxcache.errors import ConfigError
from mlxcache.utf8 import NotUtf8, read_utf8


def default_config_path() -> Path:
    return platformdirs.user_config_path("mlxcache") / "config.toml"


def load_settings(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_path: Path | None = None,
) -> Settings:
    """Read settings from flags, environment variables and a TOML file.

    `flags`: values by the names of the fields of `Settings`; None was not given. An empty variable
    counts as not set. The file is `config_path` or the one that `MLXCACHE_CONFIG` names, which must
    exist; otherwise it is the default file, if that exists. Raises ConfigError for a value that is
    not valid, with the name of its flag, variable or key, and for values that contradict one
    another.
    """
    given = {**_from_file(_config_file(config_path, environ)), **_over_file(flags, environ)}
    values = {name: one.value for name, one in given.items()}
    values |= _models(given)
    drafts = [one.draft_model for one in values.get("models", ())] + [values.get("draft_model")]
    guesses = values.get("speculate", "off") != "off"
    if "num_draft_tokens" in values and not (guesses or any(drafts)):
        raise ConfigError(
            "--num-draft-tokens needs a draft model or heads: add --draft-model PATH|HUB_ID or "
            "--speculate auto"
        )
    if "speculate_tokens" in values and not guesses:
        raise ConfigError("--speculate-tokens needs guesses to limit: add --speculate auto")
    settings = Settings(**values)
    if len(settings.models) == 1:
        return replace(settings.for_model(settings.models[0]), route=settings.route)
    return settings


@dataclass(frozen=True, slots=True)
class _Given:
    """Value of a setting that was given, with the flag, variable or key from which it came."""

    value: Any
    source: str
    in_file: bool


def _over_file(flags: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for name, setting in SETTINGS.items():
        if not setting.only_key and environ.get(setting.variable):
            given[name] = _read(setting, environ[setting.variable], setting.variable)
    for name, value in flags.items():
        if value is not None:
            setting = SETTINGS[name]
            given[name] = _read(setting, value, name if setting.only_key else setting.flag)
    return given


def _models(given: Mapping[str, _Given]) -> dict[str, Any]:
    """Return the settings `models`, `route` and, unless the demo is served, `model`, by name.

    Names given as `model` choose tables of `models`; a name without a table is a path or Hub id.
    The result's `models` is empty if a single model is served that has no table. Flags and
    variables override what a table sets.
    """
    names, tables = given.get("model"), given.get("models")
    known: Sequence[ModelEntry] = tables.value if tables is not None else ()
    if names is None:
        chosen = known
    elif tables is not None and names.in_file and tables.in_file:
        raise ConfigError(
            f"{names.source}: leave it out beside [models]; the first table of [models] is the "
            "default model"
        )
    else:
        found = [find_model(name, known) for name in names.value]
        chosen = [
            ModelEntry(name) if at is None else known[at]
            for name, at in zip(names.value, found, strict=True)
        ]
    # Settings refuses adapter and draft_model with several models
    fields = _OVER_TABLES if len(chosen) == 1 else _OVER_SEVERAL
    over = {name: given[name].value for name in fields if name in given and not given[name].in_file}
    chosen = tuple(replace(one, **over) for one in chosen)
    with _naming(names or tables):
        check_names(chosen)
    routes = _routes(given.get("route"), known, chosen or (ModelEntry(None),))
    made: dict[str, Any] = {"models": chosen, "route": routes}
    if not chosen:
        return made
    if len(chosen) == 1 and chosen[0].name is None:
        made["models"] = ()
    return made | {"model": chosen[0].model}


def _routes(
    given: _Given | None, known: Sequence[ModelEntry], chosen: Sequence[ModelEntry]
) -> tuple[Route, ...]:
    if given is None:
        return ()
    with _naming(given):
        check_routes(given.value, (*known, *chosen) if given.in_file else chosen)
    return tuple(one for one in given.value if find_model(one.name, chosen) is not None)


_OVER_SEVERAL = ("context", "chat_template_args")
_OVER_TABLES = (*_OVER_SEVERAL, "adapter", "draft_model")
"""Settings that a table of [models] may set, and that a flag or variable overrides there."""


def unknown_variables(
    environ: Mapping[str, str], more: Iterable[str] = ()
) -> list[tuple[str, str | None]]:
    """Return unknown variables that begin with MLXCACHE_, each with the most similar known one.

    Empty variables are ignored. The names in `more` are known too.
    """
    own = (one for one in (*SETTINGS.values(), CONFIG) if not one.only_key)
    known = {*more, *(one.variable for one in own)}
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


def _from_file(path: Path | None) -> dict[str, _Given]:
    if path is None:
        return {}
    try:
        text = read_utf8(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except NotUtf8 as error:
        raise ConfigError(f"{path} {error}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        advice = _quoted(text, str(error))
        raise ConfigError(f"{path} is not valid TOML: {error}{advice}") from error
    for key, value in table.items():
        if key not in SETTINGS:
            raise ConfigError(_describe_unknown(key, value, path))
    return {
        key: _read(SETTINGS[key], value, f"{key} in {path}", in_file=True)
        for key, value in table.items()
    }


def _quoted(text: str, error: str) -> str:
    """Return the advice to write the value of the line that `error` names in quotes."""
    line = re.search(r"at line (\d+)", error)
    written = line and _UNQUOTED.fullmatch(text.splitlines()[int(line[1]) - 1])
    if not written or written["key"] not in SETTINGS:
        return ""
    value = "..." if "key" in written["key"] else written["value"]  # no secret in a log
    return f': write {written["key"]} = "{value}"'


_UNQUOTED = re.compile(r"\s*(?P<key>\w+)\s*=\s*(?P<value>[^\s\"'\[{#]+)\s*(?:#.*)?")


def _describe_unknown(key: str, value: object, path: Path) -> str:
    if isinstance(value, dict) and value.keys() & SETTINGS.keys():
        return (
            f"unknown section [{key}] in {path}: delete that line, and write its keys "
            f"({', '.join(value)}) above the first section"
        )
    like = difflib.get_close_matches(key, SETTINGS, 1)
    known = f"did you mean {like[0]}?" if like else "`mlxcache serve --help` lists the settings"
    return f"unknown key {key!r} in {path}: {known}"


def _read(setting: Setting, value: object, source: str, *, in_file: bool = False) -> _Given:
    try:
        return _Given(setting.read(value), source, in_file)
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"{source}: {error}") from error


@contextmanager
def _naming(given: _Given | None) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{given.source}: {error}" if given else str(error)) from error
