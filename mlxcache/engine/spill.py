"""One path of the prefix tree on its way to disk. MLX thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxcache.cache.tree import Node
from mlxcache.model.kv import State
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Found
from mlxcache.types import Tokens

NEWEST_STATES = 3
"""Checkpoints of a path that are written: its first, and so many of the newest."""

States = list[tuple[int, State]]
"""Checkpoints by their position, ascending."""


@dataclass(slots=True, eq=False)
class Spill:
    """Tokens on their way to disk, and the checkpoints `wanted` there.

    Once the disk was `looked` at, `at` is the next token to hand over, and `states` follow the
    runs. `flying` jobs are with the writer. `lost`: what they build on was not there any more.
    """

    node: Node
    ids: Tokens
    wanted: States
    looked: bool = False
    at: int = 0
    states: States = field(default_factory=list)
    flying: int = 0
    lost: bool = False
    tries: int = 0

    @property
    def handed(self) -> bool:
        """Whether the writer has got all that it is to get."""
        return self.looked and self.at >= len(self.ids) and not self.states

    def begin(self, found: Found, *, runs: bool) -> None:
        """Hand over what `found` on disk lacks; without `runs`, checkpoints alone."""
        whole = found.length // BLOCK * BLOCK if found.length < len(self.ids) else len(self.ids)
        self.at = whole if runs else len(self.ids)
        there = [one.position for one in found.checkpoints]
        self.states = [
            one for i, one in enumerate(self.wanted) if _lacking(one[0], there, first=i == 0)
        ]
        self.looked = True

    def stop(self, *, lost: bool = False) -> None:
        """Hand over nothing more; all over again once the writer is through if it is `lost`."""
        self.looked, self.at, self.states, self.lost = True, len(self.ids), [], lost

    def again(self) -> None:
        """Begin again with a look at the disk."""
        self.looked, self.at, self.lost = False, 0, False
        self.tries += 1


def _lacking(position: int, there: list[int], *, first: bool) -> bool:
    """Whether the disk, which has checkpoints at `there`, would keep one at `position`."""
    if position in there:
        return False
    newer = sum(other > position for other in there)
    return newer < NEWEST_STATES or (first and newer == len(there))


def states_worth_writing(node: Node) -> States:
    """The checkpoints on the path to `node` that are worth a file."""
    held = [(n.end, n.checkpoint) for n in node.path() if n.checkpoint is not None]
    return held[:1] + held[1:][-NEWEST_STATES:]
