"""The bytes that lineages and checkpoints take, and how room is made for more. MLX thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Any

import mlx.core as mx

from mlxcache.cache.checkpoints import Trail
from mlxcache.model.arrays import ArraySpec
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Lineage
from mlxcache.tree.budget import Budget
from mlxcache.tree.prefix_tree import Node, PrefixTree
from mlxcache.tree.thinning import BUDGET_SHARE, allowed

log = logging.getLogger("mlxcache.engine")

SHARE = 0.75
"""Of the device's limit, for what is cached; the rest is for weights and forward passes."""


class Handles:
    """Buffers of lineages and checkpoints, counted, under `limit`, which may be None."""

    def __init__(self, layout: Layout, limit: int | None):
        states = _specs(layout.states)
        self.per_lineage = sum(map(len, layout.specs)) + states
        self.per_checkpoint = states
        self.limit = None if limit is None else int(SHARE * limit)

    def count(self, lineages: int, checkpoints: int) -> int:
        """Those that so many lineages and checkpoints have."""
        return lineages * self.per_lineage + checkpoints * self.per_checkpoint

    def allow(self, count: int) -> bool:
        """Whether so many may be."""
        return self.limit is None or count <= self.limit


def _specs(value: Any) -> int:
    """How many arrays a layout's states have."""
    if isinstance(value, list | tuple):
        return sum(map(_specs, value))
    return int(isinstance(value, ArraySpec))


STEP = 256
"""Positions of a reply that get room with its prompt, and the least that is evicted at once."""

WARM_LINEAGES = 4
"""Idle lineages that may keep a whole buffer although the tree holds part of it elsewhere."""

WORTH_KEEPING = 0.5
"""A checkpoint stays as long as its path where without it so much more would be fed again.

As a share of what is fed anyway: one stays for each halving of the distance to the end.
"""

NEEDED = ("kv", "states")
"""What a request cannot do without; others' bytes are not worth waiting for the disk."""


def with_slack(tokens: int) -> int:
    """Capacity for `tokens` positions and some growth: a 24th more, at least 64, in steps of 64."""
    return (tokens + max(64, tokens // 24) + 63) // 64 * 64


class Room:
    """Every lineage, idle or busy, charged to one budget; the tree says what each is good for.

    `dropped` and `spilled` count evictions of what is lost and of what is on disk: `durable` says
    which holds now. `relief` waits for something to become evictable; False if nothing will. It is
    only asked while `patient`. While `gentle` nothing is evicted: what is free has to do. `writing`
    counts the locks of a node that are there until it is on disk, `waive` has its checkpoint
    written no more.
    """

    def __init__(self, layout: Layout, budget: Budget, tree: PrefixTree):
        self.layout = layout
        self.budget = budget
        self.tree = tree
        self.idle: dict[int, Lineage] = {}
        self.busy: dict[int, Lineage] = {}
        self.dropped = self.spilled = 0
        self.handles = Handles(layout, None)
        self.relief: Callable[[], bool] | None = None
        self.patient = True
        self.gentle = False
        self.durable: Callable[[], bool] = lambda: False
        self.writing: Callable[[Node], int] = lambda node: 0
        self.waive: Callable[[Node], None] = lambda node: None

    def fit(self, held: int, least: int) -> int | None:
        """Reserve a buffer of `least` positions, with room to grow if that fits; its capacity.

        It takes the place of one of `held` positions.
        """
        for capacity in (with_slack(least), least):
            if self.reserve_kv(capacity - held, held):
                return capacity
        return None

    def reserve_kv(self, tokens: int, held: int = 0) -> bool:
        """Reserve `tokens` positions; each array is made while one of `held` is still there."""
        size = tokens * self.layout.bytes_per_token
        return self.reserve("kv", size, held * self.layout.widest)

    def reserve(self, kind: str, size: int, passing: int = 0, *, evict: bool = True) -> bool:
        """Take `size` more bytes of `kind` (less than 0: give them back), making room for them.

        `passing` bytes are needed meanwhile: what is set aside for forward passes serves for them.
        False, and nothing is reserved, where that is impossible, without `evict` if it takes room
        from others.
        """
        needed = max(0, size) + max(0, passing - self._kind("transient"))
        if evict and not self.make_room(needed, wait=kind in NEEDED):
            return False
        if needed > self.budget.free:
            return False
        self.budget.charge(kind, size)
        return True

    def spare_for(self, passing: int) -> bool:
        """Whether `passing` bytes are there for a moment, with nothing evicted."""
        return passing <= self.budget.free + self._kind("transient")

    def make_room(self, size: int, *, wait: bool = True) -> bool:
        """Free budget until `size` bytes fit: first spare copies, then what is missed least.

        Nothing is dropped where all that is idle would not be enough. With `wait`, what is only
        waiting to be on disk is waited for.
        """
        if self.gentle:
            return self.budget.free >= size
        idle = sum(lineage.nbytes for lineage in self.idle.values()) + self.tree.checkpoint_bytes
        if self.budget.free + idle < size:
            return False
        return self.free_up(size, wait=wait)

    def free_up(self, size: int, *, wait: bool = False) -> bool:
        """As `make_room`; what can be freed is, also where that is not enough."""
        for lineage in list(self.idle.values()):
            if self.budget.free >= size:
                return True
            if self._spare(lineage):
                self.shrink(lineage, force=True)
        while self.budget.free < size:
            evicted = self._evict(size - self.budget.free)
            relief = self.relief if wait and self.patient else None
            if not evicted and not (relief is not None and relief()):
                return False
        return True

    def _evict(self, needed: int, worth: float = WORTH_KEEPING) -> bool:
        """Drop what is missed least of the leaf that is missed least; False if all is in use.

        Checkpoints on the way that are worth less than `worth` go before its end does; not for an
        end that was replaced, for the way to it is somebody else's.
        """
        leaf = None if self.gentle else self.tree.least_leaf()
        if leaf is None:
            return False
        if self.layout.opaque and not leaf.usage.replaced and self._thin(leaf, needed, worth):
            return True
        length = leaf.end - leaf.start
        per_token = self.layout.bytes_per_token
        cut = length
        self.budget.release("checkpoints", leaf.checkpoint_bytes)
        if per_token and not self.layout.opaque:
            cut = min(
                leaf.end - self.tree.uses.wished(leaf),
                max(-(-needed // per_token), length // 4, STEP),
            )
        self.tree.uses.evicting(leaf, leaf.end - cut)
        self._cut(leaf, leaf.end - cut)
        return True

    def _thin(self, leaf: Node, needed: int, worth: float) -> int:
        """Drop checkpoints on the path to `leaf`, until `needed` bytes are; returns the bytes."""
        freed = 0
        for node in Trail.to(leaf).checkpoints_to_drop(leaf.end, 0, worth=worth):
            if not node.locks and freed < needed:
                freed += self._drop(node)
        return freed

    def _drop(self, node: Node) -> int:
        size = node.checkpoint_bytes
        if node.locks:
            self.waive(node)
        self.budget.release("checkpoints", size)
        self.tree.drop_checkpoint(node)
        return size

    def _cut(self, leaf: Node, position: int) -> None:
        if self.durable():
            self.spilled += 1
        else:
            self.dropped += 1
        above = leaf.parent
        gone = self.tree.cut(leaf, position)
        if id(gone.value) in self.idle:
            self.shrink(gone.value, force=True)
        if self.layout.opaque and above is not None and self.tree.useless(above):
            self._cut(above, above.start)

    def settle(self) -> None:
        """Let only the latest few idle lineages hold more than the tree needs of them.

        Those that are whole, that is: the model cannot go on in others.
        """
        self._bound_handles()
        spare = [x for x in self.idle.values() if self._spare(x)]
        for i, lineage in enumerate(reversed(spare)):
            if i >= WARM_LINEAGES or not lineage.whole:
                self.shrink(lineage, force=True)

    def handles_held(self) -> int:
        """Buffers of all lineages and checkpoints."""
        lineages = len(self.idle) + len(self.busy)
        return self.handles.count(lineages, self.tree.checkpoints)

    def _bound_handles(self, more: int = 0) -> bool:
        """Evict until `more` checkpoints' buffers are within the device's limit; whether so."""
        one = self.handles.per_checkpoint
        while (over := not self.handles.allow(self.handles_held() + more * one)) and self._evict(
            self.budget.limit
        ):
            pass
        return not over

    def _spare(self, lineage: Lineage) -> bool:
        """Whether a lineage holds well more than the tree needs of it (padding aside)."""
        start, end = self.tree.live_range(lineage) or (0, 0)
        return lineage.capacity - (end - start) > max(STEP, lineage.capacity // 8)

    def shrink(self, lineage: Lineage, *, force: bool) -> int:
        """Give back what the tree does not hold through `lineage`; returns the bytes freed."""
        held = self.tree.live_range(lineage)
        before = lineage.nbytes
        if held is None:
            self.idle.pop(id(lineage), None)
            lineage.release()
        elif force and self.layout.specs and held[1] - held[0] < lineage.capacity:
            if not self.spare_for((held[1] - held[0]) * self.layout.widest):
                return 0
            try:
                lineage.compact(*held)
            except RuntimeError:
                log.exception("no memory to make a buffer smaller: it is dropped")
                self.lose(lineage)
                return before
        freed = before - lineage.nbytes
        self.budget.release("kv", freed)
        mx.clear_cache()
        return freed

    def lose(self, lineage: Lineage) -> None:
        """Drop the buffers of a lineage that cannot be trusted; the tree may still refer to it."""
        self.idle.pop(id(lineage), None)
        self.busy.pop(id(lineage), None)
        self.budget.release("kv", lineage.nbytes)
        lineage.release()

    # -- checkpoints -------------------------------------------------------------------------

    @property
    def checkpoint_limit(self) -> int:
        """Bytes that all checkpoints together may take."""
        limit = self.budget.limit
        return int(limit * BUDGET_SHARE) if self.layout.specs else limit

    def most_checkpoints(self, tokens: int) -> int:
        """How many checkpoints a path of so many tokens may have."""
        size = self.layout.checkpoint_bytes
        kv_bytes = tokens * self.layout.bytes_per_token
        return allowed(kv_bytes, size, self.budget.limit) // max(1, size)

    def reserve_checkpoint(self, node: Node, size: int, end: int) -> bool:
        """Reserve `size` bytes for a checkpoint at `node`, on a path that will have `end` tokens.

        Others of its path go for it, and of other paths, so that each path and all of them keep
        within their bounds, however slow the disk is. The path is locked once by the caller; what
        other requests lock stays.
        """
        for each in self._superseded(node, end, self.most_checkpoints(end)):
            if self._ours(each):
                self._drop(each)
        most = self.checkpoint_limit - size
        while self.tree.checkpoint_bytes > most and self._evict(1, inf):
            pass
        if self.tree.checkpoint_bytes > most and not self.gentle:
            held = Trail.to(node).nodes
            for each in [*self._superseded(node, end, 0), *held[1:], *held[:1]]:
                if self.tree.checkpoint_bytes > most and each.checkpoint_bytes and self._ours(each):
                    self._drop(each)
        if self.tree.checkpoint_bytes > most or not self._bound_handles(1):
            return False
        return self.reserve("checkpoints", size)

    def _ours(self, node: Node) -> bool:
        """Whether no request but the one that locks `node` once is on it."""
        return node.locks <= 1 or node.locks - self.writing(node) <= 1

    def _superseded(self, node: Node, end: int, most: int) -> list[Node]:
        return Trail.to(node).checkpoints_to_drop(end, most, coming=[node.end])

    def _kind(self, name: str) -> int:
        return self.budget.by_kind().get(name, 0)

    def largest(self) -> int:
        """Bytes that a single request could have if nothing else were held."""
        return self.budget.limit - sum(map(self._kind, ("transient", "pool", "pending", "images")))

    def give_up(self, size: int) -> None:
        """Evict about `size` bytes of what is used least recently, as far as it is there."""
        goal = self.budget.used - size
        while self.budget.used > goal and self._evict(self.budget.used - goal):
            pass

    def clear(self) -> None:
        """Drop everything that no request uses."""
        self.give_up(self.budget.limit)
