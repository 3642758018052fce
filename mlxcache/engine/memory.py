"""Who may hold how many bytes: prefix tree, lineages and budget in one place. MLX thread only.

Verbs: `acquire` a lineage that ends where a prompt's known prefix ends, `extend` its room, `commit`
what it holds into the tree, `release` it. Each keeps the budget: bytes are reserved before they
are allocated, and room is made by evicting the least recently used leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxcache.cache.budget import Budget
from mlxcache.cache.tree import Match, Node, PrefixTree
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Lineage, Span
from mlxcache.types import Tokens

STEP = 256
"""Positions that a buffer grows by at least."""

WARM_LINEAGES = 4
"""Idle lineages that may keep a whole buffer although the tree holds part of it elsewhere."""


@dataclass(slots=True)
class Lease:
    """A lineage in use by one request, and the tree's node that it is locked at, if any."""

    lineage: Lineage
    cached: int
    node: Node | None = None
    state_bytes: int = 0


def room(tokens: int) -> int:
    """Capacity for `tokens` positions: one growth step more, in whole steps."""
    slack = max(STEP, tokens // 16)
    return (tokens + slack + STEP - 1) // STEP * STEP


class Memory:
    """The RAM tier of one model."""

    def __init__(self, layout: Layout, budget: Budget):
        self.layout = layout
        self.budget = budget
        self.tree = PrefixTree(layout.bytes_per_token)
        self.idle: dict[int, Lineage] = {}
        self.busy: dict[int, Lineage] = {}
        self.dropped = 0

    # -- acquiring ---------------------------------------------------------------------------

    def usable(self, match: Match, prompt_tokens: int) -> tuple[int, State | None]:
        """How much of a match can be reused, capped so that one token is left to feed."""
        limit = min(match.length, prompt_tokens - 1)
        if not self.layout.cacheable:
            return 0, None
        if not self.layout.opaque:
            return limit, None
        usable = [(at, node) for at, node in match.checkpoints if at <= limit]
        return (usable[-1][0], usable[-1][1].checkpoint) if usable else (0, None)

    def acquire(self, ids: Tokens, reply: int) -> Lease | None:
        """A whole lineage that holds the longest reusable prefix of `ids`.

        There is room in it for all of `ids` and `reply` tokens, or one growth step of them. None:
        not now, others hold what is needed. Mutates the tree (use, splits) and lineages.
        """
        match = self.tree.match(ids)
        cached, state = self.usable(match, len(ids))
        least = (len(ids) + min(reply, STEP) + 63) // 64 * 64
        anchor = match.nodes[-1] if match.nodes else None
        if anchor is not None:
            self.tree.lock(anchor)
        try:
            lease = self._lease(match, cached, least)
        finally:
            if anchor is not None:
                self.tree.unlock(anchor)
        if lease is None:
            return None
        if not self._reserve_state(lease):
            self.release(lease)
            return None
        lease.lineage.restore(state)
        return lease

    def _reserve_state(self, lease: Lease) -> bool:
        bytes_ = self.layout.checkpoint_bytes
        if not self.make_room(bytes_) or not self.budget.reserve("states", bytes_):
            return False
        lease.state_bytes = bytes_
        return True

    def _lease(self, match: Match, cached: int, least: int) -> Lease | None:
        spans: list[Span] = match.spans(cached) if cached else []
        owner = spans[-1][0] if spans else None
        if owner is not None and owner.users == 0 and self.layout.specs:
            held = self.tree.live_range(owner)
            tail = (held[1] if held else cached) - cached
            if tail <= cached and self._part(match, owner, cached, tail):
                return self._take(match, spans, cached, least)
        return self._fresh(spans, cached, least)

    def _part(self, match: Match, owner: Lineage, cached: int, tail: int) -> bool:
        """Move what `owner` holds beyond `cached` into a lineage of its own."""
        if not tail:
            return True
        if not self._reserve_kv(tail, owner.capacity):
            return False
        self._boundary(match, cached)
        twin = owner.detach(cached, cached + tail)
        self.tree.retarget([n for n in self.tree.holders(owner) if n.start >= cached], twin)
        self.idle[id(twin)] = twin
        return True

    def _boundary(self, match: Match, position: int) -> Node:
        """The node on the matched path that ends at `position`, made by a split if need be."""
        for node in match.nodes:
            if node.start < position <= node.end:
                return self.tree.split_at(node, position)
            if node.start == position and node.parent is not None:
                return node.parent
        raise ValueError(f"no node of the match reaches {position}")

    def _room(self, held: int, least: int) -> int | None:
        """Reserve a buffer of `least` positions, with room to grow if that fits; its capacity."""
        for capacity in (room(least), least):
            if self._reserve_kv(capacity - held, capacity):
                return capacity
        return None

    def _take(self, match: Match, spans: list[Span], cached: int, least: int) -> Lease | None:
        """Go on in the last span's own buffers: in place if it is whole and has the room."""
        owner = spans[-1][0]
        capacity = owner.capacity
        if not owner.whole or capacity < least:
            found = self._room(capacity, least)
            if found is None:
                return None
            capacity = found
        self.idle.pop(id(owner))
        owner.users += 1
        self.busy[id(owner)] = owner
        if owner.whole:
            owner.truncate(cached)
            owner.grow(capacity)
        else:
            owner.fill(spans, capacity)
        node = self._boundary(match, cached)
        self.tree.lock(node)
        return Lease(owner, cached, node)

    def _fresh(self, spans: list[Span], cached: int, least: int) -> Lease | None:
        """A new lineage with copies of `spans`."""
        capacity = self._room(0, least)
        if capacity is None:
            return None
        lineage = Lineage(self.layout)
        lineage.fill(spans, capacity)
        if not self.layout.specs:
            lineage.length = cached
        lineage.users += 1
        self.busy[id(lineage)] = lineage
        return Lease(lineage, cached)

    # -- growing, committing, releasing -------------------------------------------------------

    def extend(self, lease: Lease, length: int) -> bool:
        """Make room for `length` positions; False if the budget cannot hold them."""
        lineage = lease.lineage
        if length <= lineage.capacity or not self.layout.specs:
            return True
        capacity = self._room(lineage.capacity, (length + 63) // 64 * 64)
        if capacity is not None:
            lineage.grow(capacity)
        return capacity is not None

    def commit(self, lease: Lease, ids: Tokens, *, checkpoint: bool) -> None:
        """Put the first `lineage.length` of `ids` into the tree, with the state there if asked."""
        lineage = lease.lineage
        if not self.layout.cacheable or not lineage.length:
            return
        node = self.tree.insert(ids[: lineage.length], lineage)
        self.tree.lock(node)
        if lease.node is not None:
            self.tree.unlock(lease.node)
        lease.node = node
        if checkpoint and self.layout.opaque and node.checkpoint is None:
            self._checkpoint(lease, node)

    def _checkpoint(self, lease: Lease, node: Node) -> None:
        size = self.layout.checkpoint_bytes
        while (
            self.tree.checkpoint_bytes + size > self.budget.limit // 2 and self._drop_checkpoint()
        ):
            pass
        if self.make_room(size) and self.budget.reserve("checkpoints", size):
            self.tree.set_checkpoint(node, lease.lineage.capture(), size)

    def _spare_checkpoint(self) -> Node | None:
        """The least recently used checkpoint; of one path's, not the first: that is the head's."""
        first = self.tree.lru_checkpoint()
        below = list(first.children.values()) if first else []
        while first is not None and below:
            node = below.pop()
            if node.used_at != first.used_at:
                continue
            if node.checkpoint is not None and not node.locks:
                return node
            below += node.children.values()
        return first

    def _drop_checkpoint(self) -> bool:
        node = self._spare_checkpoint()
        if node is None:
            return False
        self.budget.release("checkpoints", node.checkpoint_bytes)
        self.tree.drop_checkpoint(node)
        return True

    def release(self, lease: Lease) -> None:
        """The request is over: its lineage goes idle, or goes if the tree needs none of it."""
        lineage = lease.lineage
        if lease.node is not None:
            self.tree.unlock(lease.node)
            lease.node = None
        self.budget.release("states", lease.state_bytes)
        lease.state_bytes = 0
        lineage.users -= 1
        del self.busy[id(lineage)]
        self.idle[id(lineage)] = lineage
        lineage.rest()
        self._shrink(lineage, force=False)
        self._settle()

    def abandon(self, lease: Lease) -> None:
        """Release a lineage whose last forward pass failed: only what was committed is kept."""
        lineage = lease.lineage
        held = self.tree.live_range(lineage)
        lineage.truncate(held[1] if held else 0)
        self.release(lease)

    def _settle(self) -> None:
        """Let only the latest few idle lineages hold more than the tree needs of them."""
        spare = [x for x in self.idle.values() if self._spare(x)]
        for lineage in spare[:-WARM_LINEAGES]:
            self._shrink(lineage, force=True)

    def _spare(self, lineage: Lineage) -> bool:
        """Whether a lineage holds well more than the tree needs of it (padding aside)."""
        start, end = self.tree.live_range(lineage) or (0, 0)
        return lineage.capacity - (end - start) > max(STEP, lineage.capacity // 8)

    def _shrink(self, lineage: Lineage, *, force: bool) -> int:
        """Give back what the tree does not hold through `lineage`; returns the bytes freed."""
        held = self.tree.live_range(lineage)
        before = lineage.nbytes
        if held is None:
            self.idle.pop(id(lineage), None)
            lineage.release()
        elif force and self.layout.specs and held[1] - held[0] < lineage.capacity:
            if not self._transient(held[1] - held[0]):
                return 0
            lineage.compact(*held)
        freed = before - lineage.nbytes
        if freed:
            self.budget.release("kv", freed)
            mx.clear_cache()
        return freed

    # -- making room --------------------------------------------------------------------------

    def _transient(self, capacity: int) -> bool:
        """Whether one array of `capacity` positions fits while the old one is still there."""
        arrays = sum(len(spec) for spec in self.layout.specs)
        widest = max((h * d * t.size for s in self.layout.specs for h, d, t in s), default=0)
        return not arrays or capacity * widest <= self.budget.free + self._kind("transient")

    def _reserve_kv(self, tokens: int, rebuilt: int) -> bool:
        """Reserve `tokens` positions, and see that rebuilding `rebuilt` of them has the room."""
        size = tokens * self.layout.bytes_per_token
        if not self.make_room(size) or not self._transient(rebuilt):
            return False
        return self.budget.reserve("kv", size)

    def make_room(self, size: int) -> bool:
        """Free budget until `size` bytes fit: first spare copies, then the least recently used."""
        for lineage in list(self.idle.values()):
            if self.budget.free >= size:
                return True
            if self._spare(lineage):
                self._shrink(lineage, force=True)
        while self.budget.free < size:
            if not self._evict(size - self.budget.free):
                return False
        return True

    def _evict(self, needed: int) -> bool:
        leaf = self.tree.lru_leaf()
        if leaf is None:
            return False
        length = leaf.end - leaf.start
        per_token = self.layout.bytes_per_token
        cut = length
        if per_token and not self.layout.opaque:
            cut = min(length, max(-(-needed // per_token), length // 4, STEP))
        self.dropped += 1
        gone = self.tree.cut(leaf, leaf.end - cut)
        self.budget.release("checkpoints", gone.checkpoint_bytes)
        if id(gone.value) in self.idle:
            self._shrink(gone.value, force=True)
        return True

    def _kind(self, name: str) -> int:
        return self.budget.by_kind().get(name, 0)

    def largest(self) -> int:
        """Bytes that a single request could have if nothing else were held."""
        return self.budget.limit - self._kind("transient") - self._kind("pool")

    def clear(self) -> None:
        """Drop everything that no request uses."""
        while self._evict(self.budget.limit):
            pass
