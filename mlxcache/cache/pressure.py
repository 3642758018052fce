"""Memory pressure: the cache gives memory up before the system suffers, and takes it back later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcache.cache.ram import Room
from mlxcache.config import format_size
from mlxcache.config.memory import (
    MemoryPressure,
    PressureLevel,
    read_footprint,
    read_pressure,
    trim_heap,
)

log = logging.getLogger("mlxcache.engine")

POLL_S = 1.0
STEP_S, CALM_S = 5.0, 30.0
"""Seconds between two steps down while the pressure lasts, and of calm before each step back."""

SPARE_S = 30.0
"""Seconds between two times that what nothing uses is given back to the system."""

PARTS = 8
MOST = {PressureLevel.WARNING: 4, PressureLevel.CRITICAL: 7}
"""Of so many parts of the budget, those that are given up at most."""

HELD_BACK = "withheld"
"""The budget's kind of what is not to be used for now."""

TOLERANCE, LEAST_TOLERANCE = 0.05, 256 << 20
"""What the process may take beyond weights, budget and what it took at the start."""


class Brake:
    """How many of `PARTS` to give up: a step at once, more while it lasts, back in steps."""

    def __init__(self) -> None:
        self.parts = 0
        self._changed = self._felt = float("-inf")

    def feel(self, level: PressureLevel, now: float) -> int:
        """The parts to give up from `now` on, in seconds of a monotonic clock."""
        if level:
            self._felt = now
            if now - self._changed >= STEP_S and self.parts < MOST[level]:
                self.parts = min(MOST[level], self.parts + int(level))
                self._changed = now
        elif self.parts and now - max(self._felt, self._changed) >= CALM_S:
            self.parts -= 1
            self._changed = now
        return self.parts


@dataclass(slots=True)
class Seen:
    """What the watch saw last. `expected`: what the process may take by the budget, in bytes."""

    level: PressureLevel = PressureLevel.NORMAL
    footprint: int = 0
    most_footprint: int = 0
    expected: int = 0
    parts: int = 0


class Pressure:
    """Watches the machine in a thread of its own, and has the MLX thread give memory up.

    `put` has an action run there. `base`: what the process takes beside all that MLX holds,
    `weights`: what they take of that, both in bytes.
    """

    def __init__(
        self,
        room: Room,
        put: Callable[[Callable[[], None]], None],
        *,
        base: int,
        weights: int,
        look: Callable[[], MemoryPressure] = read_pressure,
        measure: Callable[[], int] = read_footprint,
        give_back: Callable[[], object] = trim_heap,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.seen = Seen(expected=base + weights + room.budget.limit)
        self._room, self._put = room, put
        self._slack = max(LEAST_TOLERANCE, int(TOLERANCE * (weights + room.budget.limit)))
        self._look, self._measure, self._clock = look, measure, clock
        self._give_back, self._given_back = give_back, clock()
        self._brake = Brake()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mlxcache-pressure", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            try:
                self.step()
            except OSError as error:  # no file descriptors, say, which is told elsewhere
                log.debug("the machine's memory could not be looked at: %s", error)
            except Exception:  # a look that fails must not end all later ones
                log.exception("the machine's memory could not be looked at")

    def step(self) -> None:
        """Look once, and have the cache follow."""
        seen, found, now = self.seen, self._look(), self._clock()
        if now - self._given_back >= SPARE_S:
            self._give_back()
            self._given_back = now
        seen.footprint = self._measure()
        seen.most_footprint = max(seen.most_footprint, seen.footprint)
        over = seen.footprint - seen.expected
        if over > self._slack and not found.level:
            found = MemoryPressure(
                PressureLevel.WARNING, f"this process takes {format_size(over)} more than it may"
            )
        seen.level = found.level
        parts = self._brake.feel(found.level, now)
        limit = self._room.budget.limit
        if parts != seen.parts:
            kept = format_size(limit * (PARTS - parts) // PARTS)
            if parts > seen.parts:
                log.warning("memory pressure, the cache is held to %s: %s", kept, found.why)
            else:
                log.info("memory pressure has passed: the cache may take %s", kept)
        if parts != seen.parts or parts:
            seen.parts = parts
            self._put(lambda: hold_back(self._room, limit * parts // PARTS))

    def figures(self) -> dict[str, Any]:
        """What `GET /v1/cache` says of it."""
        seen = self.seen
        return {
            "level": seen.level.name.lower(),
            "footprint_bytes": seen.footprint,
            "most_footprint_bytes": seen.most_footprint,
            "expected_bytes": seen.expected,
        }


def hold_back(room: Room, size: int) -> None:
    """Take `size` bytes out of use, evicting for them what nobody computes with. MLX thread only.

    What is in use, or not on disk yet, stays: the next time there may be more.
    """
    budget = room.budget
    held = budget.by_kind().get(HELD_BACK, 0)
    if size <= held:
        budget.release(HELD_BACK, held - size)
        return
    room.free_up(size - held)
    budget.charge(HELD_BACK, min(size - held, budget.free))
    mx.clear_cache()


def let_go(room: Room) -> None:
    """Put all that was held back into use: a request needs it. MLX thread only."""
    hold_back(room, 0)
