"""The loop of the MLX thread: in each round it runs posted actions and steps one scheduler.

There is one scheduler for each model that was loaded at least once and is not closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mlxcache.errors import GroupLost, Inconsistent
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import device
from mlxcache.residency.residency import Residency
from mlxcache.scheduling.scheduler import Scheduler

log = logging.getLogger("mlxcache.engine")

MOST_FAILURES = 3
"""Rounds in a row whose own code fails that end the thread."""


class Rounds:
    """Owner of the MLX thread, which divides its time evenly between the schedulers with work.

    `start`, `end` and `on_death` may be called from any thread, all other methods on the MLX thread
    only. `residency` decides which models have their weights in memory. `clock` returns seconds.
    """

    def __init__(
        self,
        residency: Residency | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.residency = residency or Residency()
        self.thread = MlxThread(self._die, _ends_thread)
        self._clock = clock
        self._used: dict[Scheduler, float] = {}
        self._listeners: list[Callable[[BaseException], None]] = []
        self._read_s = 0.0  # of reading weights, less what models have computed since
        self._started = self._stopping = False
        self._failures = 0

    # -- from any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the MLX thread and its loop, unless that was done before."""
        if not self._started:
            self._started = True
            self.thread.post(self.run)
            self.thread.start()

    def end(self) -> None:
        """End the loop and the thread after all actions posted so far. Does not block.

        If a scheduler has not been removed by then, neither ends: call `end` again once it is.
        """

        def stop() -> None:
            self._stopping = not self._used

        self.thread.post(stop)
        self.thread.end()

    def on_death(self, listener: Callable[[BaseException], None]) -> None:
        """Call `listener(error)` once on the MLX thread if an error ends the loop."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def _die(self, error: BaseException) -> None:
        for listener in self._listeners:
            try:
                listener(error)
            except Exception:  # the others still write to disk
                log.exception(
                    "MLX thread died, and its shutdown failed: newest KV may not be on disk"
                )

    # -- on the MLX thread -------------------------------------------------------------------------

    def add(self, scheduler: Scheduler) -> None:
        """Include `scheduler` in the loop: it is stepped when it has work."""
        self._used[scheduler] = 0.0

    def remove(self, scheduler: Scheduler) -> None:
        """Do not step `scheduler` any more, and remove its model from `residency`."""
        self._used.pop(scheduler, None)
        self.residency.remove(scheduler)

    def run(self) -> None:
        """Run rounds until `end` has been called."""
        while not self._stopping:
            self.tick()

    def tick(self) -> None:
        """Run one round: posted actions, loading and unloading, then a step of one scheduler.

        Of the schedulers with work, the one that has used the least time is stepped; if none has
        work, all are stepped. Before that, while there is neither work nor a model to load, blocks
        until an action is posted or a model may be unloaded. After a device error, the active
        tasks of all schedulers begin again, because it is not known whose command failed; the third
        such error in a row is raised. Any other exception is logged, and the third in a row raises
        Inconsistent.
        """
        try:
            self._play()
            self._failures = 0
        except Exception as error:
            if _ends_thread(error):
                raise
            self._failures += 1
            log.error("a round of the MLX thread failed: %s", error, exc_info=error)
            if self._failures >= MOST_FAILURES:
                why = f"The MLX thread failed again and again: {error!r}"
                raise Inconsistent(why) from error

    def _play(self) -> None:
        stepped: list[Scheduler] = []
        try:
            block = not (self._working() or self.residency.busy)
            self.thread.run_posted(block=block, wait_s=self.residency.wait_s())
            self._step_residency()
            working = self._working()
            stepped = [self._next(working)] if working else list(self._used)
            sharing = len(working) > 1 or self.residency.reading
            for scheduler in stepped:
                self._step(scheduler, sharing=sharing)
            if working:
                self.residency.note_step()
            self.residency.settle()
        except RuntimeError as error:
            if not self._used or not device.is_device_error(error):
                raise
            stepped = list(self._used)
            for scheduler in stepped:
                scheduler.recover(error)
            self.residency.note_step()
        for scheduler in stepped:
            scheduler.publish()

    def _step_residency(self) -> None:
        """Unload and load models; reading weights takes at most half of the thread's time."""
        began, reading = self._clock(), self.residency.reading
        self.residency.step(read=self._read_s <= 0 or not self._working())
        self._read_s = max(0.0, self._read_s) + self._clock() - began if reading else 0.0

    def _working(self) -> list[Scheduler]:
        admits = self.residency.admits
        return [one for one in self._used if one.has_work(admitting=admits(one))]

    def _next(self, working: list[Scheduler]) -> Scheduler:
        """Return the scheduler that has used the least time of those with work."""
        turn = min(working, key=self._used.__getitem__)
        least = self._used[turn]
        for scheduler in self._used.keys() - set(working):
            self._used[scheduler] = max(self._used[scheduler], least)
        return turn

    def _step(self, scheduler: Scheduler, *, sharing: bool) -> None:
        began = self._clock()
        scheduler.step(sharing=sharing, admitting=self.residency.admits(scheduler))
        seconds = self._clock() - began
        self._used[scheduler] += seconds
        self._read_s -= seconds


def _ends_thread(error: BaseException) -> bool:
    return isinstance(error, GroupLost | Inconsistent) or device.is_device_error(error)
