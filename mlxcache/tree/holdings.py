"""Which nodes hold which value."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from mlxcache.tree.node import Node


class Holdings:
    """The nodes of each value, top down. Values are told apart by identity, never by equality.

    All nodes of a value lie on one path, because it holds at most one token per position.
    """

    def __init__(self) -> None:
        # A node keeps its value alive, so an id is not reused while it is a key here.
        self._nodes: dict[int, list[Node]] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter([nodes[0].value for nodes in self._nodes.values()])

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, value: Any) -> list[Node]:
        """The nodes that hold `value`, top down; the caller does not change the list."""
        return self._nodes.get(id(value), [])

    def add(self, node: Node) -> None:
        """Enter `node` under its value."""
        insort(self._nodes.setdefault(id(node.value), []), node, key=attrgetter("start"))

    def remove(self, node: Node) -> None:
        """Forget `node`, whose value is still the one it was entered under.

        Raises KeyError or ValueError if it was not entered.
        """
        nodes = self._nodes[id(node.value)]
        nodes.remove(node)
        if not nodes:
            del self._nodes[id(node.value)]
