"""The first load of a model, and the requests that wait for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mlxcache.config import Settings
from mlxcache.engine.metrics import Records
from mlxcache.engine.opening import demo_spec, fetch_model, hash_files
from mlxcache.engine.requests import MAX_RETRY_S, MIN_RETRY_S, refuse_crowd
from mlxcache.errors import DeadlineExceeded, GroupLost, MlxcacheError, ModelError
from mlxcache.model import hub, load
from mlxcache.model.weights import BaseUse, Weights
from mlxcache.ranks.rank_zero import RankZero
from mlxcache.residency.memory import fewest_reserved
from mlxcache.residency.residency import Rounds
from mlxcache.residency.resident import Newcomer
from mlxcache.types import Arrival

log = logging.getLogger("mlxcache.engine")

GIVE_UP_S = 0.2

ASSUMED_S = 10.0
"""Assumed seconds of a load of which nothing is known yet."""

Serve = Callable[[load.Loaded, Weights], None]


class FirstLoad:
    """Loads one model for the first time, once, and again if that failed. Event loop only.

    `serve` is called on the MLX thread with the loaded model.
    """

    def __init__(
        self,
        settings: Settings,
        rounds: Rounds,
        ranks: RankZero | None,
        on_progress: Callable[[str, float | None], None],
        *,
        records: Records,
        serve: Serve,
    ):
        self.label = settings.entries[0].label
        self.state: Literal["never", "loading", "failed", "served"] = "never"
        self._settings, self._rounds, self._ranks = settings, rounds, ranks
        self._on_progress, self._records, self._serve = on_progress, records, serve
        self._share = 0.0
        self._newcomer: Newcomer | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended: MlxcacheError | None = None
        self._waiting: list[Arrival | None] = []
        self._began = 0.0

    @property
    def share(self) -> float | None:
        """Part of the current step, a download or reading the weights, that is done, from 0 to 1.

        None while the model waits for memory, and when nothing is being loaded. Any thread.
        """
        return self._share if self.state == "loading" and not self.awaits_room else None

    @property
    def awaits_room(self) -> bool:
        return self._newcomer is not None and self._newcomer.waits

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the model."""
        return len(self._waiting)

    def report(self, what: str, share: float | None) -> None:
        """Any thread."""
        if share is not None:
            self._share = share
        self._on_progress(what, share)

    # -- the load ----------------------------------------------------------------------------------

    async def run(self, pool: Executor) -> None:
        """Fetch the files, wait for memory, read the weights and serve the model.

        Raises ModelError, ConfigError or BadRequest if the model cannot be served, and the error of
        `end`; the memory of the weights is released then.
        """
        self.state, self._share = "loading", 0.0
        try:
            await self._load(await self._fetch(pool), pool)
            self.state = "served"
        except GroupLost as error:
            raise ModelError(f"The ranks could not load the model: {error}.") from error
        except asyncio.CancelledError:
            if self._ended is not None:
                raise self._ended from None
            raise
        finally:
            self._newcomer = None
            if self.state == "loading":
                self.state = "failed"

    def end(self, error: MlxcacheError) -> None:
        """End the load in progress with `error`, and refuse any other one."""
        self._ended = error
        if self._newcomer is not None:
            self._newcomer.served.cancel()
        if self._task is not None:
            self._task.cancel()

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

    async def _load(self, spec: load.ModelSpec, pool: Executor) -> None:
        loop, thread = asyncio.get_running_loop(), self._rounds.thread
        residency = self._rounds.residency
        use = BaseUse(residency.account.bases, self.label)
        newcomer = Newcomer(use, self._steps(spec, use))
        if residency.memory is not None:
            size = await loop.run_in_executor(pool, load.estimate_bytes, spec)
            folders = await loop.run_in_executor(pool, load.base_folders, spec)
            newcomer.estimate(folders, size, fewest_reserved(residency.memory.limit - size))
        if self._ended is not None:
            raise self._ended
        self._newcomer, self._share = newcomer, 0.0
        thread.post(lambda: residency.welcome(newcomer))
        try:
            await asyncio.wrap_future(newcomer.served)
        finally:
            thread.wake()  # if it is given up

    def _steps(self, spec: load.ModelSpec, use: BaseUse) -> Generator[None, None, None]:
        """Load the model without its weights, read these in parts, and serve the model.

        MLX thread only.
        """
        heartbeat, account = self._rounds.thread.heartbeat, self._rounds.residency.account
        self.report("loading the weights", None)
        heartbeat.rest()  # this takes seconds, and is no sign of a stalled device
        loaded = self._load_lazily(spec, use)
        weights = Weights(loaded, spec, use, resident=False)
        account.grant(use, weights.nbytes)
        heartbeat.beat()
        yield
        for done in weights.read():
            self.report("loading the weights", done / max(1, weights.nbytes))
            yield
        heartbeat.rest()
        self._serve(loaded, weights)
        heartbeat.beat()

    def _load_lazily(self, spec: load.ModelSpec, use: BaseUse) -> load.Loaded:
        ranks = self._ranks
        if ranks is None:
            return load.load(spec, lazy=True, use=use)
        assert self._settings.kv_bits != "auto"  # see check_divisible
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

    # -- requests that wait for it -----------------------------------------------------------------

    async def join(self, arrival: Arrival | None, start: Callable[[], Awaitable[None]]) -> None:
        """Wait until the model is loaded, beginning with `start()` unless that is in progress.

        `arrival`: the request that waits, which is recorded meanwhile; None if it is not recorded,
        and then not refused either. Its prompt cannot be rendered before, so no scheduler has it
        yet. Raises the errors of `run`, QueueFull or TooMany if too many requests wait already, and
        DeadlineExceeded after the request's time limit.
        """
        self._check_places(arrival)
        if not self._waiting:
            self._began = time.monotonic()
        self._waiting.append(arrival)
        try:
            with self._recorded(arrival):
                await self._wait(arrival, start)
        finally:
            self._waiting.remove(arrival)
            asyncio.get_running_loop().call_soon(self._give_up_unwanted)

    async def _wait(self, arrival: Arrival | None, start: Callable[[], Awaitable[None]]) -> None:
        limits = (arrival.timeout_s if arrival else None, self._settings.request_timeout)
        seconds = min((limit for limit in limits if limit is not None), default=None)
        end = None if seconds is None else time.monotonic() + seconds
        while self._ended is None:
            if self._task is None:
                self._task = asyncio.create_task(self._start(start))
                self._task.add_done_callback(self._note_end)
            task = self._task
            left = None if end is None else max(0.0, end - time.monotonic())
            await asyncio.wait({task}, timeout=left)
            if not task.done():
                raise DeadlineExceeded(
                    f"The request was not done within {seconds:g} s: its model {self.label} is "
                    "still being loaded."
                )
            if not task.cancelled():
                return task.result()
            await asyncio.sleep(0)  # those it was begun for had left
        raise self._ended

    async def _start(self, start: Callable[[], Awaitable[None]]) -> None:
        log.info("model %s: loading the model for the first time", self.label)
        began = time.monotonic()
        await start()
        log.info("model %s: loaded in %.1f s", self.label, time.monotonic() - began)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) not in (None, self._ended):
            log.error("model %s: cannot be loaded: %s", self.label, error)

    def _give_up_unwanted(self) -> None:
        """Cancel a load that waits for memory if no request waits for the model."""
        if self._task is None or self._waiting:
            return
        if self.awaits_room:
            log.info("model %s: load cancelled: no request waits for it any more", self.label)
            self._task.cancel()
        else:  # it may have to wait later
            asyncio.get_running_loop().call_later(GIVE_UP_S, self._give_up_unwanted)

    @contextmanager
    def _recorded(self, arrival: Arrival | None) -> Iterator[None]:
        """Keep a record of the request during the body; `Records.begin` makes the next one."""
        if arrival is None:
            yield
            return
        record = self._records.expect(arrival, self.label)
        try:
            arrival.note_waiting(record)
            yield
        except MlxcacheError as error:
            self._records.reject(record, error)
            raise
        except BaseException:
            record.status = "cancelled"
            self._records.end(record)
            raise
        else:
            self._records.forget(record.id)
        finally:
            arrival.note_waiting(None)

    def _check_places(self, arrival: Arrival | None) -> None:
        if arrival is None:
            return
        asker = (arrival.owner, arrival.session)
        same = [one for one in self._waiting if one and (one.owner, one.session) == asker]
        refuse_crowd(
            len(self._waiting),
            len(same) if arrival.session else 0,
            self._settings.queue,
            f"wait already until {self.label} is loaded",
            after=self._left_s,
        )

    def _left_s(self) -> float:
        share, passed = self.share or 0.0, time.monotonic() - self._began
        left = passed * (1 - share) / share if share > 0.05 else ASSUMED_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, left))
