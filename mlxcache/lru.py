"""Bounded containers: an LRU cache, and a container of the latest values by group.

Both are thread-safe. Values are not copied, and no callback runs while the lock is held, except
`size`, which must be fast and must not use the container.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def _one(_: Any) -> int:
    return 1


class LRU(Generic[K, V]):
    """Cache of values by key, from which the least recently used ones are evicted.

    The sizes of all values, by `size`, add up to at most `limit`; by default each value counts
    as 1. `get`, `put` and `setdefault` make a value the most recently used. Putting a value
    larger than the limit evicts all values, that one included.
    """

    def __init__(self, limit: int, size: Callable[[V], int] = _one):
        self._limit, self._size = limit, size
        self._held: OrderedDict[K, V] = OrderedDict()
        self._total = 0
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def peek(self, key: K) -> V | None:
        """Return the value of a key without counting this as a use."""
        with self._lock:
            return self._held.get(key)

    def put(self, key: K, value: V) -> list[V]:
        """Set the value of a key; return what is evicted, least recently used first."""
        with self._lock:
            return self._put(key, value)

    def setdefault(self, key: K, value: V) -> V:
        """Return the value of a key. If there is none, set it to `value` first."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            self._put(key, value)
            return value

    def pop(self, key: K) -> V | None:
        with self._lock:
            value = self._held.pop(key, None)
            if value is not None:
                self._total -= self._size(value)
            return value

    def values(self) -> list[V]:
        """Return a copy of the values, least recently used first."""
        with self._lock:
            return list(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    @property
    def total(self) -> int:
        return self._total

    def _put(self, key: K, value: V) -> list[V]:
        if key in self._held:
            self._total -= self._size(self._held.pop(key))
        self._held[key] = value
        self._total += self._size(value)
        evicted: list[V] = []
        while self._total > self._limit:
            evicted.append(self._held.popitem(last=False)[1])
            self._total -= self._size(evicted[-1])
        return evicted


class LatestByGroup(Generic[K, V]):
    """Container of the latest values of each group.

    Holds at most `each` values per group, and in total at most `count` values whose sizes, by
    `size`, add up to at most `limit`. Adding a value to a group that has `each` values evicts
    the oldest of that group; then the oldest of all groups are evicted until the other two
    limits hold. Reading does not affect the order.
    """

    def __init__(self, *, each: int, count: int, limit: int, size: Callable[[V], int]):
        self._each, self._count, self._limit, self._size = each, count, limit, size
        self._held: tuple[tuple[K, V], ...] = ()
        self._lock = Lock()

    def add(
        self, group: K, value: V, *, replaced: Sequence[V] = (), each: int | None = None
    ) -> None:
        """Add a value to a group; those in `replaced`, compared by identity, are removed first.

        `each` overrides the limit per group for this call.
        """
        with self._lock:
            held = [h for h in self._held if h[0] != group or not any(h[1] is r for r in replaced)]
            mine = [h for h in held if h[0] == group]
            if len(mine) >= (self._each if each is None else each):
                held.remove(mine[0])
            held.append((group, value))
            total = sum(self._size(kept) for _, kept in held)
            while held and (len(held) > self._count or total > self._limit):
                total -= self._size(held.pop(0)[1])
            self._held = tuple(held)

    def of(self, group: K) -> tuple[V, ...]:
        """Return the values of a group, oldest first."""
        return tuple(value for g, value in self._held if g == group)

    def items(self) -> tuple[tuple[K, V], ...]:
        return self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def total(self) -> int:
        return sum(self._size(value) for _, value in self._held)
