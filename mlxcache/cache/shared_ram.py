"""The RAM of several models under one budget: eviction across models, and waiting for memory.

MLX thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlxcache.cache.ram import WITHHELD, RamTier
from mlxcache.tree.budget import SharedBudget
from mlxcache.tree.eviction import EvictionClock

POOL = "pool"
"""The shared budget's kind of bytes for free buffers that MLX keeps."""


@dataclass(frozen=True, slots=True)
class Room:
    """Amount of memory that was usable at some time, to compare with a later amount.

    `nbytes`: free bytes plus those of all idle KV. `writing`: number of paths that are not on disk
    yet, whose KV cannot be evicted.
    """

    nbytes: int
    writing: int

    def exceeds(self, before: Room) -> bool:
        """Return whether a reservation that failed with `before` may succeed with this amount.

        True if it has more bytes than `before`, or fewer paths that are not on disk yet.
        """
        return self.nbytes > before.nbytes or self.writing < before.writing


@dataclass(frozen=True, slots=True)
class Wait:
    """A request that waits until other models free memory that it needs.

    `size`: bytes that it needs at least. `room`: the usable memory when its last reservation
    failed; None if it is to try again even if no memory has become free.
    """

    size: int
    room: Room | None


class SharedRam:
    """RAM tiers of several models, whose budgets are members of one shared budget.

    `budget`: the shared budget, to which the weights of the models are charged too.
    `free_idle(size)` unloads idle models until `size` more bytes are free and returns True, or
    unloads none and returns False. `ceiling(tier)` returns the most bytes that a tier can have
    beside the models that are never unloaded; by default the limit of its own budget. `clock`: the
    eviction clock of all members, by which entries of different models are compared.
    """

    def __init__(
        self,
        budget: SharedBudget,
        free_idle: Callable[[int], bool],
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
        """Add `tier`, whose budget must be a member of the shared one.

        Raises ValueError if it is not.
        """
        if tier.budget.shared is not self.budget:
            raise ValueError("the budget of a RAM tier is no member of the shared budget")
        self._tiers[tier] = None

    def leave(self, tier: RamTier) -> None:
        """Remove `tier`: its KV stays in RAM, and is no longer evicted for other models."""
        self._tiers.pop(tier, None)
        self._waiting.pop(tier, None)

    # -- memory ------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Limit of the shared budget, without the part that is set aside for MLX's pool."""
        return self.budget.limit - self.budget.by_kind().get(POOL, 0)

    @property
    def free(self) -> int:
        """Bytes of the shared budget that are not in use."""
        return self.budget.free

    def by_kind(self) -> dict[str, int]:
        """Return the bytes in use, of all members and of the shared budget itself, by their kind.

        Kinds are "kv", "checkpoints", "pool" and "withheld", for example. A model's name behind a
        colon, as in "weights:small", is left out: the kind is then "weights". May be called on any
        thread.
        """
        sums: Counter[str] = Counter()
        for budget in (self.budget, *(tier.budget for tier in list(self._tiers))):
            for kind, size in budget.by_kind().items():
                sums[kind.partition(":")[0]] += size
        return dict(sums)

    @property
    def withheld(self) -> int:
        """Bytes of the shared budget that stay unused while the machine is short of memory."""
        return self.budget.by_kind().get(WITHHELD, 0)

    def charge(self, kind: str, n: int) -> None:
        """Charge `n` bytes to a `kind` of the shared budget itself, such as "weights:small".

        A negative `n` releases bytes. Never refused: evicts nothing, and may exceed the limit.
        """
        self.budget.charge(kind, n)

    # -- making room -------------------------------------------------------------------------------

    def evict_least(self, needed: int) -> bool:
        """Evict from the leaf node with the lowest worth in all trees; see `RamTier.evict_once`.

        `needed`: bytes to free; fewer may be freed. Returns False, with nothing evicted, if a
        request or a pending write uses every leaf.
        """
        ranked = []
        for tier in self._tiers:
            if (leaf := tier.tree.least_leaf()) is not None:
                ranked.append((tier.tree.rank(leaf), tier))
        if not ranked:
            return False
        _, tier = min(ranked, key=lambda pair: pair[0])
        return tier.evict_once(needed)

    def compact(self, size: int) -> None:
        """Shrink the buffers of idle lineages of all members until `size` bytes are free.

        The KV that the prefix tree uses of a lineage is copied to buffers of exactly its size, if
        there is memory for the copy. Lineages with few unused positions are left as they are. No KV
        is evicted, so fewer than `size` bytes may be free afterwards; nothing is raised then.
        """
        for tier in list(self._tiers):
            tier.compact_spare(lambda: self.budget.free >= size)

    def unload(self, size: int) -> bool:
        """Unload idle models until `size` bytes are free; unload none if that cannot suffice.

        Returns whether the bytes are free.
        """
        return self._free_idle(size - self.budget.free)

    def reach(self, size: int, *, unload: bool) -> bool:
        """Return whether `size` bytes would be free if all idle KV were evicted. Evicts nothing.

        With `unload`, idle models are unloaded if their bytes are needed too and suffice. Returns
        True then.
        """
        missing = size - self.budget.free - self._idle_bytes()
        return missing <= 0 or (unload and self._free_idle(missing))

    def make_room(self, size: int) -> bool:
        """Free `size` bytes for weights, and return whether they are free now.

        Changes nothing, and returns False, if evicting all idle KV and unloading all idle models
        would not suffice. Otherwise unloads as many idle models as are needed beyond idle KV, then
        evicts idle KV of all members, entries with the lowest worth first. KV that is not on disk
        yet is not evicted; if its bytes would be needed, more idle models are unloaded.
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
        """Keep `size` bytes of the budget unused, evicting entries as needed.

        `size` replaces that of the last call: if it is less, the difference becomes available.
        Unloads no model. Entries that requests use, or that are not on disk yet, are not evicted:
        call again later to withhold the rest.
        """
        withheld = self.withheld
        if size <= withheld:
            self.budget.release(WITHHELD, withheld - size)
            return
        self._free_up(size - withheld, unload=False)
        self.budget.charge(WITHHELD, min(size - withheld, self.budget.free))
        mx.clear_cache()

    # -- waiting -----------------------------------------------------------------------------------

    def waits_for_others(self, tier: RamTier) -> bool:
        """Return whether other models hold memory that `tier` may get later.

        That is so if some of their KV is not on disk yet. Also if they use memory, and `tier` can
        get more than the free bytes and the idle KV of others once all models are unloaded that may
        be unloaded: then running requests or loaded models hold the rest.
        """
        others = [one for one in self._tiers if one is not tier]
        if any(one.writing for one in others):
            return True
        idle = sum(one.idle_bytes for one in others)
        lent = self._most(tier) - tier.budget.used > self.budget.free + idle
        return lent and any(one.budget.used for one in others)

    def fits_alone(self, tier: RamTier, size: int) -> bool:
        """Return whether `size` bytes fit in `tier` beside only the models that are never unloaded.

        The idle KV of `tier` counts as free. Call while no request of `tier` is in progress.
        """
        return size <= self._most(tier) - tier.budget.used + tier.idle_bytes

    def _most(self, tier: RamTier) -> int:
        return min(tier.budget.limit, self._ceiling(tier))

    def in_reach(self, tier: RamTier, size: int) -> bool:
        """Return whether `size` bytes fit in `tier` once all idle KV is evicted.

        Idle KV is that which no request uses. That of another member counts only while all paths
        of that member are on disk. Call while no request of `tier` is in progress.
        """
        idle = sum(one.idle_bytes for one in self._tiers if one is tier or not one.writing)
        own = tier.budget.own_free + tier.idle_bytes
        return size <= min(own, self.budget.free + idle)

    def wait(self, tier: RamTier, size: int) -> None:
        """Record that a request of `tier` waits for `size` bytes, which other models use.

        Until `stop_waiting`, `wait_of` returns this wait. Does not block.
        """
        self._waiting[tier] = Wait(size, self._room())

    def stop_waiting(self, tier: RamTier) -> None:
        """Record that no request of `tier` waits any more: `wait_of` returns None from now on."""
        self._waiting.pop(tier, None)

    def wait_of(self, tier: RamTier) -> Wait | None:
        """Return the wait of a request of `tier` for memory, or None if none waits."""
        return self._waiting.get(tier)

    def retry(self, tier: RamTier) -> None:
        """Let the request of `tier` that waits for memory try again, if there is one.

        It may try even if no memory has become free.
        """
        if (wait := self._waiting.get(tier)) is not None:
            self._waiting[tier] = Wait(wait.size, None)

    def retry_waiting(self) -> None:
        """Let all requests that wait for memory try again to reserve it."""
        for tier in self._waiting:
            self.retry(tier)

    def is_short(self, tier: RamTier) -> bool:
        """Return whether a request of `tier` waits for memory, and is not to try again yet.

        It is to try again after `retry`, and when more memory is free or can be evicted than at
        `wait`.
        """
        wait = self._waiting.get(tier)
        return wait is not None and wait.room is not None and not self._room().exceeds(wait.room)

    def others_wait(self, tier: RamTier) -> bool:
        """Return whether a request of a member other than `tier` waits for memory."""
        return any(one is not tier for one in self._waiting)

    def _room(self) -> Room:
        writing = sum(tier.writing for tier in self._tiers)
        return Room(self.budget.free + self._idle_bytes(), writing)

    def _idle_bytes(self) -> int:
        return sum(tier.idle_bytes for tier in self._tiers)
