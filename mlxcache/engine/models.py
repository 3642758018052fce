"""The models of a server: one engine for each, on one MLX thread. Use from one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from mlxcache.config import Settings
from mlxcache.config.models import ModelEntry, match_model
from mlxcache.engine.engine import Engine
from mlxcache.engine.metrics import Records
from mlxcache.engine.rounds import Rounds
from mlxcache.errors import NotFound
from mlxcache.types import RequestRecord


class Models:
    """All models that a server offers, in the order of its settings. The first is the default.

    The default model is loaded by `start`, any other one when a request first names it. The
    arguments are those of `Engine`.
    """

    def __init__(
        self,
        settings: Settings,
        on_progress: Callable[[str, float | None], None] = lambda what, share: None,
        on_request: Callable[[RequestRecord], None] = lambda record: None,
        *,
        stall_s: float = 30.0,
    ):
        self.settings = settings
        self.entries: Sequence[ModelEntry] = settings.entries
        rounds, records = Rounds(), Records(on_request)
        self.engines = [
            Engine(
                settings.for_model(entry) if len(self.entries) > 1 else settings,
                on_progress,
                stall_s=stall_s,
                rounds=rounds,
                records=records,
            )
            for entry in self.entries
        ]
        self._opening: dict[Engine, asyncio.Task[None]] = {}

    @property
    def default(self) -> Engine:
        """The engine of the default model."""
        return self.engines[0]

    async def start(self) -> None:
        """Load the default model. Raises ModelError or ConfigError if it cannot be served."""
        await self.default.start()

    async def stop(self, seconds: float = 8.0) -> None:
        """End all requests and the MLX thread, waiting at most `seconds`."""
        for task in self._opening.values():
            task.cancel()
        await asyncio.gather(*(engine.stop(seconds) for engine in self.engines))

    async def of(self, requested: str | None) -> Engine:
        """Return the engine of the model that a request names, after loading it for the first time.

        `requested`: the model's name in the request. Unknown names get the default model. Waits
        while the model is loaded, for minutes if it has to be downloaded. Raises ModelError if it
        cannot be loaded; the next call tries again.
        """
        engine = self.find(requested)
        if engine is self.default or engine.state == "ready":
            return engine
        if engine not in self._opening:
            self._opening[engine] = asyncio.create_task(engine.start())
        opening = self._opening[engine]
        try:
            await asyncio.shield(opening)
        finally:
            if opening.done():
                self._opening.pop(engine, None)
        return engine

    def find(self, requested: str | None) -> Engine:
        """Return the engine of the model that a request names; unknown names get the default."""
        return self.engines[match_model(requested, self.entries, self.settings.route)]

    def named(self, name: str) -> Engine:
        """Return the engine of the model `name`, its id or alias. Raises NotFound for others."""
        for entry, engine in zip(self.entries, self.engines, strict=True):
            if name in entry.names or (engine.info is not None and name == engine.info.id):
                return engine
        known = ", ".join(entry.label for entry in self.entries)
        raise NotFound(f"There is no model {name!r}; the models are {known}.")

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of each model, as `GET /v1/models` shows it in `mlxcache`.

        `label`: its name. `aliases`: further names. `state`: "loaded", "loading", "unloaded", or
        "never" if it was not loaded yet; the other keys are those of `Engine.residence`.
        """
        return [
            {
                "label": entry.label,
                "aliases": list(entry.aliases),
                "default": engine is self.default,
                **(engine.residence or {"state": "never"}),
            }
            for entry, engine in zip(self.entries, self.engines, strict=True)
        ]
