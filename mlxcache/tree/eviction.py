"""Eviction: scores of segments, and a lazy heap of the leaves by score.

GreedyDual-Size-Frequency (L. Cherkasova, "Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories technical report HPL-98-69R1, 1998): a
leaf's score is the clock at its last use plus its worth; the lowest is evicted first, and advances
the clock. Unused entries eventually rank lowest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import log2

from mlxcache.tree.node import Node

Key = tuple[bool, float, int, int]
"""(not replaced, score, tick of the last use, end): the least is evicted first."""


CHECKPOINT_TOKENS = 1024
"""Tokens per checkpoint that make its bytes usual: see `Worth.place`."""

MOST_USES = 7
"""Uses beyond which more do not count, so that a new conversation can catch up."""

KEPT_MORE = 1.0
"""Score that a client's keep hint adds while it lasts: as much as twice the uses."""

PLACE = 0.4
"""Score that twice the usual compute time per byte adds, or half of it subtracts."""


@dataclass(slots=True)
class Worth:
    """The worth of a segment: GreedyDual-Size-Frequency's frequency x cost / size, as a logarithm.

    The logarithm keeps frequent use in the past from outweighing current use. Cost / size counts at
    most one doubling, and one use weighs more than that: a reused segment outlasts one that was not
    reused, at the same clock, and of equal ones the oldest is evicted first. `growth`: measured
    share by which a token takes longer to compute for each one before it.
    """

    bytes_per_token: int
    checkpoint_bytes: int = 0
    growth: float = 0.0

    def of(self, uses: int, tokens: int, end: int, nbytes: int, *, kept: bool = False) -> float:
        """The worth of `tokens` tokens up to position `end`, which take `nbytes` in all."""
        frequency = 1.0 + log2(1 + min(uses, MOST_USES))
        return frequency + KEPT_MORE * kept + PLACE * self.place(tokens, end, nbytes)

    def place(self, tokens: int, end: int, nbytes: int) -> int:
        """Rank the cost of computing the tokens again, per byte freed.

        Compared with the first tokens of a prompt: 0 for about the same, 1 for at least twice as
        much, -1 for at most half.
        """
        usual = self.bytes_per_token + self.checkpoint_bytes / CHECKPOINT_TOKENS
        if nbytes <= 0 or usual <= 0 or tokens <= 0:
            return 0
        dear = tokens * (1.0 + self.growth * end) * usual / nbytes
        return max(-1, min(1, int(log2(dear))))


class EvictionOrder:
    """Leaves by score, lowest first; of equal scores the least recently used.

    A use costs nothing here: an entry's key is a lower bound of its node's key, corrected when the
    entry comes to the top. A change that lowers a key must call `renew`; expiring keep hints are
    watched. A node that is not eligible at the top is dropped, and must be added again once it is.
    `now`: seconds, for keep hints alone.
    """

    def __init__(
        self,
        worth: Worth,
        eligible: Callable[[Node], bool],
        now: Callable[[], float] = time.monotonic,
    ):
        self.worth = worth
        self.clock = 0.0
        self.now = now
        self._eligible = eligible
        self._heap: list[tuple[Key, int, Node]] = []
        self._entered: dict[Node, int] = {}
        self._ends: list[tuple[float, int, Node]] = []
        self._serial = count()

    def __contains__(self, node: Node) -> bool:
        return node in self._entered

    def add(self, node: Node) -> None:
        """Add `node` unless it is in. O(log n)."""
        if node not in self._entered:
            heappush(self._heap, self._entry(node))

    def renew(self, node: Node) -> None:
        """Update a node whose key may be lower now. O(log n)."""
        if node in self._entered:
            heappush(self._heap, self._entry(node))
            self._tidy()

    def discard(self, node: Node) -> None:
        """Remove a node that left the tree for good. O(1), amortised."""
        self._entered.pop(node, None)
        self._tidy()

    def first(self) -> Node | None:
        """The eligible node with the lowest key, which stays in; None if there is none.

        O(log n), amortised over the uses since the last call.
        """
        self._end_wishes()
        while self._heap:
            key, serial, node = self._heap[0]
            if self._entered.get(node) != serial:
                heappop(self._heap)
            elif not self._eligible(node):
                heappop(self._heap)
                del self._entered[node]
            elif key != self.key(node):
                heapreplace(self._heap, self._entry(node))
            else:
                return node
        return None

    def key(self, node: Node) -> Key:
        """The key of `node` now."""
        return (not node.usage.replaced, self.value(node), node.used_at, node.end)

    def value(self, node: Node) -> float:
        """The score of `node`: the clock at its last use plus the worth of its tokens."""
        usage, tokens = node.usage, node.end - node.start
        nbytes = tokens * self.worth.bytes_per_token + node.checkpoint_bytes
        kept = bool(usage.keeps) and usage.until(node.end) > self.now()
        worth = self.worth.of(usage.count, tokens, node.end, nbytes, kept=kept)
        return usage.clock + worth

    def advance(self, node: Node, share: float) -> None:
        """Advance the clock before `node`, which holds `share` of all bytes, is evicted.

        If the node was reused, the clock advances to its score, otherwise only by `share`: prompts
        that are used once can then pass through a small budget without aging other entries much.
        """
        if node.usage.count and not node.usage.replaced:
            self.clock = max(self.clock, self.value(node))
        else:
            self.clock += share

    def wished(self, node: Node) -> int:
        """The last position before the end of `node` with a keep hint; else its start."""
        now, usage = self.now(), node.usage
        within = [at for at, _ in usage.keeps if node.start < at < node.end]
        return max((at for at in within if usage.until(at) > now), default=node.start)

    def _entry(self, node: Node) -> tuple[Key, int, Node]:
        serial = next(self._serial)
        self._entered[node] = serial
        if node.usage.keeps and (until := node.usage.until(node.end)) > self.now():
            heappush(self._ends, (until, serial, node))
        return (self.key(node), serial, node)

    def _end_wishes(self) -> None:
        """Update nodes whose keep hints have expired."""
        now = self.now()
        while self._ends and self._ends[0][0] <= now:
            _, serial, node = heappop(self._ends)
            if self._entered.get(node) == serial:
                self.renew(node)

    def _tidy(self) -> None:
        most = 2 * len(self._entered) + 64
        if len(self._heap) > most:
            self._heap = [one for one in self._heap if self._entered.get(one[2]) == one[1]]
            heapify(self._heap)
        if len(self._ends) > most:
            self._ends = [one for one in self._ends if self._entered.get(one[2]) == one[1]]
            heapify(self._ends)
