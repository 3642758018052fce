"""Breaker: whether the remote is used or skipped, and why."""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES = 3
"""Failures in a row that open a breaker, if none of them alone does."""

PROBE_S, MOST_PROBE_S = 1.0, 30.0
"""Seconds before the first probe, and at most between two."""

STEADY_S = 60.0
"""Seconds of use after which the time between probes starts again from `PROBE_S`."""


class Breaker:
    """State of one kind of use of the remote, such as reading.

    `changed(self)` is called after each change of state. Records must come from one thread;
    attributes may be read from any. `is_open`: the remote is to be skipped. `reason`: why, None
    while it is used. `since`: time of the last change, in seconds since the epoch. `errors`: number
    of failures so far.
    """

    def __init__(self, changed: Callable[[Breaker], None]):
        self._changed = changed
        self.is_open = False
        self.reason: str | None = None
        self.since = time.time()
        self.errors = 0
        self._in_a_row = 0
        self._wait_s = PROBE_S
        self._closed_at = -STEADY_S

    @property
    def wait_s(self) -> float:
        """Seconds to the next probe."""
        return self._wait_s

    def succeed(self) -> None:
        """Record a success: the remote is used."""
        self._in_a_row = 0
        if self.is_open:
            self._closed_at = time.monotonic()
            self._set(False, None)

    def fail(self, reason: str, *, grave: bool) -> None:
        """Record a failure. If it is grave, or the third in a row, the remote is skipped."""
        self.errors += 1
        self._in_a_row += 1
        if not self.is_open and (grave or self._in_a_row >= FAILURES):
            steady = time.monotonic() - self._closed_at > STEADY_S
            self._wait_s = PROBE_S if steady else min(2 * self._wait_s, MOST_PROBE_S)
            self._set(True, reason)

    def postpone(self, reason: str) -> None:
        """Record a failed probe: the next one comes after twice the time."""
        self._wait_s = min(2 * self._wait_s, MOST_PROBE_S)
        self.reason = reason

    def _set(self, is_open: bool, reason: str | None) -> None:
        self.is_open, self.reason, self.since = is_open, reason, time.time()
        self._changed(self)
