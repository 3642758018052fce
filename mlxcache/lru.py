"""Bounded containers: values by key, least recently used out first; values by group, oldest first.

Both are safe in any thread. Neither copies a value or calls back while its lock is held, except
for `size`, which must be cheap and must not use the container.
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
    """Values by key, at most `limit` in total by `size`; by default at most `limit` values.

    `get`, `put` and `setdefault` make a value the most recently used. A value that exceeds the
    limit alone is not kept.
    """

    def __init__(self, limit: int, size: Callable[[V], int] = _one):
        self._limit, self._size = limit, size
        self._held: OrderedDict[K, V] = OrderedDict()
        self._total = 0
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        """The value of a key, or None. Makes it the most recently used."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def peek(self, key: K) -> V | None:
        """The value of a key, or None. Does not count as a use."""
        with self._lock:
            return self._held.get(key)

    def put(self, key: K, value: V) -> list[V]:
        """Set the value of a key, and evict what exceeds the limit.

        Returns the evicted values, least recently used first; a replaced value is not among them.
        """
        with self._lock:
            return self._put(key, value)

    def setdefault(self, key: K, value: V) -> V:
        """The value of a key; sets it to `value` first where there is none."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            self._put(key, value)
            return value

    def pop(self, key: K) -> V | None:
        """Remove a key and return its value, or None."""
        with self._lock:
            value = self._held.pop(key, None)
            if value is not None:
                self._total -= self._size(value)
            return value

    def values(self) -> list[V]:
        """A copy of the values, least recently used first."""
        with self._lock:
            return list(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    @property
    def total(self) -> int:
        """The sum of the values' sizes."""
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
    """The latest values by group: `each` per group, in all `count` values and `limit` by `size`.

    Adding evicts the oldest value: first of the same group, then of all. Reading does not affect
    the order.
    """

    def __init__(self, *, each: int, count: int, limit: int, size: Callable[[V], int]):
        self._each, self._count, self._limit, self._size = each, count, limit, size
        self._held: tuple[tuple[K, V], ...] = ()
        self._lock = Lock()

    def add(
        self, group: K, value: V, *, replaced: Sequence[V] = (), each: int | None = None
    ) -> None:
        """Add a value to a group, in the place of those of the group that are `replaced`.

        `each` overrides the limit per group.
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
        """The values of a group, oldest first."""
        return tuple(value for g, value in self._held if g == group)

    def items(self) -> tuple[tuple[K, V], ...]:
        """All (group, value) pairs, oldest first. An immutable snapshot."""
        return self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def total(self) -> int:
        """The sum of the values' sizes."""
        return sum(self._size(value) for _, value in self._held)
