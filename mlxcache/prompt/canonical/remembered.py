"""What rules remember from one request to the next, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


def _one(_: object) -> int:
    return 1


class Remembered(Generic[V]):
    """Values by key, of at most `limit` in all by `size`; what was used least recently goes first.

    Safe in any thread.
    """

    def __init__(self, limit: int, size: Callable[[V], int] = _one):
        self._limit, self._size = limit, size
        self._held: OrderedDict[Hashable, V] = OrderedDict()
        self._total = 0
        self._lock = Lock()

    def get(self, key: Hashable) -> V | None:
        """The value, which is then the last to go; None if there is none."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Keep a value, in the place of an older one of its key."""
        with self._lock:
            if key in self._held:
                self._total -= self._size(self._held.pop(key))
            self._held[key] = value
            self._total += self._size(value)
            while self._total > self._limit:
                self._total -= self._size(self._held.popitem(last=False)[1])

    def first(self, key: Hashable, value: V) -> V:
        """The value that the key has, or this one from now on."""
        known = self.get(key)
        if known is None:
            self.put(key, value)
            return value
        return known
