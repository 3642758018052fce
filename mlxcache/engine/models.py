"""The models of a server, one or several: an engine for each, on one MLX thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlxcache.cache.pressure import Pressure
from mlxcache.cache.shared_ram import SharedRam
from mlxcache.config import Settings
from mlxcache.config.models import ModelEntry, find_model, match_model
from mlxcache.engine.engine import Engine
from mlxcache.engine.figures import Figures, Memory, add_up
from mlxcache.engine.metrics import Records
from mlxcache.engine.opening import describe_unloaded, watch_pressure, weigh_files
from mlxcache.errors import BadRequest, ModelError, NotFound
from mlxcache.owner import OWNER
from mlxcache.ranks.group import Place
from mlxcache.residency.memory import open_shared_memory
from mlxcache.residency.residency import Rounds
from mlxcache.sessions.book import ModelSessions, SessionBook
from mlxcache.sessions.journal import Served
from mlxcache.store.database import TemporaryDatabase
from mlxcache.store.snapshot_format import wrong_model
from mlxcache.types import Arrival, RequestRecord

if TYPE_CHECKING:
    from mlxcache.remote.objects import Objects

log = logging.getLogger("mlxcache.engine")


class Models:
    """All models that a server offers, in the order of its settings. The first is the default.

    The default model is loaded by `start`, any other one when a request first names it. The
    arguments are those of `Engine`. Use from one event loop.
    """

    def __init__(
        self,
        settings: Settings,
        on_progress: Callable[[str, float | None], None] = lambda what, share: None,
        on_request: Callable[[RequestRecord], None] = lambda record: None,
        *,
        stall_s: float = 30.0,
        remote: Objects | None = None,
        place: Place | None = None,
    ):
        self.settings = settings
        self.entries: Sequence[ModelEntry] = settings.entries
        self._rounds, self._records = Rounds(), Records(on_request)
        database = TemporaryDatabase()
        self._memory: SharedRam | None = None
        self._pressure: Pressure | None = None
        several = len(self.entries) > 1
        self.engines = [
            Engine(
                settings.for_model(entry) if several else settings,
                on_progress if entry is self.entries[0] else _ignore,
                stall_s=stall_s,
                rounds=self._rounds,
                records=self._records,
                remote=remote,
                database=database,
                place=place,
            )
            for entry in self.entries
        ]
        self._file_bytes: dict[str, int | None] = {}
        self._sessions = SessionBook(self._opened, self._find_unopened, labelled=several)

    @property
    def default(self) -> Engine:
        return self.engines[0]

    async def start(self) -> None:
        """Load the default model. Raises ModelError or ConfigError if it cannot be served."""
        if len(self.engines) > 1:
            self._rounds.start()
            self._memory = await self._rounds.thread.ask(self._share)
        try:
            await self.default.start()
        except BadRequest as error:  # of a client for any other model
            raise ModelError(str(error)) from error
        if (memory := self._memory) is not None:
            thread = self._rounds.thread
            self._pressure = await thread.ask(lambda: watch_pressure(memory, thread, 0))
        for entry in self.entries[1:]:
            if entry.model is not None:
                size = await asyncio.to_thread(weigh_files, entry.label, entry.model)
                self._file_bytes[entry.label] = size

    def _share(self) -> SharedRam:
        """Open the memory that the models share. Runs on the MLX thread."""
        residency = self._rounds.residency
        memory = open_shared_memory(self.settings, residency.free_idle, residency.ceiling)
        residency.share(memory)
        return memory

    async def stop(self, seconds: float = 8.0) -> None:
        if self._pressure is not None:
            self._pressure.stop()
        await asyncio.gather(*(engine.stop(seconds) for engine in self.engines))

    # -- the model of a request --------------------------------------------------------------------

    async def of(self, requested: str | None, arrival: Arrival | None = None) -> Engine:
        """Return the engine of the model that a request names, after loading the model if needed.

        Unknown names get the default model, as all do until it is ready, and after the server has
        stopped or failed. The first load takes minutes if the model has to be downloaded. Raises
        the errors of `FirstLoad.join`, which describes `arrival`; the next call tries again.
        """
        engine = self.find(requested)
        if engine.state == "ready":
            return engine
        if self.default.state != "ready":
            return self.default
        await engine.first_load.join(arrival, engine.start)
        return engine

    def find(self, requested: str | None) -> Engine:
        return self.engines[match_model(requested, self.entries, self.settings.route)]

    def named(self, name: str) -> Engine:
        """Return the engine of the model with the name, id or alias `name`.

        Case is ignored if no name is exactly equal. Unlike `find`, ignores the setting `route` and
        raises NotFound for unknown names.
        """
        if (found := find_model(name, self.entries)) is not None:
            return self.engines[found]
        for engine in self.engines:
            if engine.info is not None and name == engine.info.id:
                return engine
        known = ", ".join(entry.label for entry in self.entries)
        raise NotFound(f"There is no model {name!r}; the models are {known}.")

    def of_record(self, record: RequestRecord) -> Engine:
        """Return the engine that served a recent request, or else the default one."""
        return next((one for one in self.engines if one.label == record.model), self.default)

    # -- sessions ----------------------------------------------------------------------------------

    @property
    def sessions(self) -> SessionBook:
        """Sessions of all models. Raises NotReady before the default model is loaded."""
        _ = self.default.book
        return self._sessions

    def _opened(self) -> Mapping[str, ModelSessions]:
        return {one.label: one.book for one in self.engines if one.state == "ready"}

    async def _find_unopened(self, namespace: str, name: str) -> tuple[str, Served]:
        """Find the model with this namespace among those that were never loaded.

        `namespace`, `name`: namespace and id of the model in a snapshot; a model with that id is
        tried first. Raises SnapshotRefused, with the namespaces of all models, if none is equal. A
        model does not match if its files are not on this machine or cannot be loaded.
        """
        opened = {label: one.model.snapshot_namespace for label, one in self._opened().items()}
        here = [f"{label} ({own[:8]})" for label, own in opened.items()]
        closed = [one for one in self.engines if one.state != "ready"]
        closed.sort(key=lambda one: one.settings.entries[0].id != name)
        for engine in closed:
            known = "not on this machine"
            try:
                served = await describe_unloaded(engine.settings, self._rounds.thread)
            except ModelError as error:
                log.warning(
                    "model %s: not compared with the model of a snapshot: "
                    "the model cannot be loaded: %s",
                    *(engine.label, error),
                )
                served, known = None, "cannot be loaded"
            if served is not None and served.namespace == namespace:
                return engine.label, served
            if served is not None:
                known = served.namespace[:8]
            here.append(f"{engine.label} ({known})")
        raise wrong_model(name, namespace, here)

    # -- figures -----------------------------------------------------------------------------------

    def requests(self) -> list[RequestRecord]:
        """Return the records of recent requests of the current API key, newest first."""
        records = self._records.all(OWNER.get())
        return [self.of_record(record).with_session(record) for record in records]

    def measure(self) -> Figures | None:
        """Return the figures of all models together; None until the default model is loaded.

        Waits for the disk: call in a worker thread.
        """
        figures, shared = self.default.measure(), self._memory
        if figures is None or shared is None:
            return figures
        budget = shared.budget
        others = [one for engine in self.engines[1:] if (one := engine.measure())]
        memory = Memory(budget.used, budget.limit, budget.high_water, budget.by_kind())
        total = add_up([figures, *others], memory, shared.by_kind())
        waiting = total.queue.waiting + sum(one.first_load.waiting for one in self.engines)
        return replace(
            total,
            queue=replace(total.queue, waiting=waiting),
            models=self.describe(),
            memory=memory,
            pressure=self._pressure.figures() if self._pressure is not None else total.pressure,
        )

    def figures(self) -> dict[str, Any]:
        """Return the response body of `GET /v1/cache`: figures of all models together.

        `models` and `memory` are not there if the server has one model only. Empty until the
        default model is loaded. Waits for the disk: call in a worker thread.
        """
        figures = self.measure()
        return figures.as_object() if figures is not None else {}

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of each model, as `GET /v1/models` shows it.

        `state` is that of `Engine.residence`, with its other keys, once the model was loaded. It is
        "loading" during the first load, with `progress` (see `Engine.load_share`), and "never"
        before, with `weights_bytes`, the size of its files, None if that is not known.
        """
        return [
            {
                "label": entry.label,
                "aliases": list(entry.aliases),
                "default": engine is self.default,
                **(engine.residence or self._state_before(engine)),
            }
            for entry, engine in zip(self.entries, self.engines, strict=True)
        ]

    def _state_before(self, engine: Engine) -> dict[str, Any]:
        if engine.first_load.state != "loading":
            return {"state": "never", "weights_bytes": self._file_bytes.get(engine.label)}
        return {"state": "loading", "progress": engine.load_share}


def _ignore(what: str, share: float | None) -> None: ...
