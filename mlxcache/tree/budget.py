"""The byte budget: bytes are reserved before they are computed, charged, released."""

from __future__ import annotations


class Budget:
    """Bytes in use, by kind, under one limit.

    A kind is any string ("kv", "checkpoints", "transient", "pool"). `limit`: what `reserve` never
    exceeds. `used`: bytes of all kinds; more than `limit` only after `charge`. `high_water`: the
    most bytes ever in use at once. Not thread-safe.
    """

    def __init__(self, limit_bytes: int):
        """Raises ValueError where `limit_bytes` is negative."""
        if limit_bytes < 0:
            raise ValueError(f"a budget of {limit_bytes} bytes")
        self.limit = limit_bytes
        self.used = 0
        self.high_water = 0
        self._kinds: dict[str, int] = {}

    @property
    def free(self) -> int:
        """The bytes that `reserve` can still give; 0 where `charge` went over the limit."""
        return max(0, self.limit - self.used)

    def by_kind(self) -> dict[str, int]:
        """The bytes in use by kind, as a copy."""
        return dict(self._kinds)

    def reserve(self, kind: str, n: int) -> bool:
        """Take all `n` bytes and return True, or none of them and return False.

        Raises ValueError where `n` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot reserve {n} bytes")
        if n > self.limit - self.used:
            return False
        self._add(kind, n)
        return True

    def charge(self, kind: str, n: int) -> None:
        """Add `n` bytes, which may be negative, whatever the limit: they are there already.

        Raises ValueError, with nothing changed, where the kind would fall below zero.
        """
        self._add(kind, n)

    def release(self, kind: str, n: int) -> None:
        """Give back `n` bytes of `kind`.

        Raises ValueError, with nothing changed, where `n` is negative or more than the kind has.
        """
        if n < 0:
            raise ValueError(f"cannot release {n} bytes")
        self._add(kind, -n)

    def _add(self, kind: str, n: int) -> None:
        now = self._kinds.get(kind, 0) + n
        if now < 0:
            raise ValueError(f"{kind} has {now - n} bytes, {-n} cannot be released")
        self._kinds[kind] = now
        self.used += n
        self.high_water = max(self.high_water, self.used)
