"""Counts of what was moved to and from the remote, and its measured bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LEAST_MEASURED = 256 * 1024
"""Bytes below which a transfer's time tells more of latency than of bandwidth."""

_WEIGHT = 0.3
"""Weight of the newest measurement in the bandwidth."""

_PERIOD_S = 1.0
"""Seconds of transfers after which the bandwidth is measured, if they do not pause before."""


class Traffic:
    """Objects and bytes moved in one direction, on one thread.

    `rate`: smoothed bytes per second of all transfers at the same time; None before the first
    measurement. Transfers that were broken off count for it too.
    """

    def __init__(self) -> None:
        self.objects = 0
        self.bytes = 0
        self.rate: float | None = None
        self._running = 0
        self._began, self._moved = 0.0, 0

    def add(self, count: int) -> None:
        """Record bytes of a running transfer."""
        self.bytes += count
        self._moved += count

    @contextmanager
    def transfer(self) -> Iterator[Traffic]:
        """Yield the counts to which the bytes of one transfer are added. Counts its object."""
        if not self._running:
            self._began, self._moved = time.monotonic(), 0
        self._running += 1
        try:
            yield self
            self.objects += 1
        finally:
            self._running -= 1
            self._measure()

    def _measure(self) -> None:
        now = time.monotonic()
        seconds = max(now - self._began, 1e-6)
        if self._running and seconds < _PERIOD_S:
            return
        if self._moved >= LEAST_MEASURED or seconds > _PERIOD_S:
            rate = self._moved / seconds
            self.rate = rate if self.rate is None else self.rate + _WEIGHT * (rate - self.rate)
        self._began, self._moved = now, 0


class Figures:
    """Counts since the start. `damaged`: objects that were read and not used."""

    def __init__(self) -> None:
        self.up, self.down = Traffic(), Traffic()
        self.damaged = 0
        self._lock = threading.Lock()

    def add_damaged(self) -> None:
        """Count an object that was read and not used. May be called on any thread."""
        with self._lock:
            self.damaged += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for `GET /v1/cache`."""
        return {
            "damaged_objects": self.damaged,
            "uploaded_objects": self.up.objects,
            "uploaded_bytes": self.up.bytes,
            "downloaded_objects": self.down.objects,
            "downloaded_bytes": self.down.bytes,
            "upload_bytes_per_s": self.up.rate,
            "download_bytes_per_s": self.down.rate,
        }
