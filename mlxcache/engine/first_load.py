"""The first load of a model: its files, memory for its weights, and the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from traceback import clear_frames

from mlxcache.config import Settings
from mlxcache.engine.opening import demo_spec, fetch_model, hash_files
from mlxcache.model import hub, load
from mlxcache.model.weights import BaseUse, Weights
from mlxcache.ranks.rank_zero import RankZero
from mlxcache.residency.memory import fewest_reserved
from mlxcache.residency.residency import Rounds
from mlxcache.residency.resident import Newcomer, release_unused

Serve = Callable[[load.Loaded, Weights], None]


class FirstLoad:
    """Loads one model for the first time. Use from the event loop, once.

    `share`: the part that is done of the current step, a download or reading the weights, from 0 to
    1; None while the model waits for memory, and when nothing is being loaded.
    """

    def __init__(
        self,
        settings: Settings,
        rounds: Rounds,
        ranks: RankZero | None,
        on_progress: Callable[[str, float | None], None],
    ):
        self.share: float | None = None
        self.awaits_room = False
        self._settings, self._rounds, self._ranks = settings, rounds, ranks
        self._on_progress = on_progress
        self._served = False

    async def run(self, pool: Executor, serve: Serve) -> None:
        """Fetch the files, wait for memory, read the weights and call `serve` on the MLX thread.

        Raises ModelError, ConfigError or BadRequest if the model cannot be served, and what `serve`
        raises; the memory of the weights is released then.
        """
        self.share = 0.0
        try:
            spec = await self._fetch(pool)
            await self._read(spec, await self._await_room(pool, spec), serve)
        finally:
            self.share = None

    async def _fetch(self, pool: Executor) -> load.ModelSpec:
        loop = asyncio.get_running_loop()
        fetched = await loop.run_in_executor(pool, fetch_model, self._settings, self.report)
        self._rounds.start()
        if fetched is None:
            fetched = await self._rounds.thread.ask(lambda: demo_spec(self._settings))
        # other ranks have no part in images, and mlx-lm divides models
        spec = fetched if self._ranks is None else replace(fetched, images=False)
        if self._rounds.residency.memory is not None:  # else nobody waits for the thread
            await loop.run_in_executor(pool, lambda: hash_files(spec, self._settings))
        return spec

    def report(self, what: str, share: float | None) -> None:
        if share is not None:
            self.share = share
        self._on_progress(what, share)

    async def _await_room(self, pool: Executor, spec: load.ModelSpec) -> Newcomer:
        """Wait until there is memory for the weights, and charge their bytes to the shared budget.

        Does not wait if no other models share the memory. Raises BadRequest if there can never be
        enough.
        """
        loop, thread = asyncio.get_running_loop(), self._rounds.thread
        residency = self._rounds.residency
        use = BaseUse(residency.account.bases, self._settings.entries[0].label)
        if residency.memory is None:
            return Newcomer(use, on_read=self._note_read)
        size = await loop.run_in_executor(pool, load.estimate_bytes, spec)
        folders = await loop.run_in_executor(pool, load.base_folders, spec)
        reserved = fewest_reserved(residency.memory.limit - size)
        newcomer = Newcomer(use, folders, size, reserved, self._note_read)
        thread.post(lambda: residency.welcome(newcomer))
        self.share, self.awaits_room = None, True
        try:
            await asyncio.wrap_future(newcomer.room)
        except asyncio.CancelledError:
            thread.post(residency.note_left)
            thread.post(lambda: self._give_up(use))  # the memory may have been charged
            raise
        finally:
            self.awaits_room = False
        return newcomer

    def _note_read(self, share: float) -> None:
        self.report("loading the weights", share)

    async def _read(self, spec: load.ModelSpec, newcomer: Newcomer, serve: Serve) -> None:
        thread, residency = self._rounds.thread, self._rounds.residency
        self.share = 0.0
        self.report("loading the weights", None)
        opened: tuple[load.Loaded, Weights] | None = None

        def begin(loaded: load.Loaded, weights: Weights) -> None:
            thread.heartbeat.rest()
            serve(loaded, weights)
            self._served = True

        try:
            opened = await thread.ask(lambda: self._open(spec, newcomer.use))
            loaded, weights = opened
            thread.post(lambda: residency.read_first(newcomer, weights))
            await asyncio.wrap_future(newcomer.read)
            await thread.ask(lambda: begin(loaded, weights))
        except BaseException as error:
            clear_frames(error.__traceback__)  # they would keep the weights
            opened = loaded = weights = None  # type: ignore[assignment]
            if not self._served:
                thread.post(lambda: self._give_up(newcomer.use))
            if not isinstance(error, asyncio.CancelledError):
                await thread.ask(lambda: None)  # so that the memory is free when this raises
            raise

    def _open(self, spec: load.ModelSpec, use: BaseUse) -> tuple[load.Loaded, Weights]:
        """Load the model without its weights, which are read in parts later."""
        # this takes seconds, and is no sign of a stalled device
        self._rounds.thread.heartbeat.rest()
        loaded = self._load_lazily(spec, use)
        weights = Weights(loaded, spec, use, resident=False)
        self._rounds.residency.account.grant(use, weights.nbytes)
        return loaded, weights

    def _load_lazily(self, spec: load.ModelSpec, use: BaseUse) -> load.Loaded:
        ranks = self._ranks
        if ranks is None:
            return load.load(spec, lazy=True, use=use)
        local = Path(spec.model).expanduser()
        ranks.gather(
            str(local.absolute()) if local.exists() else spec.model,
            hub.resolve(spec.model),
            trust_remote_code=spec.trust_remote_code,
            adapter=spec.adapter,
            kv_bits=self._settings.kv_bits,
            ram=self._settings.ram,
            wire=self._settings.wire,
        )
        return load.load(spec, lazy=True, use=use, divide=ranks.divide)

    def _give_up(self, use: BaseUse) -> None:
        """Runs on the MLX thread."""
        self._rounds.residency.account.remove(use)
        release_unused()
