"""Who may hold how many bytes: prefix tree, lineages and budget in one place. MLX thread only.

Verbs: `acquire` a lineage that ends where a prompt's known prefix ends, `extend` its room, `commit`
what it holds into the tree, `release` it. Each keeps the budget: bytes are reserved before X"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxcache.cache.main_conversation import NOTHING, Claim, Mains
from mlxcache.cache.ram import STEP, Room
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Lineage, Span
from mlxcache.store.listing import Held
from mlxcache.tree.budget import Budget
from mlxcache.tree.node import NO_TOKENS
from mlxcache.tree.prefix_tree import Match, Node, PrefixTree, Worth
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.engine.runtime import Core


def usable(layout: Layout, match: Match, prompt_tokens: int) -> tuple[int, State | None]:
    """The tokens of a match that can be reused, and the state there: one token is left to feed."""
    if not layout.cacheable:
        return 0, None
    limit = intact(layout, match, prompt_tokens - 1)
    if not layout.opaque:
        return limit, None
    found = [(at, node) for at, node in match.checkpoints if at <= limit]
    return (found[-1][0], found[-1][1].checkpoint) if found else (0, None)


def intact(layout: Layout, match: Match, upto: int) -> int:
    """How many tokens of a match, up to `upto`, have KV that is there."""
    limit = min(match.length, upto)
    lost = next((start for value, start, _ in match.segments if value.lost), limit)
    limit = min(limit, lost)
    gaps = [
        (start, value.window_valid_from)
        for value, start, _ in match.segments
        if value.window_valid_from > start
    ]
    if gaps and gaps[0][0] < limit < gaps[-1][1] + layout.longest_window:
        return gaps[0][0]
    return limit


@dataclass(slots=True)
class Lease:
    """A lineage in use by one request, and the tree's node that it is locked at, if any.

    `bare`: it holds KV and no state, which is to be restored. `saved`: tokens on their way to disk.
    `matched`: tokens that earlier prompts share, whether or not they can be reused. `prompt` and
    `claim`: whom it is for.
    """

    lineage: Lineage
    cached: int
    node: Node | None = None
    prompt: Tokens = field(default_factory=lambda: NO_TOKENS, compare=False)
    claim: Claim = NOTHING
    state_bytes: int = 0
    bare: bool = False
    saved: int = 0
    matched: int = 0


class Memory:
    """The RAM tier of one model."""

    def __init__(self, layout: Layout, budget: Budget):
        self.layout = layout
        self.budget = budget
        worth = Worth(layout.bytes_per_token, layout.checkpoint_bytes)
        self.tree = PrefixTree(layout.bytes_per_token, worth)
        self.mains = Mains()
        self.room = Room(layout, budget, self.tree)
        self.idle, self.busy = self.room.idle, self.room.busy

    # -- acquiring ---------------------------------------------------------------------------

    def known(self, ids: Tokens) -> int:
        """How many tokens of `ids` could be reused now. Changes nothing."""
        return usable(self.layout, self.tree.match(ids, touch=False), len(ids))[0]

    def acquire(
        self, ids: Tokens, reply: int, planned: int = 0, claim: Claim = NOTHING
    ) -> Lease | None:
        """A whole lineage that holds the longest reusable prefix of `ids`.

        There is room in it for all of `ids` and `reply` tokens, or one growth step of them. None:
        not now, others hold what is needed. Mutates the tree (use, splits) and lineages.
        `planned`: KV and states up to there are about to be restored, so all KV that is held
        below serves, whether or not there is a state for it. What is found counts as asked for, by
        `claim`, and so does the main conversation that this is a side request of.
        """
        match, main = self.tree.match(ids), self.mains.beside(ids, claim)
        self.tree.uses.renew(main)
        cached, state = usable(self.layout, match, len(ids))
        bare = planned > cached
        if bare:
            cached, state = intact(self.layout, match, planned), None
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
        if not self._begin_at(lease, state):
            return None
        lease.bare, lease.saved, lease.matched = bare, lease.cached, match.length
        lease.prompt, lease.claim = ids, claim
        if claim.asked:
            uses = self.tree.uses.found(self.tree.match(ids), len(ids), claim.anchor)
            self.tree.uses.renew(main, uses)
        return lease

    def _begin_at(self, lease: Lease, state: State | None) -> bool:
        """Give a lease its state; False, and it is released, where there is no room for one."""
        if not self.room.reserve("states", self.layout.running_bytes):
            self.release(lease)
            return False
        lease.state_bytes = self.layout.running_bytes
        try:
            lease.lineage.restore(state)
        except BaseException:
            self.release(lease)
            raise
        return True

    def _lease(self, match: Match, cached: int, least: int) -> Lease | None:
        """Go on in the idle lineage that costs the fewest copies; else in a new one."""
        spans: list[Span] = match.spans(cached) if cached else []
        best, cost = -1, cached
        for i, (owner, _, end) in enumerate(spans if self.layout.specs else []):
            if id(owner) not in self.idle or not (owner.whole or end == cached):
                continue
            copies = self._tail(owner, end) + (cached - end if owner.whole else cached)
            # the newest owner wins a tie: it is whole, or is to be
            if copies <= cost:
                best, cost = i, copies
        if best >= 0 and self._part(match, spans[best][0], spans[best][2]):
            return self._take(match, spans, best, least)
        return self._fresh(spans, cached, least)

    def _tail(self, owner: Lineage, end: int) -> int:
        """How many positions from `end` on the tree holds through `owner`."""
        held = self.tree.live_range(owner)
        return max(0, held[1] - end) if held else 0

    def _part(self, match: Match, owner: Lineage, end: int) -> bool:
        """Move what `owner` holds from `end` on into a lineage of its own."""
        reserved = self._tail(owner, end)
        if not self.room.reserve_kv(reserved):
            return False
        tail = self._tail(owner, end)  # less, if room was made by evicting part of it
        self.room.reserve_kv(tail - reserved)
        if not tail:
            return True
        self._boundary(match, end)
        with self._charged(owner, owner.capacity + tail):
            twin = owner.detach(end, end + tail)
        self.tree.retarget([n for n in self.tree.holders(owner) if n.start >= end], twin)
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

    def _take(self, match: Match, spans: list[Span], at: int, least: int) -> Lease | None:
        """Go on in the buffers of `spans[at]`: in place if they are whole and have the room."""
        owner, _, end = spans[at]
        cached = spans[-1][2]
        capacity = owner.capacity
        del self.idle[id(owner)]  # making room must leave it alone
        if not owner.whole or capacity < least:
            found = self.room.fit(capacity, least)
            if found is None:
                self.idle[id(owner)] = owner
                return None
            capacity = found
        self.busy[id(owner)] = owner
        with self._charged(owner, capacity):
            if owner.whole:
                owner.truncate(end)
                owner.grow(capacity)
                for span in spans[at + 1 :]:
                    owner.append_span(span)
            else:
                owner.fill(spans, capacity)
        node = self._boundary(match, cached)
        self.tree.lock(node)
        return Lease(owner, cached, node)

    @contextmanager
    def _charged(self, lineage: Lineage, capacity: int, leased: bool = False) -> Iterator[None]:
        """While it gets buffers of `capacity` positions, which are charged for already.

        Should MLX fail there, what is not held is given back. One that was idle is idle again if
        what it held is still there, else it is lost.
        """
        try:
            yield
        except BaseException:
            missing = capacity - lineage.capacity
            self.budget.release("kv", missing * self.layout.bytes_per_token)
            if not leased:
                self._put_back(lineage)
            raise

    def _put_back(self, lineage: Lineage) -> None:
        held = self.tree.live_range(lineage)
        if held is None or lineage.lost:
            self.room.lose(lineage)
            return
        lineage.truncate(held[1])
        if not lineage.sound():
            self.room.lose(lineage)
        elif self.busy.pop(id(lineage), None) is not None:
            self.idle[id(lineage)] = lineage

    def _fresh(self, spans: list[Span], cached: int, least: int) -> Lease | None:
        """A new lineage with copies of `spans`."""
        capacity = self.room.fit(0, least)
        if capacity is None:
            return None
        lineage = Lineage(self.layout)
        with self._charged(lineage, capacity):
            lineage.fill(spans, capacity)
        if not self.layout.specs:
            lineage.length = cached
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
            with self._charged(lineage, capacity, leased=True):
                lineage.grow(capacity)
        return capacity is not None

    def commit(self, lease: Lease, ids: Tokens, *, checkpoint: bool) -> None:
        """Put the first `lineage.length` of `ids` into the tree, with the state there if asked."""
        lineage = lease.lineage
        if not self.layout.cacheable or not lineage.length:
            return
        node = self.tree.insert(ids[: lineage.length], lineage, lease.claim.anchor)
        self.tree.lock(node)
        self._stand_in(lease, node)
        if lease.node is not None:
            self.tree.unlock(lease.node)
        lease.node = node
        if checkpoint and self.layout.opaque and node.checkpoint is None:
            size = lineage.state_bytes
            if self.room.reserve_checkpoint(node, size, len(ids)):
                self.tree.set_checkpoint(node, lineage.capture(), size)

    def _stand_in(self, lease: Lease, node: Node) -> None:
        """Let a whole lineage hold what others on its path lost, and what was fed again.

        That is where no state was there to go on from. A lineage that holds what comes before has
        to hold all of it anyway; the other then keeps what follows.
        """
        lineage, path = lease.lineage, node.path()[1:]
        holds = any(n.value is lineage and n.end <= lease.cached for n in path)
        fed = max(lease.cached, lineage.window_valid_from) if holds else node.end
        again = [n for n in path if n.value is not lineage and (n.value.lost or n.start >= fed)]
        others = {id(n.value): n.value for n in again}
        self.tree.retarget(again, lineage)
        for other in others.values():
            if id(other) in self.idle and self.tree.live_range(other) is None:
                self.room.shrink(other, force=True)

    def release(self, lease: Lease) -> None:
        """The request is over: its lineage goes idle, or goes if the tree needs none of it."""
        lineage = lease.lineage
        if lease.node is not None:
            self.tree.uses.keep(lease.node, lease.claim.keeps)
            self.mains.ended(lease.prompt, lease.claim, lease.node)
            self.tree.unlock(lease.node)
            lease.node = None
        self.budget.release("states", lease.state_bytes)
        lease.state_bytes = 0
        if not lineage.lost:
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
        if not lineage.sound():
            self.room.lose(lineage)
        self.release(lease)


def in_ram(memory: Memory, paths: Sequence[Tokens]) -> Held:
    """What the RAM tier holds of these token ids; asking is no use of it."""
    tokens, nbytes = [], 0
    ends: dict[int, int] = {}
    for ids in paths:
        match = memory.tree.match(ids, touch=False)
        tokens.append(usable(memory.layout, match, len(ids) + 1)[0])
        for node in match.nodes:
            end = min(node.end, match.length)
            before = ends.get(id(node), node.start)
            if end == node.end and before < end:
                nbytes += node.checkpoint_bytes
            nbytes += max(0, end - before) * memory.layout.bytes_per_token
            ends[id(node)] = max(end, before)
    return Held(tuple(tokens), nbytes)


def forget(memory: Memory, ids: Tokens, keep: int) -> int:
    """Cut what the tree holds of `ids` beyond its first `keep`, and all that goes on from there.

    What a request uses, or what is still being written, stays. Returns the tokens cut.
    """
    beyond = held_beyond(memory, ids, keep)
    return _cut_below(memory, beyond[0], keep) if beyond else 0


def held_beyond(memory: Memory, ids: Tokens, keep: int) -> list[Node]:
    """The nodes with any token of `ids` beyond `keep`, top down.

    None where the tree holds no such token: the last node may be of others, who went another way.
    """
    match = memory.tree.match(ids, touch=False)
    return [node for node in match.nodes if min(node.end, match.length) > keep]


def _cut_below(memory: Memory, top: Node, keep: int) -> int:
    """Cut `top` and all below it from position `keep` on, the ends first."""
    found = [top]
    for node in found:
        found += node.children.values()
    return sum(_cut(memory, node, keep) for node in reversed(found))


def _cut(memory: Memory, node: Node, keep: int) -> int:
    if node.locks or node.children or node.detached:
        return 0
    room = memory.room
    gone = memory.tree.cut(node, max(node.start, keep))
    memory.budget.release("checkpoints", gone.checkpoint_bytes)
    if id(gone.value) in room.idle:
        room.shrink(gone.value, force=True)
    return gone.tokens


def forget_session(core: Core, ids: Tokens, keep: int) -> None:
    """Cut what the tree holds of a session's `ids` beyond `keep`, and anticipate nothing of it."""
    core.scheduler.ahead.clear()
    forget(core.memory, ids, keep)


def forget_all(core: Core) -> None:
    """Drop all that no request uses."""
    core.scheduler.ahead.clear()
    core.memory.room.clear()
