"""How often and how recently the segments of a prefix tree were used, by which they are evicted."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcache.tree.edges import Edges
from mlxcache.tree.node import Match, Node


def same_conversation(node: Node, key: int | None) -> bool:
    """Return whether tokens appended after `node` belong to the same conversation as `node`.

    The first `key` tokens of a prompt identify its conversation, so the answer is True if `node`
    ends at or after them. With `key` None it is True only for a leaf.
    """
    if key is None:
        return node.end > 0 and not node.children
    return 0 < key <= node.end


class Uses:
    """Usage counts of a tree's segments. Each method but `wished` changes the eviction order."""

    def __init__(self, edges: Edges):
        self._edges = edges

    def found(self, match: Match, tokens: int, key: int | None = None) -> int:
        """Count a request of `tokens` tokens whose lookup, made just before, returned `match`.

        Returns the number of uses of the request's conversation, this one included, or 0 if the
        request reuses no segment of it. The first `key` tokens identify the conversation (see
        `same_conversation`). Segments of the conversation after the point where the request
        diverges are marked as replaced, so that they are evicted first, unless a request has
        reused them before. May split an edge.
        """
        nodes, length = [node for node in match.nodes if node.end <= match.length], match.length
        if match.nodes and length == tokens:
            nodes = list(match.nodes)
        if key is not None and 0 < key <= length < tokens:
            last = match.nodes[-1]
            if length < last.end and last.usage.reach <= length:
                last = self._edges.divide(last, length)
                last.asked = True
                nodes.append(last)
                self._edges.touch([last])
            if length == last.end:
                self._edges.pass_by(last)
        for node in nodes:
            node.usage.count += 1
            node.usage.reach = max(node.usage.reach, min(node.end, length))
        return nodes[-1].usage.count if nodes and same_conversation(nodes[-1], key) else 0

    def renew(self, nodes: Sequence[Node], least: int = 0) -> None:
        """Mark the path to the last of `nodes` that is still in the tree as used now.

        `nodes` follow one another on a path, from the root down. The number of uses of each node on
        the path is raised to at least `least`. May merge edges. Called for a conversation that no
        request uses at the moment, but that is expected to continue.
        """
        last = next((node for node in reversed(nodes) if not node.detached), None)
        path = last.path()[1:] if last is not None else []
        self._edges.touch(path)
        for node in path:
            node.usage.count = max(node.usage.count, least)
        for node in path:
            self._edges.compress(node)

    def keep(self, node: Node, wishes: tuple[tuple[int, float], ...]) -> None:
        """Add the clients' keep hints `wishes` to the nodes on the path to `node`.

        Each hint is a pair: the position in the prompt up to which to keep its tokens, and the
        seconds to keep them after each use.
        """
        for each in node.path():
            each.usage.keep(tuple(wish for wish in wishes if wish[0] > each.start))

    def wished(self, leaf: Node) -> int:
        """Return the highest position inside `leaf` up to which a keep hint has not expired.

        Positions count tokens from the start of the prompt. Returns the start of the leaf if there
        is no such hint; a hint for its end is not considered. Changes nothing.
        """
        return self._edges.leaves.wished(leaf)

    def evicting(self, leaf: Node, position: int) -> None:
        """Advance the eviction clock before part of `leaf` is evicted.

        The clock is a number, of which a segment stores the value at its last use. This value plus
        its worth ranks the segment for eviction. The part to be evicted is from `position`, in
        tokens of the prompt, to the end of the leaf.
        """
        leaves, held = self._edges.leaves, self._edges.nbytes
        size = (leaf.end - position) * leaves.worth.bytes_per_token + leaf.checkpoint_bytes
        leaves.advance(leaf, size, held)
