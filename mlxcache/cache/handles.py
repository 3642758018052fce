"""How many buffers are held: Metal has a limit on them as well as on bytes. MLX thread only."""

from __future__ import annotations

from typing import Any

from mlxcache.model.arrays import ArraySpec
from mlxcache.model.kv import Layout

SHARE = 0.75
"""Of the device's limit, for what is cached; the rest is for weights and forward passes."""


class Handles:
    """Buffers of lineages and checkpoints, counted, under `limit`, which may be None."""

    def __init__(self, layout: Layout, limit: int | None):
        states = _specs(layout.states)
        self.per_lineage = sum(map(len, layout.specs)) + states
        self.per_checkpoint = states
        self.limit = None if limit is None else int(SHARE * limit)

    def count(self, lineages: int, checkpoints: int) -> int:
        """Those that so many lineages and checkpoints have."""
        return lineages * self.per_lineage + checkpoints * self.per_checkpoint

    def allow(self, count: int) -> bool:
        """Whether so many may be."""
        return self.limit is None or count <= self.limit


def _specs(value: Any) -> int:
    """How many arrays a layout's states have."""
    if isinstance(value, list | tuple):
        return sum(map(_specs, value))
    return int(isinstance(value, ArraySpec))
