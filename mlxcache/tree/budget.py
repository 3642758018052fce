"""A byte budget: memory is reserved before it is allocated, and released after it was freed."""

from __future__ import annotations


class Budget:
    """Bytes in use, counted by kind, under one limit.

    A kind is any string that names a use of memory, such as "kv" or "checkpoints". `limit`: the
    total above which `reserve` refuses. `used`: the bytes of all kinds, above `limit` only after
    `charge`. `high_water`: the highest value that `used` has had. Not thread-safe.
    """

    def __init__(self, limit_bytes: int):
        """Create an empty budget of `limit_bytes` bytes.

        Raises ValueError if `limit_bytes` is negative.
        """
        if limit_bytes < 0:
            raise ValueError(f"a budget cannot be negative: {limit_bytes} bytes")
        self.limit = limit_bytes
        self.used = 0
        self.high_water = 0
        self._kinds: dict[str, int] = {}

    @property
    def free(self) -> int:
        """Bytes still available to `reserve`.

        0 if `charge` has taken the total above the limit.
        """
        return max(0, self.limit - self.used)

    def by_kind(self) -> dict[str, int]:
        """Return a new dict of the bytes in use, by kind."""
        return dict(self._kinds)

    def reserve(self, kind: str, n: int) -> bool:
        """Reserve `n` bytes for `kind` if all of them fit under the limit.

        Returns False, and reserves nothing, if they do not fit. Raises ValueError if `n` is
        negative.
        """
        if n < 0:
            raise ValueError(f"cannot reserve {n} bytes of {kind}: expected 0 or more")
        if n > self.limit - self.used:
            return False
        self._add(kind, n)
        return True

    def charge(self, kind: str, n: int) -> None:
        """Record `n` bytes that are already allocated, even above the limit.

        `n` may be negative. Raises ValueError, with nothing changed, if the kind would fall below
        zero.
        """
        self._add(kind, n)

    def release(self, kind: str, n: int) -> None:
        """Release `n` bytes of `kind`.

        Raises ValueError, with nothing changed, if `n` is negative or more than the kind has in
        use.
        """
        if n < 0:
            raise ValueError(f"cannot release {n} bytes of {kind}: expected 0 or more")
        self._add(kind, -n)

    def _add(self, kind: str, n: int) -> None:
        now = self._kinds.get(kind, 0) + n
        if now < 0:
            raise ValueError(f"{kind} has {now - n} bytes, {-n} cannot be released")
        self._kinds[kind] = now
        self.used += n
        self.high_water = max(self.high_water, self.used)
