"""Whether the MLX thread moves, as other threads see it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pulse:
    """The MLX thread calls `beat` between steps of seconds at most, and `rest` before it waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._beaten_at: float | None = None

    def beat(self) -> None:
        """A step begins."""
        self._beaten_at = self._clock()

    def rest(self) -> None:
        """Nothing is to be done: from now on silence means nothing."""
        self._beaten_at = None

    @property
    def silent_s(self) -> float:
        """Seconds since the step in hand began; 0 while there is none. In any thread."""
        at = self._beaten_at
        return 0.0 if at is None else max(0.0, self._clock() - at)
