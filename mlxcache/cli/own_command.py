"""Shell words that run this mlxcache in any folder, for command lines to be copied."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from mlxcache.cli.connect import base_url
from mlxcache.config import Settings

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


def own_sources(folder: Path, clone: Path = CLONE) -> bool:
    """Return whether `folder` is inside the git clone of mlxcache from which this program runs."""
    return (clone / "pyproject.toml").is_file() and folder.resolve().is_relative_to(clone)
