"""Who may hold how many bytes: prefix tree, lineages and budget in one place. MLX thread only.

Verbs: `acquire` a lineage that ends where a prompt's known prefix ends, `extend` its room, `commit`
what it holds into the tree, `release` it. Each keeps the budget: bytes are reserved before they
are allocated, and room is made by evicting the least recently used leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxcache.cache.budget import Budget
from mlxcache.cache.tree import Match, Node, PrefixTree
from mlxcache.engine.room import STEP, Room
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Lineage, Span
from mlxcache.types import Tokens


@dataclass(slots=True)
class Lease:
    """A lineage in use by one request, and the tree's node that it is locked at, if any."""

    lineage: Lineage
    cached: int
    node: Node | None = None
    state_bytes: int = 0


class Memory:
    """The RAM tier of one model."""

    def __init__(self, layout: Layout, budget: Budget):
        self.layout = layout
        self.budget = budget
        self.tree = PrefixTree(layout.bytes_per_token)
        self.room = Room(layout, budget, self.tree)
        self.idle, self.busy = self.room.idle, self.room.busy

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
        if not self.room.make_room(bytes_) or not self.budget.reserve("states", bytes_):
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
        if not self.room.reserve_kv(tail, owner.capacity):
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

    def _take(self, match: Match, spans: list[Span], cached: int, least: int) -> Lease | None:
        """Go on in the last span's own buffers: in place if it is whole and has the room."""
        owner = spans[-1][0]
        capacity = owner.capacity
        if not owner.whole or capacity < least:
            found = self.room.fit(capacity, least)
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
        capacity = self.room.fit(0, least)
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
        capacity = self.room.fit(lineage.capacity, (length + 63) // 64 * 64)
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
        most = self.budget.limit // 2 - size
        while self.tree.checkpoint_bytes > most and self.room.drop_checkpoint():
            pass
        if self.room.make_room(size) and self.budget.reserve("checkpoints", size):
            self.tree.set_checkpoint(node, lease.lineage.capture(), size)

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
        self.room.shrink(lineage, force=False)
        self.room.settle()

    def abandon(self, lease: Lease) -> None:
        """Release a lineage whose last forward pass failed: only what was committed is kept."""
        lineage = lease.lineage
        held = self.tree.live_range(lineage)
        lineage.truncate(held[1] if held else 0)
        self.release(lease)
