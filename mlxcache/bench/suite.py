"""Everything that `mlxcache bench` can measure, by the names that --only takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxcache.bench import beside, budget, memory, models
from mlxcache.bench.process import Server
from mlxcache.bench.restore_speed import restore_speed
from mlxcache.bench.scenarios import PARTING, SCENARIOS
from mlxcache.bench.text import Filler
from mlxcache.bench.write_beside import write_beside

MemoryCheck = Callable[[Server, Filler, float], memory.Held]

MEMORY: dict[str, tuple[MemoryCheck, Callable[[Path], Path], tuple[str, ...]]] = {
    "shared_system": (memory.shared_system, models.light, ()),
    "joined": (memory.joined, models.light, ()),
    "crowded": (budget.crowded, models.heavy, ("--ram", budget.RAM)),
    "observed": (budget.observed, models.heavy, ("--ram", budget.OBSERVED)),
    "long_prefill": (beside.long_prefill, models.light, ()),
}
"""Each on a server of its own, started with these flags besides, and where no model is named on
one made for it."""

RESTART: dict[str, Callable[[Path], Path]] = {
    "restart": models.for_speed,
    "restart_window": models.windowed,
    "restart_recurrent": models.recurrent,
}
"""A conversation that goes on after kill -9, on the model made where none is named."""

DiskCheck = Callable[[Path, Path, int, Callable[[str], None]], memory.Held]

DISK: dict[str, tuple[DiskCheck, Callable[[Path], Path]]] = {
    "restore_speed": (restore_speed, models.heavy),
    "write_beside": (write_beside, models.heavy),
}
"""In this process: the model's folder, a folder to write in, repetitions, what tells of steps."""

LONG = ("observed", "long_prefill")
"""They take many minutes."""

DEFAULT = [
    *(name for name in SCENARIOS if name not in PARTING),
    *(name for name in MEMORY if name not in LONG),
    "restart",
    *DISK,
]
NAMES = [*DEFAULT, *LONG, *PARTING, *(name for name in RESTART if name not in DEFAULT)]
"""What runs where nothing is named, and all that can be named."""
