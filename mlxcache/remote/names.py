"""Names of objects that are known to be present in the remote, or to be damaged there.

With them, the uploader need not ask the remote about each object of a conversation at every turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mlxcache.lru import LRU

MOST_NAMES = 1 << 16
"""Most names that are remembered."""

RECENT_S = 6 * 3600.0
"""Seconds after which an object may have expired, so that its presence is asked for again."""


class KnownNames:
    """Names of objects that were seen or written, and of objects found damaged. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._present: LRU[str, tuple[float, int]] = LRU(MOST_NAMES)
        self._wrong: LRU[str, bool] = LRU(MOST_NAMES)

    def note_present(self, name: str, stop: int) -> None:
        """Remember that the object `name` is in the remote, with tokens up to position `stop`."""
        self._wrong.pop(name)
        self._present.put(name, (self._clock(), stop))

    def note_wrong(self, name: str) -> None:
        """Remember that the object `name` is damaged or missing, and must be written again."""
        self._present.pop(name)
        self._wrong.put(name, True)

    def is_present(self, name: str, stop: int) -> bool:
        """Return whether the remote is known to have the object `name` with tokens up to `stop`.

        True also if the object has more tokens. What was noted more than `RECENT_S` seconds ago
        does not count.
        """
        known = self._present.get(name)
        return known is not None and known[1] >= stop and self._clock() - known[0] < RECENT_S

    def is_wrong(self, name: str) -> bool:
        """Return whether the object `name` must be written even if the remote has one."""
        return self._wrong.peek(name) is not None
