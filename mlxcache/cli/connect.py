"""Addresses of servers, this program's own commands, and settings files of coding agents."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxcache.config import Settings
from mlxcache.errors import MlxcacheError
from mlxcache.utf8 import NotUtf8, read_utf8


def base_url(host: str, port: int) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


# -- this program's own commands ---------------------------------------------------------------

CLONE = Path(__file__).parents[2]
"""Folder that contains this package: that of a clone, or site-packages."""


def own_command(
    prefix: str = sys.prefix,
    executable: str = sys.executable,
    called: str | None = None,
    clone: Path = CLONE,
) -> str:
    """Return the path of the running `mlxcache` command, quoted for a POSIX shell.

    In the virtual environment of the git clone `clone` it is the clone's bin/mlxcache, which also
    sets up OpenBLAS. Otherwise it is `called`, the path by which this program was started, if its
    name is mlxcache, else the `mlxcache` beside `executable`. If none of these files exists,
    `executable` with `-m mlxcache.cli.main` is returned.
    """
    path = Path(sys.argv[0] if called is None else called)
    candidates = [path] if path.name == "mlxcache" else []
    candidates.append(Path(executable).with_name("mlxcache"))
    if Path(prefix).resolve() == (clone / ".venv").resolve():
        candidates.insert(0, clone / "bin" / "mlxcache")
    for one in candidates:
        if one.is_file():
            return shlex.quote(str(one.absolute()))
    return shlex.join([executable, "-m", "mlxcache.cli.main"])


def launch_command(url: str, folder: Path) -> str:
    """Return the shell line of `mlxcache launch` for the server at `url` with cache `folder`.

    `--url` is added unless `launch` would find the server without it.
    """
    default = Settings()
    found = url == base_url(default.host, default.port) and folder == default.cache_dir
    return f"{own_command()} launch" + ("" if found else f" --url {shlex.quote(url)}")


def find_on_path(name: str) -> str | None:
    """Return the path of a program that is not the clone's own script of that name."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    others = [one for one in folders if Path(one or ".").resolve() != CLONE / "bin"]
    return shutil.which(name, path=os.pathsep.join(others))


def own_sources(folder: Path, clone: Path = CLONE) -> bool:
    """Return whether `folder` is inside the git clone of mlxcache from which this program runs."""
    return (clone / "pyproject.toml").is_file() and folder.resolve().is_relative_to(clone)


# -- settings files of agents ------------------------------------------------------------------

_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that may contain comments and trailing commas.

    Returns {} if the file does not exist, and raises ValueError for another reason.
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
    try:
        return Path.cwd()
    except OSError as error:
        message = f"The current folder cannot be used ({error.strerror}): cd to your project first."
        raise MlxcacheError(message) from error


def claude_folder(environ: Mapping[str, str], home: Path) -> Path:
    return Path(environ.get("CLAUDE_CONFIG_DIR") or home / ".claude")


def claude_env(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of `env` in Claude Code's `settings`, which override its environment.

    Raises ValueError if `env` is not a JSON object.
    """
    env = settings.get("env", {})
    if not isinstance(env, dict):
        raise ValueError("its `env` is not a JSON object")
    return {str(name): str(value) for name, value in env.items()}


def opencode_files(environ: Mapping[str, str], home: Path, cwd: Path) -> list[Path]:
    """Return the paths at which OpenCode looks for settings, lowest priority first.

    The files may be missing. Source: https://opencode.ai/docs/config.
    """
    folder = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "opencode"
    named = environ.get("OPENCODE_CONFIG")
    names = ("opencode.json", "opencode.jsonc")
    return [
        *(folder / name for name in names),
        *([Path(named).expanduser()] if named else []),
        *(cwd / name for name in names),
    ]
