"""Target of a command: a running server or, without one, the cache folder.

Defines the options --url, --api-key and --cache-dir and how the target follows from them.
"""

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
from mlxcache.cli.own_command import own_command
from mlxcache.cli.show import Result
from mlxcache.config import load_settings
from mlxcache.config.folder import default_cache_dir
from mlxcache.errors import ConfigError

if TYPE_CHECKING:
    from mlxcache.cli.offline import Offline
    from mlxcache.cli.remote import Remote

URL_VARIABLE = "MLXCACHE_URL"

TARGET = "mlxcache.target"
"""Key in the context's `meta` of a target that the options of a group chose."""


def _where(metavar: str, help: str) -> Any:
    return typer.Option(metavar=metavar, rich_help_panel="Where", show_default=False, help=help)


Url = Annotated[
    str | None,
    _where("URL", f"The server; also {URL_VARIABLE}. Default: the one running on this machine."),
]
ApiKey = Annotated[
    str | None,
    _where("KEY", "The server's key. Safer in MLXCACHE_API_KEY than on the command line."),
]
CacheDir = Annotated[
    Path | None,
    _where(
        "DIR",
        "The cache folder, if no server runs; also MLXCACHE_CACHE_DIR. "
        "Default: the one of `serve`.",
    ),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, for programs.")]


def find_server(url: str | None, api_key: str | None, cache_dir: Path | None = None) -> Remote:
    """Find the running server. Blocks until it answers or a timeout of seconds passes.

    If `url` is given, only that address is tried. If `cache_dir` is given, the server must prove
    that it uses that folder, by an id that its note there has too. If both are None, only
    $MLXCACHE_URL is tried; if that is not set, servers that use the configured folder, or if that
    is the default folder and nobody uses it, any server at the configured address. The returned
    client sends `api_key`, or the configured key if that is None. Raises NoServer if no server
    answers, and ConfigError for wrong settings.
    """
    from mlxcache.cli.remote import NoServer, Remote  # noqa: PLC0415 - httpx takes a while
    from mlxcache.store.lock import servers  # noqa: PLC0415
    from mlxcache.store.mac_folder import locate_cache_dir  # noqa: PLC0415

    settings = load_settings({"cache_dir": cache_dir, "api_key": api_key}, os.environ)
    folder = locate_cache_dir(settings.cache_dir)
    asked = named_url(url, cache_dir)
    if asked and "://" not in asked:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8081, not {asked!r}")
    users = {one.id: one.url for one in servers(folder)}
    urls, anywhere = list(users.values()), False
    if asked:
        urls, anywhere = [asked], cache_dir is None
    elif cache_dir is None and not users and settings.cache_dir == default_cache_dir():
        urls, anywhere = [base_url(settings.host, settings.port)], True
    for one in urls:
        remote = Remote(one, next(iter(settings.api_key), None))
        health = remote.health()
        if health is not None and (anywhere or health.get("id") in users):
            return remote
    if asked:
        named = "--url" if url else URL_VARIABLE
        raise NoServer(
            f"No mlxcache server{f' that uses {folder}' if cache_dir else ''} answers at {asked}, "
            f"set by {named}: start one there, or remove {named}."
        )
    where = f"at {urls[-1]}" if urls else f"from {folder}"
    raise NoServer(f"No server runs {where}: start one with `{own_command()} serve`, or set --url.")


def named_url(url: str | None, cache_dir: Path | None) -> str | None:
    """Return the address given by --url or, without --cache-dir, by MLXCACHE_URL; else None."""
    return url or (os.environ.get(URL_VARIABLE) if cache_dir is None else None) or None


def find_target(url: str | None, api_key: str | None, cache_dir: Path | None) -> Remote | Offline:
    """Find the running server as `find_server` does, or open the cache folder if there is none.

    Raises NoServer if --url or MLXCACHE_URL names a server that does not answer.
    """
    from mlxcache.cli.offline import Offline  # noqa: PLC0415
    from mlxcache.cli.remote import NoServer  # noqa: PLC0415
    from mlxcache.store.mac_folder import locate_cache_dir  # noqa: PLC0415

    try:
        return find_server(url, api_key, cache_dir)
    except NoServer:
        if named_url(url, cache_dir):
            raise
    settings = load_settings({"cache_dir": cache_dir}, os.environ)
    return Offline(locate_cache_dir(settings.cache_dir))


Where = Any
"""A `Remote` or an `Offline`: they have the same methods."""


def located(
    command: Callable[..., Result], find: Callable[..., Where] = find_target
) -> Callable[..., None]:
    """Decorate a command: replace its parameter `where` by options that name the server or folder.

    These are --url, --api-key and --cache-dir; --json is added too. The wrapper passes the target
    that `find` returns for them as `where`, and prints the command's result. Options of the command
    override those of its group. If the group has put a target into the context's `meta`, under the
    key `TARGET`, that one is passed, and `find` is not called. A MlxcacheError is printed and ends
    the command.
    """
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        one.replace(annotation=hints[name])
        for name, one in signature.parameters.items()
        if name != "where"
    ]
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter("as_json", kind, default=False, annotation=Json),
        inspect.Parameter("ctx", kind, annotation=typer.Context),
        *(
            inspect.Parameter(name, kind, default=None, annotation=type)
            for name, type in (("url", Url), ("api_key", ApiKey), ("cache_dir", CacheDir))
        ),
    ]

    @functools.wraps(command)
    def run(
        ctx: typer.Context,
        as_json: bool = False,
        url: Any = None,
        api_key: Any = None,
        cache_dir: Any = None,
        **own: Any,
    ) -> None:
        group = ctx.obj or (None, None, None)
        chosen = (
            theirs if mine is None else mine
            for mine, theirs in zip((url, api_key, cache_dir), group, strict=True)
        )
        with reporting():
            where = ctx.meta[TARGET] if TARGET in ctx.meta else find(*chosen)
            command(where, **own).print(as_json=as_json)

    run.__signature__ = signature.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*parameters, *added)}
    return run
