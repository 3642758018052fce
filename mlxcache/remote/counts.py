"""Counts of what was exchanged with the remote since the server started."""

from __future__ import annotations

import threading

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
