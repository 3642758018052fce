"""Breaker: the decision to try or to skip operations on the remote, after failures."""

from __future__ import annotations

import time

FAILURES = 3
"""Failures in a row that open a breaker, if none of them is grave."""

MOST_PROBE_S = 30.0
"""Most seconds between two probes."""

STEADY_S = 60.0
"""Seconds after the end of a skipped period from which the next one begins with `probe_s` again."""


class Breaker:
    """Decision to try or to skip the reads, or the writes, of the remote.

    While operations are skipped, a probe is made from time to time: an operation in the background
    that shows if the remote works again. `is_open`: operations are skipped. `reason`: why; None if
    they are not. `errors`: number of failed operations since the start. `wait_s`: seconds to wait
    before the next probe; doubled by each probe that fails, up to `MOST_PROBE_S`. `probe_s`: the
    first `wait_s` of a skipped period, unless another one ended less than `STEADY_S` before.
    Methods are called on one thread; any thread may read attributes.
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
        """Record a success: operations are tried again if they were skipped."""
        self._in_a_row = 0
        if self.is_open:
            self._closed_at = time.monotonic()
            self.is_open, self.reason = False, None

    def fail(self, reason: str, *, grave: bool) -> None:
        """Record a failure, with a short `reason` for the log.

        Operations are skipped from then on if the failure is `grave`, that is, if the next
        operations would fail too, or if `FAILURES` operations in a row have failed.
        """
        self.errors += 1
        self._in_a_row += 1
        if not self.is_open and (grave or self._in_a_row >= FAILURES):
            steady = time.monotonic() - self._closed_at >= STEADY_S
            self.wait_s = self._probe_s if steady else min(2 * self.wait_s, MOST_PROBE_S)
            self.is_open, self.reason = True, reason

    def postpone(self, reason: str) -> None:
        """Record a failed probe with its `reason`: the time before the next probe doubles."""
        self.wait_s = min(2 * self.wait_s, MOST_PROBE_S)
        self.reason = reason
