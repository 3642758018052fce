"""Breaker: whether one kind of use of the remote is tried or skipped, and why."""

from __future__ import annotations

import time

FAILURES = 3
"""Failures in a row that open a breaker, if none of them is grave."""

MOST_PROBE_S = 30.0
"""Most seconds between two probes."""

STEADY_S = 60.0
"""Seconds of use after which the time before a probe is the shortest again."""


class Breaker:
    """State of reading, or of writing. Records come from one thread; any may read attributes.

    `probe_s`: seconds before the first probe; each later one comes after twice the time, up to
    `MOST_PROBE_S`. `is_open`: operations are to be skipped. `reason`: why, None if they are not.
    `errors`: failures so far.
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
        """Record a success: operations are tried."""
        self._in_a_row = 0
        if self.is_open:
            self._closed_at = time.monotonic()
            self.is_open, self.reason = False, None

    def fail(self, reason: str, *, grave: bool) -> None:
        """Record a failure. If it is grave, or one of several in a row, operations are skipped."""
        self.errors += 1
        self._in_a_row += 1
        if not self.is_open and (grave or self._in_a_row >= FAILURES):
            steady = time.monotonic() - self._closed_at >= STEADY_S
            self.wait_s = self._probe_s if steady else min(2 * self.wait_s, MOST_PROBE_S)
            self.is_open, self.reason = True, reason

    def postpone(self, reason: str) -> None:
        """Record a failed probe."""
        self.wait_s = min(2 * self.wait_s, MOST_PROBE_S)
        self.reason = reason
