"""The command line of `bin/bench`: `mlxcache bench` with models made on the spot, and proofs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mlxcache.bench import command
from mlxcache.bench.command import Bench, Options, check_names, conduct, launches
from mlxcache.bench.context import Scale
from mlxcache.bench.findings import Findings, quantity
from mlxcache.bench.own_time import measuring
from mlxcache.bench.process import Server, running
from mlxcache.bench.prove_engine import Scenario, restore_speed, write_behind
from mlxcache.bench.replay import Replay
from mlxcache.bench.report import table_of
from mlxcache.bench.turns import PARTING, SCENARIOS, Filler
from mlxcache.model.hub import resolve
from tests.proofs import models, under_load
from tests.proofs.guided import guided
from tests.toys.configs import FAMILIES

ModelMaker = Callable[[Path], Path]
MemoryCheck = Callable[[Server, Filler, float, Findings], None]

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

DISK: dict[str, tuple[Scenario, ModelMaker, int]] = {
    "restore_speed": (restore_speed, models.heavy, 1_100_000_000),
    "write_beside": (write_behind, models.heavy, 1_000_000_000),
    "guided": (guided, models.wordy, 0),
}
"""Each runs an engine in this process: the check, the default model, and the bytes to write."""

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
        self.run.trace(self._model(models.for_speed), plan)

    def _model(self, make: ModelMaker) -> Path:
        if self.model is not None:
            return resolve(self.model)
        return make(self.run.folder / make.__name__)

    def _memory(self, name: str) -> None:
        check, make, extra = MEMORY[name]
        run, model, found = self.run, self._model(make), Findings(name, "")
        with ExitStack() as stack, run.console.status(name):
            own = stack.enter_context(measuring(model, run.folder))
            kv_bytes = own.ask(256, 1)[1]
            launch = run.ours(name, *extra)
            server = stack.enter_context(running(launch, model, run.folder, run.options.wait_s))
            check(server, Filler(model), kv_bytes, found)
        self._note("memory", found)

    def _disk(self, name: str) -> None:
        check, make, nbytes = DISK[name]
        run, model, found = self.run, self._model(make), Findings(name, "")
        scale = Scale(runs=run.options.runs, disk_bytes=nbytes)
        with run.console.status(name):
            asyncio.run(check(model, run.folder / f"cache-{name}", scale, found))
        self._note("disk", found)

    def _note(self, kind: str, found: Findings) -> None:
        for title, rows in found.tables.items():
            table = table_of(title, "", "figure", right=("median",))
            for row, figures in rows.items():
                for name, figure in figures.items():
                    table.add_row(row, name, quantity(figure.unit, figure.median))
            self.run.console.print(table)
        for note in found.notes:
            self.run.console.print(note, markup=False)
        self.run.found.setdefault(kind, {})[found.name] = found.as_json()
        self.run.checks += found.checks


# -- the command -----------------------------------------------------------------------------------

Model = Annotated[
    str | None, typer.Option(metavar="PATH|HUB_ID", help="Default: a small one made on the spot.")
]
Family = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A small model of this family, and prompts that part from one conversation. "
        f"One of {', '.join(FAMILIES)}. Repeatable.",
    ),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=512,
        help="Prompt tokens of a conversation's first turn (of all its turns, for --family). "
        "Default: 6000, for --family 4000.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help=f"One of {', '.join(NAMES)}. Repeatable; default: the first {len(DEFAULT)}, "
        f"for --family {PARTING[0]} to {PARTING[-1]}.",
    ),
]


def bench(
    *,
    model: Model = None,
    family: Family = None,
    tokens: PromptTokens = None,
    runs: command.Runs = 9,
    reply: command.ReplyTokens = 16,
    against: command.Against = None,
    only: Only = None,
    mlx_lm: command.MlxLm = True,
    keep: command.Keep = False,
    wait: command.Wait = 300.0,
    trace: command.TraceFiles = None,
    trace_scale: command.TraceScale = 1.0,
    trace_requests: command.TraceRequests = None,
    trace_users: command.TraceUsers = 4,
    trace_ram: command.TraceRam = "1GB",
    trace_disk: command.TraceDisk = "10GB",
    json_file: command.JsonFile = None,
    strict: command.Strict = False,
) -> None:
    """Measure this server, and others beside it, in interleaved pairs on the same model."""
    families = chosen_families(family or (), model)
    names = chosen_names(only or (), families)
    tokens = tokens or (4000 if families else 6000)
    options = Options(tokens, runs, reply, launches(against or (), mlx_lm), wait, keep)

    played = command.read_replay(
        trace, trace_scale, trace_requests, users=trace_users, ram=trace_ram, disk=trace_disk
    )

    def measure(run: Bench) -> None:
        suite = Suite(run, model)
        if played is not None:
            suite.trace(played)
        else:
            suite.play(names, families)

    conduct(measure, options, model or "made here", json_file, strict)


def chosen_families(named: Sequence[str], model: str | None) -> Sequence[str]:
    """The families that --family names, each once. Raises typer.BadParameter."""
    check_names(named, list(FAMILIES))
    if named and model is not None:
        raise typer.BadParameter("--family makes a model: leave out --model, or --family")
    return list(dict.fromkeys(named))


def chosen_names(only: Sequence[str], families: Sequence[str]) -> Sequence[str]:
    """The measurements that --only names, or the default. Raises typer.BadParameter."""
    check_names(only, list(SCENARIOS) if families else NAMES)
    return only or (PARTING if families else DEFAULT)
