"""Models on this machine: those of the settings, those in the Hub's cache, those being served."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from mlxcache.config import Settings
from mlxcache.config.models import ModelEntry, model_id
from mlxcache.model import hub
from mlxcache.store.lock import NAME, Serving, servers

_PROGRAM = "mlxcache"


class LocalModels:
    """The models that `mlxcache models list` shows without a server.

    They are those of the settings, and those that were downloaded into the Hub's cache.
    """

    def __init__(self, settings: Settings):
        self._settings = settings

    def models(self) -> list[dict[str, Any]]:
        """Return an object for each model: those of the settings, then others in the Hub's cache.

        `id` is the name under which a server lists the model, and `model` its Hub id, or the name
        of its folder. `configured` is True for those of the settings. `path` is the folder, and
        `disk_bytes` its size; both are None if the model is not on this machine. `problem` says why
        a model of the settings cannot be served, or is None. The other keys are `object`,
        `default`, `aliases`, `context_length`, and `last_used_at` in seconds since 1970 or None.
        """
        downloaded = {one.id: one for one in hub.list_downloaded()}
        entries = self._settings.entries
        found = [
            self._configured(entry, downloaded, default=entry is entries[0])
            for entry in entries
            if entry.model is not None
        ]
        named = {one["model"] for one in found}
        return found + [
            _model_object(one.id, one.id)
            | {"path": str(one.path), "disk_bytes": one.nbytes, "last_used_at": one.last_used_at}
            for one in downloaded.values()
            if one.id not in named
        ]

    def _configured(
        self, entry: ModelEntry, downloaded: dict[str, hub.Downloaded], *, default: bool
    ) -> dict[str, Any]:
        assert entry.model is not None
        one = downloaded.get(model_id(entry.model))
        found = _model_object(entry.label, entry.id) | {
            "configured": True,
            "default": default,
            "aliases": list(entry.aliases),
            "context_length": entry.context or self._settings.context,
        }
        if one is not None:
            found |= {"disk_bytes": one.nbytes, "last_used_at": one.last_used_at}
        path, found["problem"] = hub.inspect_folder(entry.model)
        if path is not None:
            found["path"] = str(path)
            found["disk_bytes"] = found["disk_bytes"] or hub.folder_bytes(path)
        return found


def _model_object(name: str, model: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "model": model,
        "configured": False,
        "default": False,
        "aliases": [],
        "context_length": None,
        "path": None,
        "disk_bytes": None,
        "last_used_at": None,
        "problem": None,
    }


def servers_of(model: str, *folders: Path) -> list[Serving]:
    """Return the running servers of this user that serve `model`, a Hub id.

    Servers are looked for in the cache `folders`, and in the cache folders whose lock file a
    running mlxcache process of this user has open.
    """
    found = {one for folder in {*folders, *_served_folders()} for one in servers(folder)}
    return [
        one for one in found if model in {model_id(path) for path in (one.models or [one.model])}
    ]


def _served_folders() -> Iterator[Path]:
    """Yield the cache folders of this user's running servers."""
    user = os.getuid()
    for process in psutil.process_iter():
        try:
            mine = process.uids().real == user
            if not mine or not any(_PROGRAM in word for word in process.cmdline()):
                continue
            for file in process.open_files():
                if Path(file.path).name == NAME:
                    yield Path(file.path).parent
        except (psutil.Error, OSError):  # it ended, or the system does not allow the query
            continue
