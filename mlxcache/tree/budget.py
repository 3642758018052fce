"""Byte budgets: memory is reserved before it is allocated, and released after it was freed."""

from __future__ import annotations


class Budget:
    """Bytes in use, counted by kind ("kv", for example), under one limit. Not thread-safe.

    `used` exceeds `limit` only after `charge`. A budget may be a member of another one, `shared`:
    each change then counts in both, and `reserve` also refuses what does not fit the shared limit.
    The kinds of a shared budget are only its own; its `used` includes the members' bytes.
    """

    def __init__(self, limit_bytes: int, shared: Budget | None = None):
        if limit_bytes < 0:
            raise ValueError(f"a budget cannot be negative: {limit_bytes} bytes")
        self.limit = limit_bytes
        self.used = 0
        self.high_water = 0
        self.shared = shared
        self._kinds: dict[str, int] = {}

    @property
    def free(self) -> int:
        return max(0, self._left)

    @property
    def own_free(self) -> int:
        """Bytes available under the own limit, as if nothing else used the shared budget."""
        return max(0, self.limit - self.used)

    @property
    def _left(self) -> int:
        left = self.limit - self.used
        return left if self.shared is None else min(left, self.shared.limit - self.shared.used)

    def by_kind(self) -> dict[str, int]:
        return dict(self._kinds)

    def reserve(self, kind: str, n: int) -> bool:
        """Reserve `n` bytes for `kind`; return False, with nothing reserved, if they do not fit."""
        if n < 0:
            raise ValueError(f"cannot reserve {n} bytes of {kind}: expected 0 or more")
        if n > self._left:
            return False
        self._add(kind, n)
        return True

    def charge(self, kind: str, n: int) -> None:
        """Count `n` bytes more as in use by `kind`, even above the limit; fewer if `n` is negative.

        For bytes that are already allocated or cannot be refused.
        """
        self._add(kind, n)

    def release(self, kind: str, n: int) -> None:
        if n < 0:
            raise ValueError(f"cannot release {n} bytes of {kind}: expected 0 or more")
        self._add(kind, -n)

    def release_all(self) -> None:
        for kind, size in self._kinds.items():
            self._add(kind, -size)

    def _add(self, kind: str, n: int) -> None:
        now = self._kinds.get(kind, 0) + n
        if now < 0:
            raise ValueError(f"{kind} has {now - n} bytes, {-n} cannot be released")
        self._kinds[kind] = now
        self._count(n)
        if self.shared is not None:
            self.shared._count(n)

    def _count(self, n: int) -> None:
        self.used += n
        self.high_water = max(self.high_water, self.used)
