"""Options that commands share: flags of settings, and the server or cache folder to use.

A flag's value is passed on as text. `load_settings` parses and checks it, so that a flag, its
variable and its key in config.toml have the same rules and the same error messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mlxcache.cli.connect import base_url, own_command
from mlxcache.cli.show import Result
from mlxcache.config import Settings, load_settings, parse_size
from mlxcache.config.flags import option, switch
from mlxcache.config.folder import default_cache_dir
from mlxcache.config.settings import CONFIG, FIRST, SETTINGS, Setting
from mlxcache.errors import ConfigError, MlxcacheError

if TYPE_CHECKING:
    from mlxcache.cli.offline import Offline
    from mlxcache.cli.remote import Remote

Flags = Mapping[str, Any]
"""Settings given as flags, by name. Values are text, lists of text, or True for a switch."""

URL_VARIABLE = "MLXCACHE_URL"

SERVICE = "MLXCACHE_SERVICE"
"""Variable that examples/service/mlxcache.plist sets."""

FRONT = "MLXCACHE_FRONT_PROCESS"
"""Variable with the id of the process that started mlx.launch; see `ranks.watch_launcher`."""

TARGET = "mlxcache.target"
"""Key in the context's `meta` of a target that the options of a group chose."""


Command = Callable[..., Result | None]
"""The function of a command: its result is printed, as JSON if its parameter `as_json` is true."""


def with_settings(*names: str, brief: bool = False) -> Callable[[Command], Command]:
    """Return a decorator that adds flags for settings, by default for all, to a command.

    They appear in the help at the position of the command's parameter `flags`, which receives those
    that were given. `brief`: the help lists only those under `FIRST`.
    """
    settings = [one for one in map(SETTINGS.__getitem__, names or SETTINGS) if not one.only_key]
    added = [
        Parameter(
            one.name,
            Parameter.KEYWORD_ONLY,
            default=_option(one, None, hidden=brief and one.panel != FIRST),
            annotation=_kind(one),
        )
        for one in settings
    ]

    def decorate(command: Command) -> Command:
        def run(**given: Any) -> Result | None:
            values = {one.name: given.pop(one.name) for one in settings}
            return command(flags=given_flags(values), **given)

        own, at = _parameters(command), list(signature(command).parameters).index("flags")
        return _presented(command, run, [*own[:at], *added, *own[at + 1 :]])

    return decorate


def given_flags(arguments: Mapping[str, Any]) -> Flags:
    """Return the settings that were given as flags, from a command's parsed arguments by name."""
    values = {name: value for name, value in arguments.items() if name in SETTINGS}
    return {name: value for name, value in values.items() if value not in (None, [], ())}


def _parameters(command: Callable[..., Any]) -> list[Parameter]:
    hints = get_type_hints(command, include_extras=True)
    own = signature(command).parameters.values()
    return [one.replace(annotation=hints[one.name]) for one in own]


def _presented(command: Command, run: Command, parameters: list[Parameter]) -> Command:
    """Return `run` as typer is to see it: as `command`, with these parameters."""

    @wraps(command)
    def presented(*given: Any, **named: Any) -> Result | None:
        return run(*given, **named)

    presented.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    presented.__annotations__ = {one.name: one.annotation for one in parameters}
    return presented


def _kind(setting: Setting) -> Any:
    if not setting.metavar:
        return bool | None
    return list[str] | None if setting.repeatable else str | None


def _option(setting: Setting, *default: Any, hidden: bool = False) -> Any:
    """Return typer's description of a flag; without a `default` if it is used in `Annotated`."""
    return typer.Option(
        *default,
        setting.flag,
        metavar=setting.metavar,
        help=setting.help,
        show_default=False,
        rich_help_panel=setting.panel,
        hidden=hidden,
        autocompletion=_complete_models if setting.name == "model" else None,
    )


def _complete_models(ctx: typer.Context, incomplete: str) -> list[str]:
    config = ctx.params.get("config")
    try:
        file = {CONFIG.variable: os.environ.get(CONFIG.variable, "")}
        settings = load_settings({}, file, Path(config) if config else None)
    except ConfigError:
        return []  # an error would be printed into the line being typed
    names = (name for one in settings.models for name in (one.label, *one.aliases))
    return [name for name in names if name.startswith(incomplete)]


Config = Annotated[Path | None, _option(CONFIG)]
Json = Annotated[bool, switch("Print JSON, for programs.", "--json")]


def read_input(file: Path) -> bytes:
    try:
        return typer.get_binary_stream("stdin").read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise MlxcacheError(f"{file} cannot be read: {error.strerror}.") from error


def positive_size(flag: str, text: str, what: str) -> int:
    """Parse the size that `flag` was given; it must be `what`, and not 0."""
    wrong = ConfigError(f"{flag} must be {what}, not {text!r}")
    try:
        size = parse_size(text, total=0)
    except ConfigError as error:
        raise wrong from error
    if not size:
        raise wrong
    return size


# -- the server or the cache folder ------------------------------------------------------------


Where = Any
"""A `Remote` or an `Offline`: they have the same methods."""


_where = partial(option, rich_help_panel="Where", show_default=False)

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


def find_server(url: str | None, api_key: str | None, cache_dir: Path | None = None) -> Remote:
    """Find the running server, or raise NoServer. Blocks until it answers or a timeout of seconds.

    If `url` is given, only that address is tried. If `cache_dir` is given, the server must prove
    that it uses that folder, by an id that its note there has too. If both are None, only
    $MLXCACHE_URL is tried; if that is not set, servers that use the configured folder, or if that
    is the default folder and nobody uses it, any server at the configured address.
    """
    from mlxcache.cli.remote import NoServer, Remote  # noqa: PLC0415 - takes 50 ms
    from mlxcache.store.lock import servers  # noqa: PLC0415

    settings = load_settings({"cache_dir": cache_dir, "api_key": api_key}, os.environ)
    folder = settings.cache_dir
    asked = named_url(url, cache_dir)
    users = {one.id: one.url for one in servers(folder)}
    urls, anywhere = list(users.values()), False
    if asked:
        urls, anywhere = [asked], cache_dir is None
    elif cache_dir is None and not users and folder == default_cache_dir():
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
    asked = url or (os.environ.get(URL_VARIABLE) if cache_dir is None else None) or None
    return f"http://{asked}" if asked and "://" not in asked else asked


def _open_folder(settings: Settings) -> Offline:
    from mlxcache.cli.offline import Offline  # noqa: PLC0415

    return Offline(settings.cache_dir)


def find_target(
    url: str | None,
    api_key: str | None,
    cache_dir: Path | None,
    without: Callable[[Settings], Where] = _open_folder,
) -> Where:
    """Find the running server as `find_server` does, else what is there `without` one."""
    from mlxcache.cli.remote import NoServer  # noqa: PLC0415

    try:
        return find_server(url, api_key, cache_dir)
    except NoServer:
        if named_url(url, cache_dir):
            raise
    return without(load_settings({"cache_dir": cache_dir}, os.environ))


def located(command: Command, find: Callable[..., Where] = find_target) -> Command:
    """Decorate a command: replace its parameter `where` by --url, --api-key and --cache-dir.

    The command gets the target that `find` returns for them, or the one that its group has put into
    the context's `meta` under `TARGET`. Options of the command override those of its group. --json
    is added too.
    """
    kind = Parameter.KEYWORD_ONLY
    added = [
        Parameter("as_json", kind, default=False, annotation=Json),
        Parameter("ctx", kind, annotation=typer.Context),
        Parameter("url", kind, default=None, annotation=Url),
        Parameter("api_key", kind, default=None, annotation=ApiKey),
        Parameter("cache_dir", kind, default=None, annotation=CacheDir),
    ]

    def run(
        ctx: typer.Context,
        url: Any = None,
        api_key: Any = None,
        cache_dir: Any = None,
        **more: Any,
    ) -> Result | None:
        del more["as_json"]
        group = ctx.obj or (None, None, None)
        chosen = (
            theirs if mine is None else mine
            for mine, theirs in zip((url, api_key, cache_dir), group, strict=True)
        )
        where = ctx.meta[TARGET] if TARGET in ctx.meta else find(*chosen)
        return command(where, **more)

    own = [one for one in _parameters(command) if one.name != "where"]
    return _presented(command, run, [*own, *added])


def list_by_default(app: typer.Typer, listing: Command, help: str) -> None:
    """Give a group the options of `located`, and run its command `listing` without another one."""

    @app.callback(help=f"{help}\n\nWithout a command, list them.")
    def group(
        ctx: typer.Context,
        *,
        as_json: Json = False,
        url: Url = None,
        api_key: ApiKey = None,
        cache_dir: CacheDir = None,
    ) -> Result | None:
        ctx.obj = (url, api_key, cache_dir)
        return None if ctx.invoked_subcommand else listing(ctx, as_json=as_json)
