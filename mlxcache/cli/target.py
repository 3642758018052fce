"""Where a command goes: to the server that runs, or to the cache folder if none does."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mlxcache.cli.connect import base_url
from mlxcache.cli.output import reporting
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

    By `url`, else the one that serves from `cache_dir`. With neither: by MLXCACHE_URL, else the one
    that serves from the usual folder, else the usual address.
    """
    from mlxcache.cli.remote import NoServer, Remote  # noqa: PLC0415 - httpx takes a while
    from mlxcache.store.lock import servers  # noqa: PLC0415

    settings = load_settings({"cache_dir": cache_dir, "api_key": api_key}, os.environ)
    asked = _asked(url, cache_dir)
    if asked and "://" not in asked:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8081, not {asked!r}")
    urls = [asked] if asked else [one.url for one in servers(settings.cache_dir)]
    if not asked and cache_dir is None:
        urls.append(base_url(settings.host, settings.port))
    for one in urls:
        remote = Remote(one, next(iter(settings.api_key), None))
        if remote.answers():
            return remote
    if asked:
        named = "--url" if url else URL_VARIABLE
        raise NoServer(
            f"No mlxcache server answers at {asked}, which {named} names: start one there, or "
            f"leave {named} out."
        )
    where = f"at {urls[-1]}" if urls else f"from {settings.cache_dir}"
    raise NoServer(f"No server serves {where}: start one with mlxcache serve, or name it by --url.")


def _asked(url: str | None, cache_dir: Path | None) -> str | None:
    """The address that a person gave: by flag, or by variable where no flag names a folder."""
    return url or (os.environ.get(URL_VARIABLE) if cache_dir is None else None) or None


def target(url: str | None, api_key: str | None, cache_dir: Path | None) -> Remote | Offline:
    """The running server, else the cache folder as it lies on disk.

    Raises NoServer where a server was named, by --url or MLXCACHE_URL, and does not answer.
    """
    from mlxcache.cli.offline import Offline  # noqa: PLC0415
    from mlxcache.cli.remote import NoServer  # noqa: PLC0415

    try:
        return server(url, api_key, cache_dir)
    except NoServer:
        if _asked(url, cache_dir):
            raise
    return Offline(folder(cache_dir))


def folder(cache_dir: Path | None) -> Path:
    """The cache folder. Raises ConfigError."""
    return load_settings({"cache_dir": cache_dir}, os.environ).cache_dir


Where = Any
"""A `Remote` or an `Offline`: they have the same methods."""


def located(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes --url, --api-key and --cache-dir, and is given `where` they lead.

    Options of its group count where it has none of its own. What it raises is reported.
    """
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        one.replace(annotation=hints[name])
        for name, one in signature.parameters.items()
        if name != "where"
    ]
    kind = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("ctx", kind, annotation=typer.Context)
    added = [
        inspect.Parameter(name, kind, default=None, annotation=type)
        for name, type in (("url", Url), ("api_key", ApiKey), ("cache_dir", CacheDir))
    ]

    @functools.wraps(command)
    def run(
        ctx: typer.Context, url: Any = None, api_key: Any = None, cache_dir: Any = None, **own: Any
    ) -> None:
        before = ctx.obj or (None, None, None)
        chosen = (
            theirs if mine is None else mine
            for mine, theirs in zip((url, api_key, cache_dir), before, strict=True)
        )
        with reporting():
            command(target(*chosen), **own)

    run.__signature__ = signature.replace(parameters=[*parameters, context, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*parameters, context, *added)}
    return run
