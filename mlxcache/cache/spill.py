"""One path of the prefix tree on its way to disk. MLX thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxcache.model import serialise as wire
from mlxcache.model.kv import Layout, State
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Found
from mlxcache.store.writer import Job
from mlxcache.tree.prefix_tree import Node
from mlxcache.tree.thinning import allowed, spared
from mlxcache.types import Tokens

States = list[tuple[int, State]]
"""Checkpoints by their position, ascending."""


@dataclass(slots=True, eq=False)
class Spill:
    """Tokens on their way to disk, and the checkpoints `wanted` there.

    Once the disk was `looked` at, `at` is the next token to hand over, and `states` follow the
    runs. `flying` jobs are with the writer. `lost`: what they build on was not there any more.
    `reused`: tokens that a request went on from, which is yet to be counted on disk.
    """

    node: Node
    ids: Tokens
    wanted: States
    reused: int = 0
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

    def begin(self, found: Found, layout: Layout, limit: int) -> None:
        """Hand over what `found` on disk lacks, of which the tier takes `limit` bytes."""
        whole = found.length // BLOCK * BLOCK if found.length < len(self.ids) else len(self.ids)
        self.at = whole if layout.specs else len(self.ids)
        there = [one.position for one in found.checkpoints]
        lacking = _lacking([at for at, _ in self.wanted if at <= len(self.ids)], there)
        size, kv_bytes = layout.checkpoint_bytes, len(self.ids) * layout.bytes_per_token
        most = allowed(kv_bytes, size, limit) // max(1, size)
        gone = spared(sorted({*there, *lacking}), len(self.ids), most)
        self.states = [one for one in self.wanted if one[0] in lacking and one[0] not in gone]
        self.looked = True

    def checkpoint(self, layout: Layout) -> Job | None:
        """The next checkpoint as a job; None where its path has become shorter."""
        at, state = self.states.pop(0)
        ids = self.ids[:at]
        if len(ids) < at:
            return None
        return Job(ids, None, wire.state_tensors(state), layout.checkpoint_bytes, self)

    def stop(self, *, lost: bool = False) -> None:
        """Hand over nothing more; all over again once the writer is through if it is `lost`."""
        self.looked, self.at, self.states, self.lost = True, len(self.ids), [], lost

    def waive(self, state: State) -> None:
        """Have one checkpoint less written, and let go of it."""
        self.wanted = [one for one in self.wanted if one[1] is not state]
        self.states = [one for one in self.states if one[1] is not state]

    def again(self) -> None:
        """Begin again with a look at the disk."""
        self.looked, self.at, self.lost = False, 0, False
        self.tries += 1


def _lacking(positions: list[int], there: list[int]) -> set[int]:
    """Which of `positions` the disk, which has checkpoints at `there`, has never had.

    What is older than its newest was there, and was thinned; but the first stays for ever.
    """
    newer = {at for at in positions if at > max(there, default=0)}
    head = {at for at in positions[:1] if at < min(there, default=0)}
    return newer | head


def states_of(node: Node) -> States:
    """The checkpoints on the path to `node`."""
    return [(n.end, n.checkpoint) for n in node.path() if n.checkpoint is not None]
