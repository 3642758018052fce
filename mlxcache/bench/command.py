"""`mlxcache bench`: servers up, scenarios played, figures shown, bounds checked."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from mlxcache.bench import checks, flags, models, report, restart
from mlxcache.bench.checks import Check
from mlxcache.bench.client import Client, Refused
from mlxcache.bench.measure import Plan, Results, play
from mlxcache.bench.own import NoOwnTime, OwnTime, measuring
from mlxcache.bench.process import (
    Launch,
    Lives,
    NotStarted,
    Server,
    mlx_lm_server,
    ours,
    running,
)
from mlxcache.bench.scenarios import SCENARIOS, Visit
from mlxcache.bench.suite import DISK, MEMORY, RESTART
from mlxcache.bench.text import Filler
from mlxcache.errors import MlxcacheError
from mlxcache.model.hub import resolve

FAILURES = (NotStarted, NoOwnTime, MlxcacheError, Refused, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `names` are of suite.NAMES; `wait_s` bounds a server's start.

    `families`: the scenarios among `names` are played on a model made of each, and all else is not.
    """

    model: str | None
    tokens: int
    runs: int
    reply_tokens: int
    launches: Sequence[Launch]
    names: Sequence[str]
    wait_s: float
    keep: bool = False
    families: Sequence[str] = ()


@dataclass(slots=True)
class Bench:
    """A run: the model, a folder for what it leaves behind, and what came out."""

    options: Options
    folder: Path
    console: Console
    checks: list[Check] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Measure everything asked for. Raises one of FAILURES."""
        self.found |= {"machine": report.machine(), "model": self.options.model or "made here"}
        self.found |= {"tokens": self.options.tokens, "runs": self.options.runs}
        scenarios = [name for name in SCENARIOS if name in self.options.names]
        for family in self.options.families:
            self._family(family, scenarios)
        if scenarios and not self.options.families:
            self._speed(scenarios)
        for names, measure in (
            (MEMORY, self._memory),
            (RESTART, self._restart),
            (DISK, self._disk),
        ):
            for name in names:
                if name in self.options.names:
                    measure(name)
        self.found["checks"] = report.checks_json(self.checks)
        report.show_checks(self.console, self.checks)

    def _model(self, make: Callable[[Path], Path]) -> Path:
        if self.options.model is not None:
            return resolve(self.options.model)
        return make(self.folder / make.__name__)

    def _ours(self, name: str, *extra: str) -> Launch:
        return ours(self.folder / f"cache-{name}", *extra)

    def _speed(self, scenarios: Sequence[str]) -> None:
        model = self._model(models.for_speed)
        with measuring(model, self.folder) as own:
            results, servers = self._played(model, "speed", scenarios, own)
        if own is None:
            results.failures.append(f"{model} cannot be measured by itself")
        report.show(self.console, results, servers)
        self.found |= report.as_json(results, servers)
        self._hold(results)

    def _family(self, family: str, scenarios: Sequence[str]) -> None:
        model = models.of_family(self.folder / family, family)
        results, servers = self._played(model, family, scenarios, None)
        report.show(self.console, results, servers, family)
        self.found.setdefault("families", {})[family] = report.as_json(results, servers)
        self._hold(results, f"{family}: ")

    def _played(
        self, model: Path, name: str, scenarios: Sequence[str], own: OwnTime | None
    ) -> tuple[Results, list[Server]]:
        """What playing `scenarios` at all servers gave; the servers have ended."""
        filler, options = Filler(model), self.options
        launches = [self._ours(name), *options.launches]
        with ExitStack() as stack, self.console.status("starting the servers") as status:
            servers = [
                stack.enter_context(running(one, model, self.folder, options.wait_s))
                for one in launches
            ]

            def visit(server: Server, run: int) -> Visit:
                seed = (
                    f"{self.folder.name}/{run}"  # new text each time: servers keep caches on disk
                )
                return Visit(server.client, filler, options.tokens, options.reply_tokens, seed)

            plan = Plan(scenarios, options.runs, visit, status.update, options.keep)
            return play(servers, plan, own), servers

    def _hold(self, results: Results, what: str = "") -> None:
        others = [one.name for one in self.options.launches]
        found = [*checks.answered(results), *checks.speed(results, others)]
        self.checks += [replace(check, name=f"{what}{check.name}") for check in found]

    def _memory(self, name: str) -> None:
        check, make, extra = MEMORY[name]
        model = self._model(make)
        with ExitStack() as stack, self.console.status(name):
            own = stack.enter_context(measuring(model, self.folder))
            if own is None:
                raise NoOwnTime(f"{name}: what a token of {model} holds cannot be measured")
            kv_bytes = own.ask(256, 1)[1]
            launch = self._ours(name, *extra)
            server = stack.enter_context(running(launch, model, self.folder, self.options.wait_s))
            held = check(server, Filler(model), kv_bytes)
        self.found.setdefault("memory", {})[name] = held.figures
        self.checks += held.checks

    def _restart(self, name: str) -> None:
        model, options = self._model(RESTART[name]), self.options
        filler = Filler(model)
        launches = [self._ours(name), *options.launches]
        with ExitStack() as stack, self.console.status(name) as status:
            lives = [Lives(one, model, self.folder, options.wait_s) for one in launches]
            for one in lives:
                stack.callback(one.end)

            def visit(client: Client, run: int) -> Visit:
                seed = f"{self.folder.name}/{name}/{run}"
                return Visit(client, filler, options.tokens, options.reply_tokens, seed)

            rounds = restart.play(lives, options.runs, visit, status.update)
        restart.show(self.console, rounds, name)
        self.found.setdefault("restart", {})[name] = restart.as_json(rounds)
        self.checks += restart.checks(rounds)

    def _disk(self, name: str) -> None:
        check, make = DISK[name]
        model = self._model(make)
        with self.console.status(name) as status:
            held = check(model, self.folder / f"cache-{name}", self.options.runs, status.update)
        report.show_figures(self.console, name, held.figures)
        self.found.setdefault("disk", {})[name] = held.figures
        self.checks += held.checks


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for the run; SIGTERM ends the run as Ctrl-C does, so servers never outlive it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    folder = Path(tempfile.mkdtemp(prefix="mlxcache-bench-"))
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


def bench(
    *,
    model: flags.Model = None,
    family: flags.Family = None,
    tokens: flags.PromptTokens = None,
    runs: flags.Runs = 9,
    reply: flags.ReplyTokens = 16,
    against: flags.Against = None,
    only: flags.Only = None,
    mlx_lm: flags.MlxLm = True,
    keep: flags.Keep = False,
    wait: flags.Wait = 300.0,
    json_file: flags.JsonFile = None,
    strict: flags.Strict = False,
) -> None:
    """Measure this server, and others beside it, in interleaved pairs on the same model."""
    launches = [*([mlx_lm_server()] if mlx_lm else []), *flags.launches(against or ())]
    families = flags.families(family or (), model)
    names = flags.names(only or (), families)
    tokens = tokens or (4000 if families else 6000)
    console = report.wide_console()
    with _scratch() as folder:
        options = Options(model, tokens, runs, reply, launches, names, wait, keep, families)
        run = Bench(options, folder, console)
        try:
            run.run()
        except FAILURES as error:
            console.print(str(error), style="red", markup=False)
            sys.exit(1)
    if json_file is not None:
        json_file.write_text(json.dumps(run.found, indent=1), encoding="utf-8")
    if strict and not all(check.ok for check in run.checks):
        sys.exit(1)
