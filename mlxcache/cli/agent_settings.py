"""Locate and read the settings files of coding agents. Nothing is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxcache.errors import MlxcacheError
from mlxcache.utf8 import NotUtf8, read_utf8

_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that may contain comments and trailing commas.

    Returns {} if the file does not exist. Raises ValueError if it cannot be read or holds no JSON
    object.
    """
    try:
        text = read_utf8(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ValueError(error.strerror) from error
    except NotUtf8 as error:
        raise ValueError(f"it {error}") from error
    for noise in (_COMMENT, _LAST_COMMA):
        text = noise.sub(lambda found: found[1] or "", text)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def current_folder() -> Path:
    """Return the folder in which this command runs. Raises MlxcacheError if it was removed."""
    try:
        return Path.cwd()
    except OSError as error:
        message = f"The current folder cannot be used ({error.strerror}): cd to your project first."
        raise MlxcacheError(message) from error


def claude_folder(environ: Mapping[str, str], home: Path) -> Path:
    """Return the path of Claude Code's configuration folder: $CLAUDE_CONFIG_DIR, else ~/.claude."""
    return Path(environ.get("CLAUDE_CONFIG_DIR") or home / ".claude")


def claude_env(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that `env` in Claude Code's `settings` defines, by name.

    For Claude Code, they override those of its environment. Returns {} if `env` is missing. Raises
    ValueError if it is not a JSON object.
    """
    env = settings.get("env", {})
    if not isinstance(env, dict):
        raise ValueError("its `env` is not a JSON object")
    return {str(name): str(value) for name, value in env.items()}


def opencode_files(environ: Mapping[str, str], home: Path, cwd: Path) -> list[Path]:
    """Return the paths at which OpenCode looks for settings, lowest priority first.

    `environ` may have $XDG_CONFIG_HOME and $OPENCODE_CONFIG. `cwd`: the project's folder. The files
    may be missing. Source: https://opencode.ai/docs/config.
    """
    folder = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "opencode"
    named = environ.get("OPENCODE_CONFIG")
    names = ("opencode.json", "opencode.jsonc")
    return [
        *(folder / name for name in names),
        *([Path(named).expanduser()] if named else []),
        *(cwd / name for name in names),
    ]
