"""A line in the log for who was not let in: few of them, and none with a key in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request

log = logging.getLogger("mlxcache.door")

EACH_S = 10.0
"""The least time between two lines."""


class Refusals:
    """Tells of requests that were refused at the door, and of how many there was no line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._silent_until = float("-inf")
        self._untold = 0

    def tell(self, request: Request, error: Exception) -> None:
        """Log a refusal, or count it. What the client sent is shown as a literal, cut short."""
        now = self._clock()
        if now < self._silent_until:
            self._untold += 1
            return
        status = error.status_code if isinstance(error, HTTPException) else 401
        why = error.detail if isinstance(error, HTTPException) else error
        client = request.client.host if request.client else "somebody"
        more = f" (and {self._untold} others not told of)" if self._untold else ""
        path = request.scope["path"][:100]
        log.warning("%d for %s, %s %r: %s%s", status, client, request.method, path, why, more)
        self._silent_until, self._untold = now + EACH_S, 0
