"""Positions at which a prefill takes checkpoints, and the choice of checkpoints to drop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxcache.model.kv import Layout
from mlxcache.prompt.marks import MARK_DISTANCE
from mlxcache.tree.node import Node
from mlxcache.tree.thinning import NEWEST, allowed, checkpoints_to_drop

SPACING = 4000
"""Tokens between the checkpoints of a long part of a prompt without marks."""


WINDOW_SHARE = 4
"""Divisor: checkpoints that are windows alone may take 1/WINDOW_SHARE of their path's KV.

They are large, and with memory to spare the rows between them are kept too.
"""


def most_checkpoints(layout: Layout, tokens: int, limit: int) -> int:
    """Return how many checkpoints a path of `tokens` tokens may have in a tier of `limit` bytes."""
    size, kv_bytes = max(1, layout.checkpoint_bytes), tokens * layout.bytes_per_token
    if layout.keeps_rows:
        return max(NEWEST + 1, kv_bytes // (WINDOW_SHARE * size))
    return allowed(kv_bytes, size, limit) // size


def stops(
    marks: Sequence[int], cached: int, length: int, *, parted: int = 0, most: int | None = None
) -> tuple[int, ...]:
    """Return the positions in (cached, length) at which a prefill takes a checkpoint, ascending.

    They are the `marks` (without any, the last token), `parted`, at which an earlier prompt
    diverged, and one every `SPACING` tokens between them. Of marks and `parted`, those less than
    `MARK_DISTANCE` after another position are left out. `most`: approximate maximum number of
    positions. More are thinned, but the first mark, the last mark, `parted` and the last 4
    positions stay.
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
    """The nodes with a checkpoint on the path to a node, in the order of the path.

    `parted`: positions of those checkpoints that are the last before a branch of the tree.
    """

    nodes: tuple[Node, ...]
    parted: frozenset[int]

    @classmethod
    def to(cls, node: Node) -> Trail:
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
        """Choose nodes whose checkpoints to drop; see `thinning.checkpoints_to_drop`.

        `coming`: positions of checkpoints that are about to be added; they count too.
        """
        at = {node.end: node for node in self.nodes}
        positions = sorted({*at, *coming})
        dropped = checkpoints_to_drop(positions, end, most, parted=self.parted, worth=worth)
        return [at[one] for one in dropped if one in at]
