"""The RAM of several models under one budget: eviction across models, and waiting for memory.

A lone model is the only member, and its own budget is the shared one. MLX thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxcache.tree.budget import Budget
from mlxcache.tree.eviction import EvictionClock

if TYPE_CHECKING:
    from mlxcache.cache.ram import RamTier

POOL = "pool"
"""The shared budget's kind of bytes for free buffers that MLX keeps."""

WITHHELD = "withheld"
"""The shared budget's kind of bytes that stay unused while the machine is short of memory."""


@dataclass(frozen=True, slots=True)
class Room:
    """Usable memory at some time: free bytes and those of all idle KV.

    `writing`: number of paths that are not on disk yet, whose KV cannot be evicted.
    """

    nbytes: int
    writing: int

    def exceeds(self, before: Room) -> bool:
        return self.nbytes > before.nbytes or self.writing < before.writing


@dataclass(frozen=True, slots=True)
class Wait:
    """A request that waits until other models free memory that it needs.

    `room`: the usable memory when its last reservation failed; None if it is to try again.
    """

    size: int
    room: Room | None


class SharedRam:
    """RAM tiers of several models, whose budgets are members of one shared budget.

    The weights of the models are charged to `budget` too. `free_idle(size)` unloads idle models
    until `size` more bytes are free and returns True, or unloads none and returns False.
    `ceiling(tier)` returns the most bytes that a tier can have beside the models that are never
    unloaded.
    """

    def __init__(
        self,
        budget: Budget,
        free_idle: Callable[[int], bool] = lambda size: False,
        ceiling: Callable[[RamTier], int] = lambda tier: tier.budget.limit,
    ):
        self.budget = budget
        self.clock = EvictionClock(self._tree_bytes)
        self._free_idle = free_idle
        self._ceiling = ceiling
        self._tiers: dict[RamTier, None] = {}
        self._waiting: dict[RamTier, Wait] = {}

    def _tree_bytes(self) -> int:
        return sum(tier.tree.kv_bytes + tier.tree.checkpoint_bytes for tier in self._tiers)

    # -- members -----------------------------------------------------------------------------------

    def join(self, tier: RamTier) -> None:
        if self.budget not in (tier.budget, tier.budget.shared):
            raise ValueError("the budget of a RAM tier is no member of the shared budget")
        self._tiers[tier] = None

    def leave(self, tier: RamTier) -> None:
        """Remove `tier`: its KV stays in RAM, and is no longer evicted for other models."""
        self._tiers.pop(tier, None)
        self._waiting.pop(tier, None)

    @property
    def lone(self) -> bool:
        return len(self._tiers) == 1

    # -- memory ------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Limit of the shared budget, without the part that is set aside for MLX's pool."""
        return self.budget.limit - self.budget.by_kind().get(POOL, 0)

    @property
    def free(self) -> int:
        return self.budget.free

    def by_kind(self) -> dict[str, int]:
        """Return the bytes in use by kind, without a model's name as in "weights:small"."""
        sums: Counter[str] = Counter()
        for budget in (self.budget, *(tier.budget for tier in list(self._tiers))):
            for kind, size in budget.by_kind().items():
                sums[kind.partition(":")[0]] += size
        return dict(sums)

    @property
    def withheld(self) -> int:
        return self.budget.by_kind().get(WITHHELD, 0)

    def charge(self, kind: str, n: int) -> None:
        self.budget.charge(kind, n)

    # -- making room -------------------------------------------------------------------------------

    def evict_least(self, needed: int) -> bool:
        ranked = []
        for tier in self._tiers:
            if (leaf := tier.tree.least_leaf()) is not None:
                ranked.append((tier.tree.rank(leaf), tier))
        if not ranked:
            return False
        _, tier = min(ranked, key=lambda pair: pair[0])
        return tier.evict_once(needed)

    def compact(self, size: int, *, in_use: bool = True) -> None:
        for tier in list(self._tiers):
            tier.compact_spare(lambda: self.budget.free >= size, in_use=in_use)

    def unload(self, size: int) -> bool:
        return self._free_idle(size - self.budget.free)

    def reach(self, size: int, *, unload: bool) -> bool:
        """Return whether `size` bytes would be free without all idle KV. Evicts nothing.

        With `unload`, unloads idle models if their bytes are needed too and suffice.
        """
        missing = size - self.budget.free - self._idle_bytes()
        return missing <= 0 or (unload and self._free_idle(missing))

    def make_room(self, size: int) -> bool:
        """Free `size` bytes for weights, and return whether they are free now.

        Changes nothing if evicting all idle KV and unloading all idle models would not suffice. KV
        that is not on disk yet is not evicted; if its bytes would be needed, more idle models are
        unloaded.
        """
        return self.reach(size, unload=True) and self._free_up(size, unload=True)

    def _free_up(self, size: int, *, unload: bool) -> bool:
        self.compact(size)
        while self.budget.free < size:
            if self.evict_least(size - self.budget.free):
                continue
            if not unload or not self.unload(size):
                return False
        return True

    def withhold(self, size: int) -> None:
        """Keep `size` bytes of the budget unused, in place of those of the last call.

        Evicts as needed, and unloads no model. Entries that requests use, or that are not on disk
        yet, are not evicted: call again later to withhold the rest.
        """
        withheld = self.withheld
        if size <= withheld:
            self.budget.release(WITHHELD, withheld - size)
            return
        self._free_up(size - withheld, unload=False)
        self.budget.charge(WITHHELD, min(size - withheld, self.budget.free))
        mx.clear_cache()

    # -- waiting -----------------------------------------------------------------------------------

    def fits_alone(self, tier: RamTier, size: int) -> bool:
        """Return whether `size` bytes fit in `tier` beside only models that are never unloaded."""
        return size <= self._most(tier) - tier.budget.used + tier.idle_bytes

    def retry_waiting(self) -> None:
        for tier, wait in self._waiting.items():
            self._waiting[tier] = Wait(wait.size, None)

    def _most(self, tier: RamTier) -> int:
        return min(tier.budget.limit, self._ceiling(tier))

    def _room(self) -> Room:
        writing = sum(tier.writing for tier in self._tiers)
        return Room(self.budget.free + self._idle_bytes(), writing)

    def _idle_bytes(self) -> int:
        return sum(tier.idle_bytes for tier in self._tiers)

    def _lent(self, tier: RamTier) -> bool:
        """Return whether other models hold memory that `tier` may get later.

        That is so if some of their KV is not on disk yet. Also if they use memory, and `tier` can
        get more than the free bytes and the idle KV of others: then running requests or loaded
        models hold the rest.
        """
        others = [one for one in self._tiers if one is not tier]
        if any(one.writing for one in others):
            return True
        idle = sum(one.idle_bytes for one in others)
        lent = self._most(tier) - tier.budget.used > self.budget.free + idle
        return lent and any(one.budget.used for one in others)


class MemoryWaits:
    """Waits of one model's requests for memory that other models hold, one request at a time."""

    def __init__(self, ram: RamTier):
        self._ram = ram
        self._shared = ram.shared

    def fits_alone(self, tokens: int) -> bool:
        return self._shared.fits_alone(self._ram, self._ram.least_bytes(tokens))

    def in_reach(self, tokens: int) -> bool:
        """Return whether a prompt fits once all idle KV is evicted, without unloading a model.

        Idle KV of another model counts only while all paths of that model are on disk.
        """
        ram, shared = self._ram, self._shared
        idle = sum(one.idle_bytes for one in shared._tiers if one is ram or not one.writing)
        own = ram.budget.own_free + ram.idle_bytes
        return self._ram.least_bytes(tokens) <= min(own, shared.budget.free + idle)

    def begin(self, tokens: int) -> bool:
        """Record that a prompt waits for memory that other models hold, until `end`."""
        if not self._shared._lent(self._ram):
            return False
        self._shared._waiting[self._ram] = Wait(self._ram.least_bytes(tokens), self._shared._room())
        return True

    def retry(self) -> None:
        """Let the prompt that waits, if any, try again even if no memory has become free."""
        if (wait := self.current) is not None:
            self._shared._waiting[self._ram] = Wait(wait.size, None)

    def end(self) -> None:
        self._shared._waiting.pop(self._ram, None)

    @property
    def current(self) -> Wait | None:
        return self._shared._waiting.get(self._ram)

    @property
    def short(self) -> bool:
        """True if a prompt waits for memory of other models, and is not to try again yet."""
        wait, shared = self.current, self._shared
        return wait is not None and wait.room is not None and not shared._room().exceeds(wait.room)

    @property
    def others_wait(self) -> bool:
        return any(one is not self._ram for one in self._shared._waiting)
