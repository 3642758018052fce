"""Where a command goes: to the server that runs, or to the cache folder if none does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxcache.cli.connect import base_url
from mlxcache.config import load_settings
from mlxcache.errors import ConfigError

if TYPE_CHECKING:
    from mlxcache.cli.offline import Offline
    from mlxcache.cli.remote import Remote

URL_VARIABLE = "MLXCACHE_URL"

_PANEL = "Where"

Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        rich_help_panel=_PANEL,
        show_default=False,
        help=f"The server; also {URL_VARIABLE}. Default: the one that runs here.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        rich_help_panel=_PANEL,
        show_default=False,
        help="The server's key. Safer in MLXCACHE_API_KEY than here.",
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=_PANEL,
        show_default=False,
        help="The cache folder, where no server runs; also MLXCACHE_CACHE_DIR. "
        "Default: the user's cache folder.",
    ),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, for programs.")]


def server(url: str | None, api_key: str | None, cache_dir: Path | None = None) -> Remote:
    """The running server. Raises NoServer where none is found, ConfigError for wrong settings.

    By `url`, else MLXCACHE_URL, else the one that serves from the cache folder, else the usual
    address.
    """
    from mlxcache.cli.remote import NoServer, Remote  # noqa: PLC0415 - httpx takes a while
    from mlxcache.store.lock import servers  # noqa: PLC0415

    settings = load_settings({"cache_dir": cache_dir, "api_key": api_key}, os.environ)
    asked = url or os.environ.get(URL_VARIABLE)
    if asked and "://" not in asked:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8081, not {asked!r}")
    urls = [asked] if asked else [one.url for one in servers(settings.cache_dir)]
    if not asked and cache_dir is None:
        urls.append(base_url(settings.host, settings.port))
    for one in urls:
        remote = Remote(one, settings.api_key)
        if remote.answers():
            return remote
    where = f"at {urls[-1]}" if urls else f"from {settings.cache_dir}"
    raise NoServer(f"No server serves {where}: start one with mlxcache serve, or name it by --url.")


def target(url: str | None, api_key: str | None, cache_dir: Path | None) -> Remote | Offline:
    """The running server, else the cache folder as it lies on disk.

    Raises NoServer where a server was named by flag and does not answer, with no folder named.
    """
    from mlxcache.cli.offline import Offline  # noqa: PLC0415
    from mlxcache.cli.remote import NoServer  # noqa: PLC0415

    try:
        return server(url, api_key, cache_dir)
    except NoServer:
        if url is not None and cache_dir is None:
            raise
    return Offline(folder(cache_dir))


def folder(cache_dir: Path | None) -> Path:
    """The cache folder. Raises ConfigError."""
    return load_settings({"cache_dir": cache_dir}, os.environ).cache_dir
