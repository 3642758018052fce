"""Where a prefill stops to leave a checkpoint, and which checkpoints of a path are dropped."""

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
    """Ascending positions in (cached, length) at which a prefill leaves a checkpoint.

    The marks; `parted`, where an earlier prompt left this one; one every `SPACING` tokens between;
    the last token if there are no marks. Of positions close together only the first. `most`: about
    how many, the head's, the last mark and `parted` among them.
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
    """The checkpoints on the path to a node, top down.

    `parted`: positions of those after which another conversation leaves the path.
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

    @property
    def positions(self) -> list[int]:
        """Positions of the checkpoints in tokens, ascending."""
        return [node.end for node in self.nodes]

    def checkpoints_to_drop(
        self, end: int, most: int, *, coming: Sequence[int] = (), worth: float = float("inf")
    ) -> list[Node]:
        """Nodes whose checkpoints to drop, in order, on a path of `end` tokens; see
        `tree.thinning`.

        `coming`: positions at which there will be more.
        """
        at = {node.end: node for node in self.nodes}
        positions = sorted({*at, *coming})
        dropped = checkpoints_to_drop(positions, end, most, parted=self.parted, worth=worth)
        return [at[one] for one in dropped if one in at]
