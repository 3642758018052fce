"""Byte budgets: memory is reserved before it is allocated, and released after it was freed."""

from __future__ import annotations


class Budget:
    """Bytes in use, counted by kind, under one limit.

    A kind is any string that names a use of memory, such as "kv" or "checkpoints". `limit`: the
    total above which `reserve` refuses. `used`: the bytes of all kinds, above `limit` only after
    `charge`. `high_water`: the highest value that `used` has had. Not thread-safe.

    A budget may be a member of a `SharedBudget`, here `shared`: each change then counts in both,
    and `reserve` also refuses what does not fit the shared limit. The own limit is what the member
    could use if it were the only one.
    """

    def __init__(self, limit_bytes: int, shared: SharedBudget | None = None):
        """Create an empty budget of `limit_bytes` bytes, a member of `shared` if that is given.

        Raises ValueError if `limit_bytes` is negative.
        """
        if limit_bytes < 0:
            raise ValueError(f"a budget cannot be negative: {limit_bytes} bytes")
        self.limit = limit_bytes
        self.used = 0
        self.high_water = 0
        self.shared = shared
        self._kinds: dict[str, int] = {}

    @property
    def free(self) -> int:
        """Bytes still available to `reserve`, under the own limit and that of a shared budget.

        0 if `charge` has taken a total above its limit.
        """
        return max(0, self._left)

    @property
    def own_free(self) -> int:
        """Bytes available under the own limit, as if nothing else used the shared budget."""
        return max(0, self.limit - self.used)

    @property
    def _left(self) -> int:
        """Bytes below both limits; negative if a total is above its limit."""
        left = self.limit - self.used
        return left if self.shared is None else min(left, self.shared.limit - self.shared.used)

    def by_kind(self) -> dict[str, int]:
        """Return a new dict from each kind, such as "kv", to its bytes in use."""
        return dict(self._kinds)

    def reserve(self, kind: str, n: int) -> bool:
        """Reserve `n` bytes for `kind` if all of them fit under both limits.

        Returns False, and reserves nothing, if they do not fit. Raises ValueError if `n` is
        negative.
        """
        if n < 0:
            raise ValueError(f"cannot reserve {n} bytes of {kind}: expected 0 or more")
        if n > self._left:
            return False
        self._add(kind, n)
        return True

    def charge(self, kind: str, n: int) -> None:
        """Count `n` bytes more as in use by `kind`, even above the limit; fewer if `n` is negative.

        For bytes that are already allocated or cannot be refused. Raises ValueError, with nothing
        changed, if the bytes of `kind` would fall below zero.
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

    def release_all(self) -> None:
        """Release all bytes of all kinds."""
        for kind, size in self._kinds.items():
            self._add(kind, -size)

    def _add(self, kind: str, n: int) -> None:
        now = self._kinds.get(kind, 0) + n
        if now < 0:
            raise ValueError(f"{kind} has {now - n} bytes, {-n} cannot be released")
        self._kinds[kind] = now
        self._count(n)
        if self.shared is not None:
            self.shared.count_member(n)

    def _count(self, n: int) -> None:
        self.used += n
        self.high_water = max(self.high_water, self.used)


class SharedBudget(Budget):
    """Bytes in use by several budgets together, its members, and by kinds of its own.

    `used` and `high_water` include the members' bytes; `by_kind` has the own kinds only, such as
    the weights of each model.
    """

    def __init__(self, limit_bytes: int):
        """Create an empty budget of `limit_bytes` bytes, without members.

        Raises ValueError if `limit_bytes` is negative.
        """
        super().__init__(limit_bytes)

    def count_member(self, n: int) -> None:
        """Count `n` more bytes in use by a member, fewer if negative. Called by the member."""
        self._count(n)
