"""Time limit of a run of `mlxcache prove`."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeUp(Exception):
    """Error raised if the time limit of the run has passed."""


class Clock:
    """Remaining time of a run that may take `seconds`, counted from when this object is made."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; 0 after the limit has passed."""
        return max(0.0, self._end - time.monotonic())

    @contextmanager
    def bounding(self) -> Iterator[None]:
        """Raise TimeUp in the block as soon as no time is left. Main thread only: uses SIGALRM.

        Source: https://docs.python.org/3/library/signal.html#signal.setitimer
        """

        def ring(number: int, frame: FrameType | None) -> None:
            raise TimeUp("the time limit has passed")

        if not self.left_s:
            raise TimeUp("the time limit has passed")
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, self.left_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
