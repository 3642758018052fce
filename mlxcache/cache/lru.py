"""The least recently used node, by a heap that is corrected only when it is asked."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from mlxcache.cache.node import Node

Entry = tuple[int, int, int, Node]
"""Use when entered, position, serial number, node."""


class Recency:
    """Nodes by last use, oldest first; of equal use, the one that ends first.

    A use costs nothing here: an entry's key is a lower bound of its node's `used_at`, put right
    when the entry comes to the top. A node that is not eligible then is forgotten, and must be
    added again once it is.
    """

    def __init__(self, eligible: Callable[[Node], bool]):
        self._eligible = eligible
        self._heap: list[Entry] = []
        self._members: set[Node] = set()
        self._serial = count()

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def add(self, node: Node) -> None:
        """Enter `node`; nothing happens if it is in. O(log n)."""
        if node not in self._members:
            self._members.add(node)
            heappush(self._heap, self._entry(node))

    def discard(self, node: Node) -> None:
        """Forget a node that left the tree for good. O(1), amortised."""
        self._members.discard(node)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[3] in self._members]
            heapify(self._heap)

    def oldest(self) -> Node | None:
        """The eligible node used least recently, which stays in; None if there is none.

        O(log n), amortised over the uses since the last call.
        """
        while self._heap:
            used_at, _, _, node = self._heap[0]
            if node not in self._members or not self._eligible(node):
                heappop(self._heap)
                self._members.discard(node)
            elif used_at != node.used_at:
                heapreplace(self._heap, self._entry(node))
            else:
                return node
        return None

    def check(self) -> None:
        """Raise AssertionError unless each member has one entry, none of them too young."""
        entered = [entry[3] for entry in self._heap if entry[3] in self._members]
        assert len(entered) == len(self._members), "a node has no entry in the heap, or two"
        for node in self._members:
            assert not node.detached, f"{node} left the tree and is still remembered"
        for index, (used_at, _, _, node) in enumerate(self._heap):
            assert used_at <= node.used_at, f"{node} is keyed younger than it is"
            assert self._heap[(index - 1) // 2][:3] <= self._heap[index][:3] or index == 0, (
                "the heap is out of order"
            )

    def _entry(self, node: Node) -> Entry:
        return (node.used_at, node.end, next(self._serial), node)
