"""Scores of segments for eviction, and a heap that orders leaves by score.

The policy is GreedyDual-Size-Frequency (L. Cherkasova, "Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories technical report HPL-98-69R1, 1998). The
score of a leaf is the clock at its last use plus its worth. The leaf with the lowest score is
evicted first, and the clock advances to that score, so that unused entries eventually rank lowest.
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
"""(not replaced, score, tick of the last use, end): the node with the lowest is evicted first."""

CHECKPOINT_TOKENS = 1024
"""Tokens for which one checkpoint is assumed when `Worth.place` computes the usual bytes per token.
"""

MOST_USES = 3
"""Number of uses above which further ones do not count, so that a new conversation can catch up.

With 7, sessions that had ended kept their place: `tests.proofs.policies`.
"""

KEPT_MORE = 1.0
"""Score that a client's keep hint adds while it lasts: as much as twice the uses."""

PLACE = 0.4
"""Score added if computing a segment again takes twice the usual time per byte, or subtracted if
half.
"""


@dataclass(slots=True)
class Worth:
    """Scorer of segments for eviction: the logarithm of frequency x cost / size.

    The logarithm keeps frequent use in the past from outweighing current use. Cost / size is
    compared with that of the first tokens of a prompt, and counts as at least half of it and at
    most twice. One use weighs more than that: at the same clock, a segment that was reused outlasts
    one that was not.

    `growth`: measured relative increase of a token's compute time for each token before it.
    """

    bytes_per_token: int
    checkpoint_bytes: int = 0
    growth: float = 0.0

    def of(self, uses: int, tokens: int, end: int, nbytes: int, *, kept: bool = False) -> float:
        """Return the worth of a segment that ends at `end`; with `kept`, a keep hint holds."""
        frequency = 1.0 + log2(1 + min(uses, MOST_USES))
        return frequency + KEPT_MORE * kept + PLACE * self.place(tokens, end, nbytes)

    def place(self, tokens: int, end: int, nbytes: int) -> int:
        """Rank the cost of computing a segment again, per byte that evicting it frees."""
        usual = self.bytes_per_token + self.checkpoint_bytes / CHECKPOINT_TOKENS
        if nbytes <= 0 or usual <= 0 or tokens <= 0:
            return 0
        dear = tokens * (1.0 + self.growth * end) * usual / nbytes
        return max(-1, min(1, int(log2(dear))))


class EvictionClock:
    """The clock of GreedyDual, which only moves forward; several eviction orders may share it.

    `now`: a number without a unit like all scores; 1 is as much as twice the uses (see `Worth`).
    `ticks`: number of uses of nodes so far; of equal scores the lower one comes first. `held()`
    returns the bytes of all trees whose leaves are in these orders.
    """

    def __init__(self, held: Callable[[], int]):
        self.held = held
        self.now = 0.0
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1


class EvictionOrder:
    """Leaves ordered by score, lowest first; the least recently used first among equal scores.

    Leaves that were never reused, and whose conversation has continued on another branch, come
    before all others. The key stored for a node is a lower bound of its true key, and is corrected
    when the node reaches the top, so using a node needs no update. A change that lowers a key must
    be followed by `renew`. A node that reaches the top while `eligible` returns False for it is
    dropped, and must be added again once it is eligible.
    """

    def __init__(
        self,
        worth: Worth,
        eligible: Callable[[Node], bool],
        clock: EvictionClock,
        now: Callable[[], float] = time.monotonic,
    ):
        self._worth = worth
        self._clock = clock
        self._now = now
        self._eligible = eligible
        self._heap: list[tuple[Key, int, Node]] = []
        self._entered: dict[Node, int] = {}
        self._ends: list[tuple[float, int, Node]] = []
        self._serial = count()

    def __contains__(self, node: Node) -> bool:
        return node in self._entered

    def add(self, node: Node) -> None:
        if node not in self._entered:
            heappush(self._heap, self._entry(node))

    def renew(self, node: Node) -> None:
        if node in self._entered:
            heappush(self._heap, self._entry(node))
            self._tidy()

    def discard(self, node: Node) -> None:
        self._entered.pop(node, None)
        self._tidy()

    def first(self) -> Node | None:
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
        return (not node.usage.replaced, self._score(node), node.used_at, node.end)

    def _score(self, node: Node) -> float:
        usage, tokens = node.usage, node.end - node.start
        nbytes = tokens * self._worth.bytes_per_token + node.checkpoint_bytes
        kept = bool(usage.keeps) and usage.until(node.end) > self._now()
        worth = self._worth.of(usage.count, tokens, node.end, nbytes, kept=kept)
        return usage.clock + worth

    def advance(self, node: Node, size: int) -> None:
        """Advance the eviction clock before `size` bytes of `node` are evicted.

        To the node's score if it was reused. Otherwise only by its share of the bytes in all trees:
        prompts that are used once can then pass through a small budget without lowering the rank of
        other entries much.
        """
        clock: EvictionClock = self._clock
        if node.usage.count and not node.usage.replaced:
            clock.now = max(clock.now, self._score(node))
        else:
            clock.now += size / max(1, clock.held())

    def _entry(self, node: Node) -> tuple[Key, int, Node]:
        serial = next(self._serial)
        self._entered[node] = serial
        if node.usage.keeps and (until := node.usage.until(node.end)) > self._now():
            heappush(self._ends, (until, serial, node))
        return (self.key(node), serial, node)

    def _end_wishes(self) -> None:
        now = self._now()
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
