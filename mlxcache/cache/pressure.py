"""Memory pressure: withhold part of the budget while the machine is short of memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxcache.cache.shared_ram import SharedRam
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
"""Seconds between two reductions while pressure lasts, and without pressure before each part is
used again.
"""

TRIM_S = 30.0
"""Seconds between two returns of unused heap memory to the operating system."""

PARTS = 8
MAX_PARTS = {PressureLevel.WARNING: 4, PressureLevel.CRITICAL: 7}
"""Maximum number of parts of the budget, out of `PARTS`, that are withheld."""

TOLERANCE, MIN_TOLERANCE = 0.05, 256 << 20
"""Accepted growth of the process beyond weights, budget and initial size: a share of weights and
budget, and a minimum in bytes.
"""


class Brake:
    """Number of eighths of the budget to withhold, which depends on the memory pressure so far."""

    def __init__(self) -> None:
        self.parts = 0
        self._changed_at = self._pressed_at = float("-inf")

    def update(self, level: PressureLevel, now: float) -> int:
        if level:
            self._pressed_at = now
            if now - self._changed_at >= STEP_S and self.parts < MAX_PARTS[level]:
                self.parts = min(MAX_PARTS[level], self.parts + int(level))
                self._changed_at = now
        elif self.parts and now - max(self._pressed_at, self._changed_at) >= CALM_S:
            self.parts -= 1
            self._changed_at = now
        return self.parts


@dataclass(slots=True)
class Observation:
    """Result of the latest memory check, with sizes in bytes.

    `footprint`: the memory that this process takes. `expected`: what it takes with the weights
    loaded and the whole budget in use.
    """

    level: PressureLevel = PressureLevel.NORMAL
    footprint: int = 0
    max_footprint: int = 0
    expected: int = 0
    parts: int = 0


class Pressure:
    """Monitor of the machine's memory, in a thread of its own; withholds budget under pressure.

    `base`: bytes that the process takes besides those that MLX allocates. `weights`: bytes of the
    weights that do not count in the budget.
    """

    def __init__(
        self,
        ram: SharedRam,
        post: Callable[[Callable[[], None]], None],
        *,
        base: int,
        weights: int,
        look: Callable[[], MemoryPressure] = read_pressure,
        measure: Callable[[], int] = read_footprint,
        trim: Callable[[], object] = trim_heap,
        clock: Callable[[], float] = time.monotonic,
    ):
        limit = ram.budget.limit
        self.seen = Observation(expected=base + weights + limit)
        self._ram, self._post, self._limit = ram, post, limit
        self._tolerance = max(MIN_TOLERANCE, int(TOLERANCE * (weights + limit)))
        self._look, self._measure, self._clock = look, measure, clock
        self._trim, self._trimmed_at = trim, clock()
        self._brake = Brake()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mlxcache-pressure", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                self.step()
            except OSError as error:  # no file descriptors, for example, which is logged elsewhere
                log.debug("memory pressure check failed, trying again in %g s: %s", POLL_S, error)
            except Exception:  # the next check must still run
                log.exception("memory pressure check failed, trying again in %g s", POLL_S)

    def step(self) -> None:
        """Check the memory once, and adjust the withheld part of the budget."""
        seen: Observation = self.seen
        found, now = self._look(), self._clock()
        if now - self._trimmed_at >= TRIM_S:
            self._trim()
            self._trimmed_at = now
        seen.footprint = self._measure()
        seen.max_footprint = max(seen.max_footprint, seen.footprint)
        over = seen.footprint - seen.expected
        if over > self._tolerance and not found.level:
            found = MemoryPressure(
                PressureLevel.WARNING, f"this process is {format_size(over)} above its budget"
            )
        seen.level = found.level
        parts = self._brake.update(found.level, now)
        if parts != seen.parts:
            left = format_size(self._limit * (PARTS - parts) // PARTS)
            if parts > seen.parts:
                log.warning("memory pressure, cache limited to %s: %s", left, found.why)
            else:
                log.info("memory pressure eased, cache limit raised to %s", left)
        if parts != seen.parts or parts:
            seen.parts = parts
            withheld = self._limit * parts // PARTS
            self._post(lambda: self._ram.withhold(withheld))

    def figures(self) -> dict[str, Any]:
        seen = self.seen
        return {
            "level": seen.level.name.lower(),
            "footprint_bytes": seen.footprint,
            "most_footprint_bytes": seen.max_footprint,
            "expected_bytes": seen.expected,
        }
