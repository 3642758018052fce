"""Where paths end in a prefix tree: compared once, and again only where the tree changed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from weakref import ref

from mlxcache.lru import LRU
from mlxcache.tree.node import Match, Node
from mlxcache.tree.prefix_tree import PrefixTree
from mlxcache.types import Tokens

MOST_ENDS = 20_000
"""Most paths whose ends are remembered."""


@dataclass(frozen=True, slots=True)
class _End:
    """The first `length` tokens of a path are in the tree, and end in `node`.

    `edge`: the token ids of `node` then, which the tree replaces by others and never changes; held
    weakly, because the tree may drop them. `following`: the path's next token id, None at its end.
    """

    node: Node
    edge: ref[Tokens]
    length: int
    following: int | None

    def holds(self) -> bool:
        """Return whether the path still ends here, as no token was added or removed at its end."""
        node = self.node
        if self.edge() is not node.tokens:
            return False
        return self.length < node.end or self.following not in node.children


class PathEnds:
    """Remembers where paths end in `tree`. Used on the thread of the tree."""

    def __init__(self, tree: PrefixTree):
        self._tree = tree
        self._ends: LRU[Hashable, _End] = LRU(MOST_ENDS)

    def match(self, key: Hashable, ids: Tokens | None) -> Match | None:
        """Return the match of a path, or None if `ids` is None and tokens must be compared.

        `key` stands for the path: it has the same token ids in each call. `ids`: these token ids,
        int32 of shape (n,). Without them it takes O(nodes of the path). Changes nothing.
        """
        if not self._tree.root.children:
            return Match.of((), 0)
        end = self._ends.get(key)
        if end is not None and end.holds():
            return Match.of(end.node.path()[1:], end.length)
        if ids is None:
            return None
        match = self._tree.match(ids, touch=False)
        node = match.nodes[-1] if match.nodes else self._tree.root
        following = int(ids[match.length]) if match.length < len(ids) else None
        self._ends.put(key, _End(node, ref(node.tokens), match.length, following))
        return match
