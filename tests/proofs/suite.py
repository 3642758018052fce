"""All measurements that `bin/bench` offers, by the names that --only takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mlxcache.bench import report
from mlxcache.bench.checks import Measured
from mlxcache.bench.command import Bench
from mlxcache.bench.disk import restore_speed, write_beside
from mlxcache.bench.process import NoOwnTime, Server, measuring, running
from mlxcache.bench.replay import Replay
from mlxcache.bench.scenarios import PARTING, SCENARIOS
from mlxcache.bench.text import Filler
from mlxcache.model.hub import resolve
from tests.proofs import models, under_load
from tests.proofs.guided import guided

ModelMaker = Callable[[Path], Path]
MemoryCheck = Callable[[Server, Filler, float], Measured]
DiskCheck = Callable[[Path, Path, int, Callable[[str], None]], Measured]

MEMORY: dict[str, tuple[MemoryCheck, ModelMaker, tuple[str, ...]]] = {
    "shared_system": (under_load.shared_system, models.light, ()),
    "joined": (under_load.joined, models.light, ()),
    "crowded": (under_load.crowded, models.heavy, ("--ram", under_load.RAM)),
    "observed": (under_load.observed, models.heavy, ("--ram", under_load.OBSERVED)),
    "long_prefill": (under_load.long_prefill, models.light, ()),
}
"""Each runs against a server of its own: the check, the default model, and the server's flags."""

RESTART: dict[str, ModelMaker] = {
    "restart": models.for_speed,
    "restart_window": models.windowed,
    "restart_recurrent": models.recurrent,
}
"""Restarts after kill -9, with the default model of each."""

DISK: dict[str, tuple[DiskCheck, ModelMaker]] = {
    "restore_speed": (restore_speed, models.heavy),
    "write_beside": (write_beside, models.heavy),
    "guided": (guided, models.wordy),
}
"""Each runs an engine in this process. The check takes the model's folder, a folder to write in,
the number of repetitions, and a callback for the current step."""

LONG = ("observed", "long_prefill", "guided")
"""Checks that take many minutes."""

DEFAULT = [
    *(name for name in SCENARIOS if name not in PARTING),
    *(name for name in MEMORY if name not in LONG),
    "restart",
    *(name for name in DISK if name not in LONG),
]
NAMES = [*DEFAULT, *LONG, *PARTING, *(name for name in RESTART if name not in DEFAULT)]
"""Measurements that --only takes; DEFAULT where nothing is named."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The measurements of `NAMES` in one run, on `model`, or on one made for each where None."""

    run: Bench
    model: str | None

    def play(self, names: Sequence[str], families: Sequence[str]) -> None:
        """Measure everything in `names`, in the order of `NAMES`.

        With `families`, only the scenarios of `names` are played, on a model of each family. Raises
        one of `mlxcache.bench.command.FAILURES`.
        """
        scenarios = [name for name in SCENARIOS if name in names]
        for family in families:
            model = models.of_family(self.run.folder / family, family)
            self.run.family(model, scenarios, family)
        if families:
            return
        if scenarios:
            self.run.speed(self._model(models.for_speed), scenarios)
        for name in (name for name in MEMORY if name in names):
            self._memory(name)
        for name in (name for name in RESTART if name in names):
            self.run.restart(self._model(RESTART[name]), name)
        for name in (name for name in DISK if name in names):
            self._disk(name)

    def trace(self, plan: Replay) -> None:
        """Play a trace to every server."""
        self.run.trace(self._model(models.for_speed), plan)

    def _model(self, make: ModelMaker) -> Path:
        if self.model is not None:
            return resolve(self.model)
        return make(self.run.folder / make.__name__)

    def _memory(self, name: str) -> None:
        check, make, extra = MEMORY[name]
        run, model = self.run, self._model(make)
        with ExitStack() as stack, run.console.status(name):
            own = stack.enter_context(measuring(model, run.folder))
            if own is None:
                raise NoOwnTime(f"{name}: the KV bytes per token of {model} cannot be measured")
            kv_bytes = own.ask(256, 1)[1]
            launch = run.ours(name, *extra)
            server = stack.enter_context(running(launch, model, run.folder, run.options.wait_s))
            held = check(server, Filler(model), kv_bytes)
        run.found.setdefault("memory", {})[name] = held.figures
        run.checks += held.checks

    def _disk(self, name: str) -> None:
        check, make = DISK[name]
        run, model = self.run, self._model(make)
        with run.console.status(name) as status:
            held = check(model, run.folder / f"cache-{name}", run.options.runs, status.update)
        _show_figures(run.console, name, held.figures)
        run.found.setdefault("disk", {})[name] = held.figures
        run.checks += held.checks


def _show_figures(console: Console, title: str, figures: Mapping[str, Any]) -> None:
    """Print figures by their names, which end in their units; lists are left out."""
    table = report.table_of(title, "figure", right=("median",))
    for name, value in figures.items():
        if not isinstance(value, list):
            table.add_row(name, _figure(name, value))
    console.print(table)


def _figure(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if "bytes" in name:
        return report.megabytes(value) + ("/s" if name.endswith("_s") else "")
    return f"{value:.3g}" if isinstance(value, float) else str(value)
