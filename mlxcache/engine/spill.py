"""One path of the prefix tree on its way to disk. MLX thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxcache.cache.tree import Node
from mlxcache.model.kv import State
from mlxcache.store.digests import Chain
from mlxcache.types import Tokens

NEWEST_STATES = 3
"""Checkpoints of a path that are written: its first, and so many of the newest."""


@dataclass(slots=True, eq=False)
class Spill:
    """Tokens on their way to disk: `at` is the next to hand over, `states` follow the runs.

    `chain` has the digests of its blocks. `flying` jobs are with the writer.
    """

    node: Node
    ids: Tokens
    chain: Chain
    at: int
    states: list[tuple[int, State]] = field(default_factory=list)
    flying: int = 0
    tries: int = 0

    @property
    def handed(self) -> bool:
        """Whether the writer has got all of it."""
        return self.at >= len(self.ids) and not self.states


def states_worth_writing(node: Node) -> list[tuple[int, State]]:
    """The checkpoints on the path to `node` that are worth a file, by their position."""
    held = [(n.end, n.checkpoint) for n in node.path() if n.checkpoint is not None]
    return held[:1] + held[1:][-NEWEST_STATES:]
