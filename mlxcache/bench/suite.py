"""Everything that `mlxcache bench` can measure, by the names that --only takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxcache.bench import budget, memory, models
from mlxcache.bench.process import Server
from mlxcache.bench.scenarios import SCENARIOS
from mlxcache.bench.text import Filler

MemoryCheck = Callable[[Server, Filler, float], memory.Held]

MEMORY: dict[str, tuple[MemoryCheck, Callable[[Path], Path], tuple[str, ...]]] = {
    "shared_system": (memory.shared_system, models.light, ()),
    "joined": (memory.joined, models.light, ()),
    "crowded": (budget.crowded, models.heavy, ("--ram", budget.RAM)),
}
"""Each on a server of its own, started with these flags besides, and where no model is named on
one made for it."""

NAMES = [*SCENARIOS, *MEMORY]
