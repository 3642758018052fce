"""What was asked for, by whom, and what nobody will ask for again: what eviction goes by."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcache.tree.edges import Edges
from mlxcache.tree.node import Match, Node


def same_conversation(node: Node, anchor: int | None) -> bool:
    """Whether what goes on from the end of `node` is of one conversation with it.

    The first `anchor` tokens make it that and no other. None: nobody knows, and only what goes on
    from the very end of a leaf is.
    """
    if anchor is None:
        return node.end > 0 and not node.children
    return 0 < anchor <= node.end


class Uses:
    """The uses of a tree's segments. Each verb changes them, and so the order of eviction."""

    def __init__(self, edges: Edges):
        self._edges = edges

    def found(self, match: Match, tokens: int, anchor: int | None = None) -> int:
        """Count a request for `tokens` tokens that found `match`, made just now.

        Returns the uses of its conversation, 0 if nothing is there of that.

        `anchor` as `same_conversation` has it. Where the request goes another way than what its
        conversation held, that is replaced, if nobody ever came back to it: such leaves go before
        all others. May split an edge.
        """
        nodes, length = [node for node in match.nodes if node.end <= match.length], match.length
        if match.nodes and length == tokens:
            nodes = list(match.nodes)
        if anchor is not None and 0 < anchor <= length < tokens:
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
        return nodes[-1].usage.count if nodes and same_conversation(nodes[-1], anchor) else 0

    def renew(self, nodes: Sequence[Node], least: int = 0) -> None:
        """Let the path to the last of `nodes` that is there be used just now, and `least` times.

        For what is expected back without having been asked for.
        """
        last = next((node for node in reversed(nodes) if not node.detached), None)
        path = last.path()[1:] if last is not None else []
        self._edges.touch(path)
        for node in path:
            node.usage.count = max(node.usage.count, least)
        for node in path:
            self._edges.compress(node)

    def keep(self, node: Node, wishes: tuple[tuple[int, float], ...]) -> None:
        """Note what clients wish of the path to `node`: (position, seconds after each use)."""
        for each in node.path():
            each.usage.keep(tuple(wish for wish in wishes if wish[0] > each.start))

    def wished(self, leaf: Node) -> int:
        """Up to where a client wishes `leaf` kept: where a leaf of more worth would end; its start
        if there is no such place. Changes nothing."""
        return self._edges.leaves.wished(leaf)

    def evicting(self, leaf: Node, position: int) -> None:
        """Say that `leaf` is about to be evicted from `position` on: what is used then is newer."""
        leaves, held = self._edges.leaves, self._edges.nbytes
        size = (leaf.end - position) * leaves.worth.bytes_per_token + leaf.checkpoint_bytes
        leaves.advance(leaf, size / max(1, held))
