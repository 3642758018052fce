"""Placement of a request: choose the lineage in which it continues, and fill this lineage.

A lineage that ends where the matched prefix ends is continued in place. One that holds more is
split first. If no idle lineage can be continued, the prefix is copied into a new one. The functions
tell how much of a matched prefix can be used. MLX thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mlxcache.cache.ram import STEP, WHOLE_LINEAGES, Evict, RamTier, rounded
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Lineage, Span, finite_upto, state_is_finite
from mlxcache.tree.node import Match, Node


def reusable(layout: Layout, match: Match, prompt_tokens: int) -> tuple[int, State | None]:
    """Return how many leading tokens of a prompt's match can be reused, and the state there.

    At least one token of the prompt is left to feed, because its logits are needed.
    """
    if not layout.cacheable:
        return 0, None
    limit = intact(match, prompt_tokens - 1)
    if not layout.opaque:
        return limit, None
    if layout.keeps_rows and limit and owner_at(match, limit).covers(limit):
        return limit, None
    found = [(at, node) for at, node in match.checkpoints if at <= limit]
    return (found[-1][0], found[-1][1].checkpoint) if found else (0, None)


def intact(match: Match, upto: int) -> int:
    """Return how many leading tokens of a match, at most `upto`, have all their KV in RAM."""
    limit = min(match.length, upto)
    return min(limit, next((start for value, start, _ in match.segments if value.lost), limit))


def owner_at(match: Match, position: int) -> Lineage:
    """Return the lineage that holds the token before `position`."""
    owner: Lineage = match.spans(position)[-1][0]
    return owner


def finite_prefix(match: Match, reused: int) -> int:
    """Return how many leading tokens of a request to keep after the model produced NaN.

    Of the `reused` ones, those before a segment whose checkpoint is not finite. Tokens after them
    are kept too if another path of the tree shares them and all their KV and checkpoints are
    finite.
    """
    parted = [node.end for node in match.nodes if len(node.children) > 1]
    if match.nodes and (match.nodes[-1].children or match.nodes[-1].end > match.length):
        parted.append(match.length)
    wanted = max([reused, *parted])
    finite: dict[Lineage, int] = {}  # each is read once: there may be gigabytes of it
    for node in match.nodes:
        end = min(node.end, wanted)
        if node.start >= wanted:
            break
        if end > reused and node.value not in finite:
            finite[node.value] = 0 if node.value.lost else finite_upto(node.value)
        if end > finite.get(node.value, end):
            return reused
        state = node.checkpoint if end == node.end else None
        if state is not None and not state_is_finite(state):
            return node.start if end <= reused else reused
    return wanted


class Placed(NamedTuple):
    """A lineage with a prefix, and the locked node at which it ends; None for a new lineage."""

    lineage: Lineage
    node: Node | None = None


class Placement:
    def __init__(self, ram: RamTier):
        self._ram = ram
        self._tree = ram.tree
        self._layout: Layout = ram.layout
        self.continued: deque[Lineage] = deque(maxlen=WHOLE_LINEAGES)

    def place(self, match: Match, cached: int, least: int, evict: Evict) -> Placed | None:
        """Continue the idle lineage that needs the fewest copied tokens, or fill a new one.

        The lineage returned holds the first `cached` tokens of `match`, has room for `least`
        positions in all, for which bytes are reserved, and is marked as in use. None if there is no
        room.
        """
        spans: list[Span] = match.spans(cached) if cached else []
        best, cost = -1, cached
        for i, (owner, _, end) in enumerate(spans if self._layout.specs else []):
            if id(owner) not in self._ram.idle or not (owner.whole or end == cached):
                continue
            copies = self._tail(owner, end) + (cached - end if owner.whole else cached)
            # the newest owner wins a tie: it is whole, or will be
            if copies <= cost:
                best, cost = i, copies
        if best >= 0 and self._split_tail(match, spans[best][0], spans[best][2], evict):
            return self._continue(match, spans, best, least, evict)
        return self._copy(spans, cached, least, evict)

    def _tail(self, owner: Lineage, end: int) -> int:
        held = self._tree.live_range(owner)
        return max(0, held[1] - end) if held else 0

    def _split_tail(self, match: Match, owner: Lineage, end: int, evict: Evict) -> bool:
        reserved = self._tail(owner, end)
        if not self._ram.reserve_kv(reserved, evict=evict):
            return False
        with self.charged(owner, owner.capacity + reserved):
            tail = self._tail(owner, end)  # less, if room was made by evicting part of it
            if tail:
                self._split_node(match, end)
                twin = owner.detach(end, end + tail)
                self._ram.set_idle(twin)
        self._ram.budget.release("kv", (reserved - tail) * self._layout.bytes_per_token)
        if tail:
            self._tree.retarget([n for n in self._tree.holders(owner) if n.start >= end], twin)
        return True

    def _split_node(self, match: Match, position: int) -> Node:
        for node in match.nodes:
            if node.start < position <= node.end:
                return self._tree.split_at(node, position)
            if node.start == position and node.parent is not None:
                return node.parent
        raise ValueError(f"no node of the match reaches {position}")

    def _continue(
        self, match: Match, spans: list[Span], at: int, least: int, evict: Evict
    ) -> Placed | None:
        """Continue a request in the lineage of `spans[at]`: in place, or in larger buffers."""
        owner, _, end = spans[at]
        cached = spans[-1][2]
        capacity = owner.capacity
        self._ram.set_busy(owner)  # making room must not evict it
        found = None
        try:
            fits = owner.whole and capacity >= least
            found = capacity if fits else self._ram.reserve_buffer(capacity, least, evict)
        finally:
            if found is None:
                self._ram.set_idle(owner)
        if found is None:
            return None
        capacity = found
        with self.charged(owner, capacity):
            if owner.whole:
                owner.truncate(end)
                owner.grow(capacity)
                for span in spans[at + 1 :]:
                    owner.append_span(span)
            else:
                self._ram.drop_rows(owner)
                owner.fill(spans, capacity)
            node = self._split_node(match, cached)
            placed = Placed(owner, node)
            self._tree.lock(node)
            return placed

    def grow_ahead(self) -> bool:
        """Enlarge the buffers of one lineage in which the next turn may not fit, by a copy.

        Returns False if none is left; nothing is enlarged without memory to spare.
        """
        while self.continued:
            lineage = self.continued.popleft()
            held = lineage.capacity
            least = rounded(lineage.length + lineage.turn_tokens + STEP)
            fits = held >= least or not self._ram.spares()
            if fits or not lineage.whole or id(lineage) not in self._ram.idle:
                continue
            capacity = self._ram.reserve_buffer(held, least, "no")
            if capacity is not None:
                with self.charged(lineage, capacity):
                    lineage.grow(capacity)
                self._ram.widen_rows(lineage, least)
                return True
        return False

    @contextmanager
    def charged(self, lineage: Lineage, capacity: int, leased: bool = False) -> Iterator[None]:
        """Context manager whose body allocates buffers for `lineage`.

        The caller has charged the bytes of `capacity` positions before. If the body raises, the
        bytes that were not allocated are released, and the lineage becomes idle again if its
        content is intact, else is discarded; if it is `leased`, it stays in use.
        """
        try:
            yield
        except BaseException:
            missing = capacity - lineage.capacity
            self._ram.budget.release("kv", missing * self._layout.bytes_per_token)
            if not leased:
                self._put_back(lineage)
            raise

    def _put_back(self, lineage: Lineage) -> None:
        held = self._tree.live_range(lineage)
        if held is None or lineage.lost:
            self._ram.discard(lineage)
            return
        lineage.truncate(held[1])
        try:
            sound = lineage.sound()
        except RuntimeError:
            self._ram.discard(lineage)
            raise
        if not sound:
            self._ram.discard(lineage)
        elif id(lineage) in self._ram.busy:
            self._ram.set_idle(lineage)

    def _copy(self, spans: list[Span], cached: int, least: int, evict: Evict) -> Placed | None:
        capacity = self._ram.reserve_buffer(0, least, evict)
        if capacity is None:
            return None
        try:
            lineage = self._ram.make_lineage(self._layout, self._ram.copy_bytes)
        except BaseException:
            self._ram.reserve_kv(-capacity, evict="no")
            raise
        with self.charged(lineage, capacity):
            lineage.fill(spans, capacity)
            if not self._layout.specs:
                lineage.advance(cached - lineage.length)
            self._ram.set_busy(lineage)
            return Placed(lineage)
