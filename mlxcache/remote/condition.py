"""Condition of the remote: whether it is tried or skipped, what was moved, and how fast."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

FAILURES = 3
"""Failures in a row that open a breaker, if none of them is grave."""

MOST_PROBE_S = 30.0

STEADY_S = 60.0
"""Seconds after the end of a skipped period from which the next one begins with `probe_s` again."""


class Breaker:
    """Decision to try or to skip the reads, or the writes, of the remote.

    While operations are skipped (`is_open`, with the `reason`), a probe is made from time to time:
    an operation in the background that shows if the remote works again. `errors`: number of failed
    operations since the start. `wait_s`: seconds to wait before the next probe: `probe_s`, doubled
    by each probe that fails. Methods are called on one thread; any thread may read attributes.
    """

    def __init__(self, probe_s: float):
        self._probe_s = probe_s
        self.is_open = False
        self.reason: str | None = None
        self.errors = 0
        self.wait_s = probe_s
        self._in_a_row = 0
        self._closed_at = -STEADY_S

    def succeed(self) -> None:
        self._in_a_row = 0
        if self.is_open:
            self._closed_at = time.monotonic()
            self.is_open, self.reason = False, None

    def fail(self, reason: str, *, grave: bool) -> None:
        """Record a failure; `grave`: the next operations would fail too, so they are skipped."""
        self.errors += 1
        self._in_a_row += 1
        if not self.is_open and (grave or self._in_a_row >= FAILURES):
            steady = time.monotonic() - self._closed_at >= STEADY_S
            self.wait_s = self._probe_s if steady else min(2 * self.wait_s, MOST_PROBE_S)
            self.is_open, self.reason = True, reason

    def postpone(self, reason: str) -> None:
        """Record a failed probe: the time before the next one doubles."""
        self.wait_s = min(2 * self.wait_s, MOST_PROBE_S)
        self.reason = reason


NEWEST = 0.3
"""Weight of the newest measurement in a moving average."""


class Average:
    """Moving average of measurements; None `lasting_s` seconds after the last one. Thread-safe."""

    def __init__(self, lasting_s: float):
        self._lasting_s = lasting_s
        self._measured = (0.0, -math.inf)

    @property
    def value(self) -> float | None:
        value, at = self._measured
        return value if time.monotonic() - at <= self._lasting_s else None

    def note(self, value: float) -> None:
        known = self.value
        value = value if known is None else known + NEWEST * (value - known)
        self._measured = (value, time.monotonic())

    def raise_to(self, value: float) -> None:
        known = self.value
        if known is None or known < value:
            self._measured = (value, time.monotonic())


LEAST_MEASURED = 256 * 1024
"""Bytes below which a transfer's time tells more of latency than of bandwidth."""

LASTING_S = 300.0
"""Seconds for which a measurement holds. A remote that was slow is then tried again."""

_BROKEN_S = 0.2
"""Seconds from which a transfer that was broken off is measured, whatever it moved."""

_PERIOD_S = 1.0
"""Seconds of transfers after which the bandwidth is measured, if they do not pause before."""


class Traffic:
    """Number of objects and bytes moved in one direction, and their speed. Used on one thread."""

    def __init__(self) -> None:
        self.objects = 0
        self.bytes = 0
        self._rate = Average(LASTING_S)
        self._running = 0
        self._began, self._moved = 0.0, 0

    @property
    def rate(self) -> int | None:
        """Moving average of the bytes per second of all running transfers together."""
        known = self._rate.value
        return None if known is None else round(known)

    def add(self, count: int) -> None:
        self.bytes += count
        self._moved += count

    @contextmanager
    def transfer(self) -> Iterator[Traffic]:
        """Context manager of one transfer: yield this instance, to `add` the bytes to."""
        if not self._running:
            self._began, self._moved = time.monotonic(), 0
        self._running += 1
        whole = False
        try:
            yield self
            self.objects += 1
            whole = True
        finally:
            self._running -= 1
            self._measure(least_s=math.inf if whole else _BROKEN_S)

    def _measure(self, least_s: float) -> None:
        now = time.monotonic()
        seconds = max(now - self._began, 1e-6)
        if self._running and seconds < _PERIOD_S:
            return
        if self._moved >= LEAST_MEASURED or seconds > least_s:
            self._rate.note(self._moved / seconds)
        self._began, self._moved = now, 0
