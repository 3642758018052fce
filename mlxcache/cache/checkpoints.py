"""Positions at which a prefill takes checkpoints, and checkpoints to drop from a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxcache.prompt.marks import MARK_DISTANCE
from mlxcache.tree.node import Node
from mlxcache.tree.thinning import checkpoints_to_drop

SPACING = 4000
"""Tokens between the checkpoints of a long run without a mark."""


def stops(
    marks: Sequence[int], cached: int, length: int, *, parted: int = 0, most: int | None = None
) -> tuple[int, ...]:
    """Ascending positions in (cached, length) at which a prefill takes a checkpoint.

    These are the marks (the last token if there are none), `parted`, the position at which an
    earlier prompt diverged, and one every `SPACING` tokens between. Of positions less than
    `MARK_DISTANCE` apart, only the first counts. `most`: approximate maximum; the first and the
    last mark and `parted` are always kept.
    """
    last = length - 1
    wanted = sorted({*(marks or [last]), min(parted, last)})
    chosen = [cached]
    for at in [*wanted, length]:
        while at - chosen[-1] > SPACING:
            chosen.append(chosen[-1] + SPACING)
        if at - chosen[-1] >= MARK_DISTANCE and at < length:
            chosen.append(at)
    if most is not None:
        kept = {*marks[:1], *marks[-1:], min(parted, last)}
        dropped = set(checkpoints_to_drop(chosen, length, most + 1, kept=kept))
        chosen = [at for at in chosen if at not in dropped]
    return tuple(chosen[1:])


@dataclass(frozen=True, slots=True)
class Trail:
    """The checkpoints on the path from the root to a node, in this order.

    `parted`: positions of the last checkpoints before a branch of another conversation.
    """

    nodes: tuple[Node, ...]
    parted: frozenset[int]

    @classmethod
    def to(cls, node: Node) -> Trail:
        """The trail that ends at `node`."""
        nodes: list[Node] = []
        parted: set[int] = set()
        for each in node.path():
            if each.checkpoint is not None:
                nodes.append(each)
            if len(each.children) > 1 and nodes:
                parted.add(nodes[-1].end)
        return cls(tuple(nodes), frozenset(parted))

    def checkpoints_to_drop(
        self, end: int, most: int, *, coming: Sequence[int] = (), worth: float = float("inf")
    ) -> list[Node]:
        """Nodes whose checkpoints to drop, in order, on a path of `end` tokens.

        `coming`: positions of checkpoints that are about to be added. See `tree.thinning`.
        """
        at = {node.end: node for node in self.nodes}
        positions = sorted({*at, *coming})
        dropped = checkpoints_to_drop(positions, end, most, parted=self.parted, worth=worth)
        return [at[one] for one in dropped if one in at]
