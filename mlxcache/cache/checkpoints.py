"""Where a prefill stops to leave a checkpoint, and which of a path's checkpoints go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxcache.prompt.marks import MARK_DISTANCE
from mlxcache.tree.prefix_tree import Node
from mlxcache.tree.thinning import checkpoints_to_drop

SPACING = 4000
"""Tokens between the checkpoints of a long run that no mark divides."""


def stops(
    marks: Sequence[int], cached: int, length: int, *, parted: int = 0, most: int | None = None
) -> tuple[int, ...]:
    """Ascending positions in (cached, length) at which a prefill leaves a checkpoint.

    Marks; `parted`, where an earlier prompt left this one; one every few thousand tokens between;
    the last token, where there are no marks. Of those that are close together the first. `most`:
    about how many, the head's, the last ones and `parted` among them.
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
        gone = set(checkpoints_to_drop(chosen, length, most + 1, kept=kept))
        chosen = [at for at in chosen if at not in gone]
    return tuple(chosen[1:])


@dataclass(frozen=True, slots=True)
class Trail:
    """The checkpoints on the path to a node, top down. `parted`: those after which others leave."""

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
        """Where they are, ascending, in tokens."""
        return [node.end for node in self.nodes]

    def checkpoints_to_drop(
        self, end: int, most: int, *, coming: Sequence[int] = (), worth: float = float("inf")
    ) -> list[Node]:
        """Those to drop, in order, of a path of `end` tokens: see `checkpoints_to_drop`.

        `coming`: positions after these at which there will be more.
        """
        at = {node.end: node for node in self.nodes}
        positions = sorted({*at, *coming})
        gone = checkpoints_to_drop(positions, end, most, parted=self.parted, worth=worth)
        return [at[one] for one in gone if one in at]
