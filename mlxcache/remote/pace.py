"""Time limit of a lookup in the remote, and the measured speed of reading."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

NEWEST = 0.3
"""Weight of the newest measurement in a moving average."""

FORGET_S = 60.0
"""Seconds after which a measurement no longer decides anything, so that it is made again."""


class Allowance:
    """Time limit of a lookup, which grows by the prefill that fetched tokens make unnecessary.

    A request may wait for the remote until `began` plus `seconds`, and in addition as long as
    computing the fetched tokens would have taken. So the request never takes longer than without
    the remote by more than `seconds`. `began`: the start of the lookup, by `clock`, which returns
    seconds. `least`: the argument `seconds`, which `gain` does not change.
    """

    def __init__(self, began: float, seconds: float, clock: Clock = time.monotonic):
        self.least = seconds
        self._end = began + seconds
        self._clock = clock

    def gain(self, seconds: float) -> None:
        """Extend the limit by `seconds`: the prefill time of tokens that were fetched."""
        self._end += seconds

    @property
    def left(self) -> float:
        """Seconds until the limit; negative after it."""
        return self._end - self._clock()


class Pace:
    """Measured speed of reading from the remote: seconds of a small call, and bytes per second.

    A small call moves almost no data. Both values are moving averages, or None if they were not
    measured for `FORGET_S` (60) seconds. Methods may be called on any thread.
    """

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._call: tuple[float, float] | None = None
        self._rate: tuple[float, float] | None = None

    def note_call(self, seconds: float) -> None:
        """Include a small call, which took `seconds`, in the average of small calls."""
        self._call = self._averaged(self._call, seconds)

    def note_bytes(self, nbytes: int, seconds: float) -> None:
        """Include a read of `nbytes` bytes, which took `seconds`, in the average speed."""
        self._rate = self._averaged(self._rate, seconds / max(1, nbytes))

    def note_unfinished(self, nbytes: int, seconds: float) -> None:
        """Record that a read of `nbytes` bytes had not ended after `seconds`, and was given up.

        The average speed becomes `nbytes` in `seconds`, unless it is lower already.
        """
        slow = seconds / max(1, nbytes)
        rate = self._recent(self._rate)
        if rate is None or rate < slow:
            self._rate = (slow, self._clock())

    def note_silence(self, seconds: float) -> None:
        """Record that a small call had no answer after `seconds`, and was given up.

        The average time of a small call becomes twice `seconds`, unless it is longer already.
        """
        call = self._recent(self._call)
        if call is None or call < 2 * seconds:
            self._call = (2 * seconds, self._clock())

    @property
    def call_s(self) -> float | None:
        """Average seconds of a small call: an operation of the remote that moves almost no data.

        None if none was measured for `FORGET_S` seconds.
        """
        return self._recent(self._call)

    @property
    def bytes_per_s(self) -> float | None:
        """Average bytes read per second; None if no read was measured for `FORGET_S` seconds."""
        rate = self._recent(self._rate)
        return None if rate is None else 1 / max(rate, 1e-12)

    def seconds(self, nbytes: int) -> float | None:
        """Return the expected seconds for reading `nbytes` bytes, including one small call.

        Returns None if `bytes_per_s` is None.
        """
        rate = self._recent(self._rate)
        return None if rate is None else (self.call_s or 0.0) + nbytes * rate

    def _averaged(self, before: tuple[float, float] | None, value: float) -> tuple[float, float]:
        known = self._recent(before)
        return (value if known is None else known + NEWEST * (value - known), self._clock())

    def _recent(self, measured: tuple[float, float] | None) -> float | None:
        if measured is None or self._clock() - measured[1] > FORGET_S:
            return None
        return measured[0]
