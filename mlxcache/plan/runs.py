"""Simulations of one trace on several machines, in processes of their own if that pays."""

from __future__ import annotations

import copyreg
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import mlx.core as mx

from mlxcache.model.kv import Layout
from mlxcache.plan.cache import Memory
from mlxcache.plan.simulate import Outcome, Simulation, Speed
from mlxcache.plan.trace import Trace

WORK = 5_000
"""Requests, counted in each simulation, for which another process pays."""

Progress = Callable[[int, int], None]
Ran = tuple[Outcome, int]
"""Outcome of a simulation, and the most bytes of RAM in use."""


@dataclass(frozen=True, slots=True)
class Played:
    """What is the same in all simulations of a plan."""

    trace: Trace
    layout: Layout
    speed: Speed
    users: int | None
    at_once: int

    def on(self, memory: Memory, on_request: Callable[[int], None]) -> Ran:
        simulation = Simulation(
            self.layout, memory, self.speed, at_once=self.at_once, on_request=on_request
        )
        return simulation.run(self.trace, self.users), simulation.high_water


class Runs:
    """Simulations of one trace.

    `most`: number of simulations that there may be. `progress(played, total)` is called with the
    number of requests simulated so far, and with the most that there may be.
    """

    def __init__(self, played: Played, most: int, progress: Progress):
        self._total = most * len(played.trace.requests)
        self._done = 0
        self._progress = progress
        workers = min(os.cpu_count() or 1, self._total // WORK)
        self._machine = _Processes(played, workers) if workers > 1 else _Here(played, self._step)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *error: object) -> None:
        self._machine.close()

    def start(self, memory: Memory) -> Future[Ran]:
        return self._machine.start(memory)

    def hit_rates(self, memories: Sequence[Memory]) -> list[float]:
        return [self.result(one)[0].hit_rate for one in [self.start(one) for one in memories]]

    def result(self, future: Future[Ran]) -> Ran:
        while True:
            self._step(self._machine.played())
            with suppress(TimeoutError):
                return future.result(timeout=0.2)

    def _step(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)


class _Here:
    """Runner of simulations in this thread, each at once; `step(1)` is called for each request."""

    def __init__(self, played: Played, step: Callable[[int], None]):
        self._played = played
        self._step = step

    def start(self, memory: Memory) -> Future[Ran]:
        future = Future[Ran]()
        future.set_result(self._played.on(memory, lambda _: self._step(1)))
        return future

    def played(self) -> int:
        return 0

    def close(self) -> None:
        pass


class _Processes:
    """Runner of simulations in processes, which write a byte to a pipe for each request."""

    def __init__(self, played: Played, workers: int):
        spawn = get_context("spawn")  # a fork would share the GPU's connection
        self._counts, counts = spawn.Pipe(duplex=False)
        os.set_blocking(self._counts.fileno(), False)
        bare = replace(played, layout=replace(played.layout, make=list))
        self._executor = ProcessPoolExecutor(workers, spawn, _begin, (bare, counts))

    def start(self, memory: Memory) -> Future[Ran]:
        return self._executor.submit(_simulate, memory)

    def played(self) -> int:
        """Return the number of requests played since the last call."""
        with suppress(BlockingIOError):
            return len(os.read(self._counts.fileno(), 1 << 16))
        return 0

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


_PROCESS: dict[str, Any] = {}
"""What the simulations of a process share: "played", and the end "counts" of the pipe."""


def _begin(played: Played, counts: Connection) -> None:
    _PROCESS.update(played=played, counts=counts)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command's own Ctrl-C ends it
    Thread(target=_end_with, args=(parent_process(),), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _simulate(memory: Memory) -> Ran:
    counts = _PROCESS["counts"].fileno()
    found: Ran = _PROCESS["played"].on(memory, lambda _: os.write(counts, b"."))
    return found


def _dtype(name: str) -> mx.Dtype:
    found: mx.Dtype = getattr(mx, name)
    return found


copyreg.pickle(mx.Dtype, lambda one: (_dtype, (str(one).rpartition(".")[2],)))
