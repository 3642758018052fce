"""The commands `mlxcache models`: list, load, unload, download and remove models."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from mlxcache.cli import show
from mlxcache.cli.connect import own_command
from mlxcache.cli.help import App
from mlxcache.cli.options import (
    CacheDir,
    Json,
    Where,
    find_server,
    find_target,
    list_by_default,
    located,
)
from mlxcache.cli.output import (
    Yes,
    byte_bar,
    confirm,
    console,
    count_bar,
    require_terminal_or_yes,
    visible,
)
from mlxcache.cli.show import Column, Result
from mlxcache.config import Settings, format_size, load_settings
from mlxcache.config.flags import argument, option
from mlxcache.config.models import model_id
from mlxcache.errors import ConfigError, MlxcacheError
from mlxcache.store.lock import NAME, Serving, servers

if TYPE_CHECKING:
    from mlxcache.model.hub import Downloaded

app = App(name="models", invoke_without_command=True, add_completion=False)

_POLL_S = 0.2

_WAIT_S = 10.0
"""Seconds to wait until a server begins to load a model, whose memory others may use."""


def complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete names of models of the settings, and of running servers by their notes."""
    # Here and not above: a shell that completes something else need not wait for it.
    from mlxcache.store.lock import servers  # noqa: PLC0415

    try:
        settings = load_settings({"cache_dir": ctx.params.get("cache_dir")}, os.environ)
    except ConfigError:
        return []  # the command itself says what is wrong
    served = (name for one in servers(settings.cache_dir) for name in one.names)
    known = (name for one in settings.models for name in one.names)
    return [name for name in dict.fromkeys((*served, *known)) if name.startswith(incomplete)]


def complete_downloaded(incomplete: str) -> list[str]:
    from huggingface_hub import constants  # noqa: PLC0415 - as above

    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
    ids = [one.name.removeprefix("models--").replace("--", "/", 1) for one in folders]
    return [id for id in ids if id.startswith(incomplete)]


Name = Annotated[
    str,
    argument("NAME", "A model's name or alias.", autocompletion=complete_name),
]


# -- list --------------------------------------------------------------------------------------


class LocalModels:
    """The models of the settings, and others that were downloaded into the Hub's cache."""

    def __init__(self, settings: Settings):
        self._settings = settings

    def models(self) -> list[dict[str, Any]]:
        from mlxcache.model import hub  # noqa: PLC0415 - mlx-lm takes seconds to import

        downloaded = {one.id: one for one in hub.list_downloaded()}
        found = []
        for number, entry in enumerate(self._settings.entries):
            if entry.model is None:
                continue
            path, problem = hub.inspect_folder(entry.model)
            one = _model_object(entry.label, entry.id, downloaded.get(model_id(entry.model))) | {
                "configured": True,
                "default": not number,
                "aliases": list(entry.aliases),
                "context_length": entry.context or self._settings.context,
                "path": None if path is None else str(path),
                "problem": problem,
            }
            if path is not None:
                one["disk_bytes"] = one["disk_bytes"] or hub.folder_bytes(path)
            found.append(one)
        named = {one["model"] for one in found}
        return found + [
            _model_object(one.id, one.id, one) | {"path": str(one.path)}
            for one in downloaded.values()
            if one.id not in named
        ]


def _model_object(name: str, model: str, downloaded: Downloaded | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "model": model,
        "configured": False,
        "default": False,
        "aliases": [],
        "context_length": None,
        "path": None,
        "disk_bytes": downloaded.nbytes if downloaded else None,
        "last_used_at": downloaded.last_used_at if downloaded else None,
        "problem": None,
    }


@app.command("list")
@partial(located, find=partial(find_target, without=LocalModels))
def list_models(where: Where) -> Result:
    """List the models of a running server.

    Without a server: those of the settings, and those that were downloaded from the Hub.
    """
    found = where.models()
    listed = {"object": "list", "data": found}
    if not found:
        text = f"No model was downloaded yet: `{own_command()} models pull HUB_ID` does that."
        return Result(listed, text)
    columns, cut = (_LOCAL, 2) if isinstance(where, LocalModels) else (_SERVED, 6)
    return Result(listed, partial(_print_models, found, columns, cut))


list_by_default(
    app,
    list_models,
    "List models, load and unload those of a running server, download and remove them.",
)


def _print_models(models: list[dict[str, Any]], columns: Sequence[Column], cut: int) -> None:
    show.print_objects(columns, models, cut=cut)
    for one in models:
        if one.get("problem"):
            console().print(visible(f"{one['id']}: {one['problem']}"))


def _reserved(one: dict[str, Any]) -> str:
    size = one.get("size_bytes")
    return "-" if size is None else format_size(size - one["weights_bytes"])


def _on_disk(one: dict[str, Any]) -> str:
    if one["disk_bytes"]:
        return format_size(one["disk_bytes"])
    return "damaged" if one["problem"] else "not downloaded"


def _length(one: dict[str, Any]) -> str:
    return f"{one['context_length']:,}" if one.get("context_length") else "-"


_DEFAULT: Column = ("default", "left", lambda one: "yes" if one.get("default") else "")
_CONTEXT: Column = ("context", "right", _length)
_ALIASES: Column = ("aliases", "left", lambda one: ", ".join(one.get("aliases", ())) or "-")
_SERVED: tuple[Column, ...] = (
    ("name", "left", lambda one: one["id"]),
    _DEFAULT,
    ("state", "left", lambda one: show.model_state({**one, "unloaded_for": None})),
    ("weights", "right", lambda one: show.format_size_or_dash(one.get("weights_bytes"))),
    ("reserved to compute", "right", _reserved),
    _CONTEXT,
    _ALIASES,
    ("unloaded because", "left", lambda one: show.unloaded_because(one) or "-"),
)
_LOCAL: tuple[Column, ...] = (
    ("name", "left", lambda one: one["id"]),
    _DEFAULT,
    ("model", "left", lambda one: one["model"]),
    ("on disk", "right", _on_disk),
    (
        "last used",
        "right",
        lambda one: show.format_age(one["last_used_at"]) if one["last_used_at"] else "-",
    ),
    _CONTEXT,
    _ALIASES,
)


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
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"models {command} takes a Hub id such as org/name, not {model!r}")


@app.command()
def pull(
    model: Annotated[str, argument("HUB_ID", "A model on the Hub, such as org/name.")],
    *,
    revision: Annotated[
        str | None,
        option("REVISION", "A branch, tag or commit on the Hub."),
    ] = None,
    as_json: Json = False,
) -> Result:
    """Download a model from the Hub and check its files.

    Only the files that serving needs are downloaded, into the Hub's own cache. If a download was
    interrupted, the same command continues it.
    """
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
    return Result({**found, "disk_bytes": size}, text)


@app.command()
def rm(
    model: Annotated[
        str,
        argument("HUB_ID", "A model in the Hub's cache.", autocompletion=complete_downloaded),
    ],
    *,
    yes: Yes = False,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> Result:
    """Remove a model from the Hub's cache, in all its revisions.

    Asks for confirmation, unless --yes is given. A model that a running server of yours serves is
    not removed.
    """
    _require_hub_id(model, "rm")
    require_terminal_or_yes(yes=yes)
    from mlxcache.model import hub  # noqa: PLC0415 - mlx-lm takes seconds to import

    settings = load_settings({"cache_dir": cache_dir}, os.environ)
    found = hub.find_removal(model)
    if serving := servers_of(model, settings.cache_dir):
        raise MlxcacheError(
            f"The server at {serving[0].url} (process {serving[0].pid}) serves {model}: stop "
            "it first."
        )
    size = format_size(found.nbytes)
    confirm(f"Remove {model}, {size} in {found.folder}?", yes=yes)
    hub.remove(found)
    removed = {"id": model, "object": "model", "deleted": True, "freed_bytes": found.nbytes}
    return Result(removed, f"Removed: {model}, freed {size}")


# -- models on this machine --------------------------------------------------------------------


def servers_of(model: str, folder: Path) -> list[Serving]:
    """Return the running servers of this user that serve `model`, a Hub id.

    They are looked for in the cache `folder`, and in those whose lock file a running mlxcache
    process of this user has open.
    """
    found = {one for each in {folder, *_served_folders()} for one in servers(each)}
    return [
        one for one in found if model in {model_id(path) for path in (one.models or [one.model])}
    ]


def _served_folders() -> Iterator[Path]:
    user = os.getuid()
    for process in psutil.process_iter():
        try:
            mine = process.uids().real == user
            if not mine or not any("mlxcache" in word for word in process.cmdline()):
                continue
            for file in process.open_files():
                if Path(file.path).name == NAME:
                    yield Path(file.path).parent
        except (psutil.Error, OSError):  # it ended, or the system does not allow the query
            continue
