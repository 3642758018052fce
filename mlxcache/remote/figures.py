"""Counts of what was moved to and from the remote, and its measured bandwidth."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = (
    "lookups",
    "fetched_objects",
    "fetched_bytes",
    "fetched_tokens",
    "fetched_checkpoints",
    "fetched_replies",
    "uploaded_objects",
    "uploaded_bytes",
    "corrupt",
    "expired",
    "slower",
    "dropped",
)
"""Names of the counters: lookups of a prompt, what was fetched, what was uploaded, and failures.

`corrupt`: objects with wrong content. `expired`: lookups and fetches that were ended by their time
limit. `slower`: fetches that were not begun, or ended early, because prefill takes less time.
`dropped`: paths and records that were removed from the full queue of uploads.
"""


class Counts:
    """Counters by name, such as `fetched_bytes`, one for each of `NAMES`. Any thread."""

    def __init__(self) -> None:
        self._held = dict.fromkeys(NAMES, 0)
        self._lock = threading.Lock()

    def add(self, name: str, by: int = 1) -> None:
        """Add `by` to the counter `name`, one of `NAMES`."""
        with self._lock:
            self._held[name] += by

    def figures(self) -> dict[str, int]:
        """Return all counters by name, such as `fetched_bytes`; see `NAMES`."""
        with self._lock:
            return dict(self._held)


LEAST_MEASURED = 256 * 1024
"""Bytes below which a transfer's time tells more of latency than of bandwidth."""

_WEIGHT = 0.3
"""Weight of the newest measurement in the bandwidth."""

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
        self._rate: float | None = None
        self._measured_at = 0.0
        self._running = 0
        self._began, self._moved = 0.0, 0

    @property
    def rate(self) -> float | None:
        """Moving average of the bytes per second of all running transfers together."""
        if self._rate is None or time.monotonic() - self._measured_at > LASTING_S:
            return None
        return self._rate

    def add(self, count: int) -> None:
        """Count `count` more bytes that a running transfer has moved."""
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
        """Update `rate` if enough bytes were moved, or more than `least_s` seconds have passed."""
        now = time.monotonic()
        seconds = max(now - self._began, 1e-6)
        if self._running and seconds < _PERIOD_S:
            return
        if self._moved >= LEAST_MEASURED or seconds > least_s:
            before, now_rate = self.rate, self._moved / seconds
            self._rate = now_rate if before is None else before + _WEIGHT * (now_rate - before)
            self._measured_at = now
        self._began, self._moved = now, 0


class Figures:
    """Counts of transfers since the start.

    `up`, `down`: what was written and what was read. `damaged`: number of objects that were read
    and found damaged.
    """

    def __init__(self) -> None:
        self.up, self.down = Traffic(), Traffic()
        self.damaged = 0
        self._in_a_row = 0
        self._lock = threading.Lock()

    def add_damaged(self) -> int:
        """Count a damaged object; return how many there were since the last intact one."""
        with self._lock:
            self.damaged += 1
            self._in_a_row += 1
            return self._in_a_row

    def add_intact(self) -> None:
        """Record that an object was not damaged; see `add_damaged`. For any thread."""
        with self._lock:
            self._in_a_row = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for `GET /v1/cache`, such as `uploaded_bytes`, and the bandwidths.

        `upload_bytes_per_s`, `download_bytes_per_s`: as `Traffic.rate`, rounded.
        """
        return {
            "damaged_objects": self.damaged,
            "uploaded_objects": self.up.objects,
            "uploaded_bytes": self.up.bytes,
            "downloaded_objects": self.down.objects,
            "downloaded_bytes": self.down.bytes,
            "upload_bytes_per_s": _rounded(self.up.rate),
            "download_bytes_per_s": _rounded(self.down.rate),
        }


def _rounded(rate: float | None) -> int | None:
    return None if rate is None else round(rate)
