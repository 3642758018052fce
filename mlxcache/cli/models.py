"""The commands `mlxcache models`: list, load, unload, download and remove models."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxcache.cli import show
from mlxcache.cli.confirm import Yes, confirm, require_terminal_or_yes
from mlxcache.cli.output import console, reporting, visible
from mlxcache.cli.own_command import own_command
from mlxcache.cli.progress import byte_bar, count_bar
from mlxcache.cli.show import Result
from mlxcache.cli.target import ApiKey, CacheDir, Json, Url, Where, find_server, located
from mlxcache.config import format_size, load_settings
from mlxcache.errors import ConfigError, MlxcacheError

app = typer.Typer(
    name="models",
    help="List models, load and unload those of a running server, download and remove them.",
    invoke_without_command=True,
    add_completion=False,
)

_POLL_S = 0.2

_WAIT_S = 10.0
"""Seconds to wait until a server begins to load a model, whose memory others may use."""


def complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of models that begin with `incomplete`: of running servers and of the settings.

    Reads the files in which running servers describe themselves, in the cache folder; sends no
    request.
    """
    # Here and not above: a shell that completes something else need not wait for it.
    from mlxcache.store.lock import servers  # noqa: PLC0415
    from mlxcache.store.mac_folder import locate_cache_dir  # noqa: PLC0415

    try:
        settings = load_settings({"cache_dir": ctx.params.get("cache_dir")}, os.environ)
    except ConfigError:
        return []  # the command itself says what is wrong
    served = (name for one in servers(locate_cache_dir(settings.cache_dir)) for name in one.names)
    known = (name for one in settings.models for name in one.names)
    return [name for name in dict.fromkeys((*served, *known)) if name.startswith(incomplete)]


def complete_downloaded(incomplete: str) -> list[str]:
    """Return ids of models in the Hub's cache that begin with `incomplete`."""
    from huggingface_hub import constants  # noqa: PLC0415 - as above

    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
    ids = [one.name.removeprefix("models--").replace("--", "/", 1) for one in folders]
    return [id for id in ids if id.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A model's name or alias.", autocompletion=complete_name),
]


@app.callback()
def models(
    ctx: typer.Context,
    *,
    as_json: Json = False,
    url: Url = None,
    api_key: ApiKey = None,
    cache_dir: CacheDir = None,
) -> None:
    """List models, load and unload those of a running server, download and remove them.

    Without a command, list them.
    """
    ctx.obj = (url, api_key, cache_dir)
    if ctx.invoked_subcommand is None:
        list_models(ctx, as_json=as_json)


# -- list --------------------------------------------------------------------------------------


def _find_models(url: str | None, api_key: str | None, cache_dir: Path | None) -> Any:
    """Return an object whose method `models` returns the models that `models list` prints.

    It is a `Remote` for the running server or, if there is none, a `LocalModels` for the models on
    this machine. The arguments are as in `find_server`. Raises NoServer if --url or MLXCACHE_URL
    names a server that does not answer.
    """
    from mlxcache.cli.remote import NoServer  # noqa: PLC0415 - httpx takes a while
    from mlxcache.cli.target import named_url  # noqa: PLC0415

    try:
        return find_server(url, api_key, cache_dir)
    except NoServer:
        if named_url(url, cache_dir):
            raise
    from mlxcache.cli.local_models import LocalModels  # noqa: PLC0415 - mlx-lm takes seconds

    return LocalModels(load_settings({"cache_dir": cache_dir}, os.environ))


@app.command("list")
@partial(located, find=_find_models)
def list_models(where: Where) -> Result:
    """List the models of a running server.

    Without a server: those of the settings, and those that were downloaded from the Hub.
    """
    from mlxcache.cli.remote import Remote  # noqa: PLC0415 - httpx takes a while

    found = where.models()
    listed = {"object": "list", "data": found}
    if not found:
        text = f"No model was downloaded yet: `{own_command()} models pull HUB_ID` does that."
        return Result(listed, text)
    print_models = _print_served if isinstance(where, Remote) else _print_local
    return Result(listed, partial(print_models, found))


def _print_served(models: Iterable[dict[str, Any]]) -> None:
    columns = (
        ("name", "left"),
        ("default", "left"),
        ("state", "left"),
        ("memory", "right"),
        ("context", "right"),
        ("aliases", "left"),
        ("unloaded because", "left"),
    )
    show.print_table(columns, map(_served_row, models), cut=5)


def _served_row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["id"],
        "yes" if one.get("default") else "",
        show.model_state({**one, "unloaded_for": None}),
        _memory_or_least(one),
        _length(one),
        ", ".join(one.get("aliases", ())) or "-",
        show.unloaded_because(one) or "-",
    )


def _memory_or_least(one: dict[str, Any]) -> str:
    """Return the memory that a model takes when loaded, as text; before its first load, a minimum.

    `one`: its object in `GET /v1/models`.
    """
    least = one.get("weights_bytes")
    if one.get("size_bytes") is None and least:
        return f"over {format_size(least)}"
    return show.format_size_or_dash(one.get("size_bytes"))


def _print_local(models: list[dict[str, Any]]) -> None:
    columns = (
        ("name", "left"),
        ("default", "left"),
        ("model", "left"),
        ("on disk", "right"),
        ("last used", "right"),
        ("context", "right"),
        ("aliases", "left"),
    )
    show.print_table(columns, map(_local_row, models), cut=2)
    for one in models:
        if one["problem"]:
            console().print(visible(f"{one['id']}: {one['problem']}"))


def _local_row(one: dict[str, Any]) -> tuple[str, ...]:
    used = one["last_used_at"]
    absent = "damaged" if one["problem"] else "not downloaded"
    return (
        one["id"],
        "yes" if one["default"] else "",
        one["model"],
        format_size(one["disk_bytes"]) if one["disk_bytes"] else absent,
        "-" if used is None else show.format_age(used),
        _length(one),
        ", ".join(one["aliases"]) or "-",
    )


def _length(one: dict[str, Any]) -> str:
    return f"{one['context_length']:,}" if one.get("context_length") else "-"


# -- load and unload ---------------------------------------------------------------------------


@app.command()
@partial(located, find=find_server)
def load(where: Where, name: Name) -> Result:
    """Load a model of a running server, ahead of its first request.

    Waits until the model is loaded. If busy models hold the memory that it needs, the command ends
    earlier, and the server loads the model as soon as there is enough.
    """
    with count_bar(f"loading {name}"):
        before = where.load_model(name)
        found = _wait_until_loaded(where, before)
    if found["state"] == "loaded":
        return Result(found, f"Loaded: {found['id']}, {_memory(found)}")
    text = f"Waiting for memory: {found['id']} is loaded as soon as busy models leave enough of it."
    return Result(found, text)


def _wait_until_loaded(where: Where, begun: dict[str, Any]) -> dict[str, Any]:
    """Wait until the server `where` has loaded a model; return its object in `GET /v1/models`.

    Returns that earlier if the model waits for memory that busy models hold. `begun`: the model's
    object when the load began. Raises MlxcacheError if the load fails.
    """
    found, was_loading, end = begun, False, time.monotonic() + _WAIT_S
    while found["state"] != "loaded":
        if found["loads"] > begun["loads"]:
            return {**found, "state": "loaded"}  # and was unloaded since, to make room
        if found["state"] == "loading":
            was_loading = True
        elif was_loading:
            raise MlxcacheError(f"{found['id']} could not be loaded: the server's log says why.")
        elif time.monotonic() > end:
            break
        time.sleep(_POLL_S)
        found = next(one for one in where.models() if one["id"] == begun["id"])
    return found


@app.command()
@partial(located, find=find_server)
def unload(where: Where, name: Name) -> Result:
    """Free the memory of a model of a running server; its next request loads it again.

    Fails with exit status 1 while requests for the model run.
    """
    found = where.unload_model(name)
    if found["state"] == "never":
        return Result(found, f"{found['id']} was not loaded.")
    return Result(found, f"Unloaded: {found['id']}, {_memory(found)}")


def _memory(one: dict[str, Any]) -> str:
    return f"{format_size(one['size_bytes'])} of memory"


# -- the Hub's cache ---------------------------------------------------------------------------


def _require_hub_id(model: str, command: str) -> None:
    """Raise ConfigError if `model`, an argument of `models COMMAND`, is no id of the Hub."""
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"models {command} takes a Hub id such as org/name, not {model!r}")


@app.command()
def pull(
    model: Annotated[
        str, typer.Argument(metavar="HUB_ID", help="A model on the Hub, such as org/name.")
    ],
    *,
    revision: Annotated[
        str | None,
        typer.Option(metavar="REVISION", help="A branch, tag or commit on the Hub."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a model from the Hub and check its files.

    Only the files that serving needs are downloaded, into the Hub's own cache. If a download was
    interrupted, the same command continues it.
    """
    with reporting():
        _require_hub_id(model, "pull")
        if Path(model).is_dir():
            raise ConfigError(
                f"{model} is a folder here, which `serve --model {model}` would serve in place of "
                "a download: call `models pull` in another folder"
            )
        from mlxcache.model import hub  # noqa: PLC0415 - mlx-lm takes seconds to import

        with byte_bar(f"downloading {model}") as progress:
            path = hub.pull(model, revision, progress)
        size = hub.folder_bytes(path)
    named = model if revision is None else str(path)
    found = {"id": model, "object": "model", "path": str(path), "revision": path.name}
    text = (
        f"Complete: {model}, {format_size(size)} in {path}\n"
        f"It serves offline: {own_command()} serve --model {named}"
    )
    Result({**found, "disk_bytes": size}, text).print(as_json=as_json)


@app.command()
def rm(
    model: Annotated[
        str,
        typer.Argument(
            metavar="HUB_ID",
            help="A model in the Hub's cache.",
            autocompletion=complete_downloaded,
        ),
    ],
    *,
    yes: Yes = False,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Remove a model from the Hub's cache, in all its revisions.

    Asks for confirmation, unless --yes is given. A model that a running server of yours serves is
    not removed.
    """
    with reporting():
        _require_hub_id(model, "rm")
        require_terminal_or_yes(yes=yes)
        from mlxcache.cli.local_models import servers_of  # noqa: PLC0415 - imports mlx-lm
        from mlxcache.model import hub  # noqa: PLC0415 - as above
        from mlxcache.store.mac_folder import locate_cache_dir  # noqa: PLC0415

        settings = load_settings({"cache_dir": cache_dir}, os.environ)
        found = hub.find_removal(model)
        if serving := servers_of(model, locate_cache_dir(settings.cache_dir)):
            raise MlxcacheError(
                f"The server at {serving[0].url} (process {serving[0].pid}) serves {model}: stop "
                "it first."
            )
        size = format_size(found.nbytes)
        confirm(f"Remove {model}, {size} in {found.folder}?", yes=yes)
        hub.remove(found)
    removed = {"id": model, "object": "model", "deleted": True, "freed_bytes": found.nbytes}
    Result(removed, f"Removed: {model}, freed {size}").print(as_json=as_json)
