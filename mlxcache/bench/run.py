"""One run of a benchmark: start servers, run scenarios, print figures, check bounds."""

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

from mlxcache.bench import checks, replay, report, restart
from mlxcache.bench.checks import Check
from mlxcache.bench.client import Client, Refused
from mlxcache.bench.measure import Plan, Results, play
from mlxcache.bench.own import NoOwnTime, OwnTime, measuring
from mlxcache.bench.process import Launch, Lives, NotStarted, Server, ours, running
from mlxcache.bench.scenarios import Visit
from mlxcache.bench.text import Filler
from mlxcache.errors import MlxcacheError

FAILURES = (NotStarted, NoOwnTime, MlxcacheError, Refused, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of a benchmark run, and the other servers to measure.

    `tokens` is the length of a conversation's first prompt, `reply_tokens` the maximum length of a
    reply, `runs` the number of repetitions, and `wait_s` the seconds that a server has to start.
    `launches` are the other servers. With `keep`, each repetition continues the conversations of
    the first; otherwise it begins new ones.
    """

    tokens: int
    runs: int
    reply_tokens: int
    launches: Sequence[Launch]
    wait_s: float
    keep: bool = False


@dataclass(slots=True)
class Bench:
    """Measurements of one run, with their figures (`found`) and bounds (`checks`).

    Each method starts the servers that it needs and blocks until they have ended. If a measurement
    fails, it raises one of the exceptions in `FAILURES`. Logs and cache folders are created in
    `folder`.
    """

    options: Options
    folder: Path
    console: Console
    checks: list[Check] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def speed(self, model: Path, names: Sequence[str]) -> None:
        """Run the scenarios `names` at every server, and time warm turns in mlx-lm.

        mlx-lm is timed without a server. Prints the figures, and adds them to `found` and their
        bounds to `checks`.
        """
        with measuring(model, self.folder) as own:
            results, servers = self._played(model, "speed", names, own)
        if own is None:
            results.failures.append(f"{model} cannot be measured without a server")
        report.show(self.console, results, servers)
        self.found |= report.as_json(results, servers)
        self._hold(results)

    def family(self, model: Path, names: Sequence[str], family: str) -> None:
        """Run the scenarios `names` at every server with a model of one architecture.

        The figures are stored in `found["families"]` under `family`, the name of that architecture,
        such as `gemma3`.
        """
        results, servers = self._played(model, family, names, None)
        report.show(self.console, results, servers, family)
        self.found.setdefault("families", {})[family] = report.as_json(results, servers)
        self._hold(results, f"{family}: ")

    def restart(self, model: Path, name: str = "restart") -> None:
        """Measure the time to the first token after every server was killed and started again.

        Runs `restart.play`. The figures are stored in `found["restart"]` under `name`.
        """
        options, filler = self.options, Filler(model)
        launches = [self.ours(name), *options.launches]
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

    def trace(self, model: Path, plan: replay.Replay) -> None:
        """Replay the trace of `plan` at every server with equal RAM.

        The figures are stored in `found["trace"]`, by the server's name.
        """
        options = self.options
        with self.console.status("trace") as status:
            found = replay.replay(
                plan,
                model,
                self.folder,
                options.launches,
                wait_s=options.wait_s,
                status=status.update,
            )
        replay.show(self.console, plan, found)
        self.found["trace"] = {name: one.as_object() for name, one in found.items()}

    def ours(self, name: str, *extra: str) -> Launch:
        """Return how to start `mlxcache serve` with the further arguments `extra`.

        Its cache folder is `cache-` and `name`.
        """
        return ours(self.folder / f"cache-{name}", *extra)

    def _played(
        self, model: Path, name: str, scenarios: Sequence[str], own: OwnTime | None
    ) -> tuple[Results, list[Server]]:
        """Start all servers, run `scenarios` at them, and end them.

        `name` is part of the name of mlxcache's cache folder. `own` also times warm turns with
        mlx-lm without a server, if it is not None. Returns the results and the servers, which have
        ended but still hold their memory figures.
        """
        filler, options = Filler(model), self.options
        launches = [self.ours(name), *options.launches]
        with ExitStack() as stack, self.console.status("starting the servers") as status:
            servers = [
                stack.enter_context(running(one, model, self.folder, options.wait_s))
                for one in launches
            ]

            def visit(server: Server, run: int) -> Visit:
                seed = f"{self.folder.name}/{run}"  # new text in each run: caches persist on disk
                return Visit(server.client, filler, options.tokens, options.reply_tokens, seed)

            plan = Plan(scenarios, options.runs, visit, status.update, options.keep)
            return play(servers, plan, own), servers

    def _hold(self, results: Results, prefix: str = "") -> None:
        others = [one.name for one in self.options.launches]
        found = [*checks.answered(results), *checks.speed(results, others)]
        self.checks += [replace(check, name=f"{prefix}{check.name}") for check in found]


def conduct(
    measure: Callable[[Bench], None],
    options: Options,
    model: str,
    json_file: Path | None,
    strict: bool,
) -> None:
    """Run `measure`, print its figures and bounds, and write them to `json_file` if given.

    `model` is the model's name in the file. Exits with status 1 if `measure` raises one of FAILURES
    (then nothing is written), or with `strict` if a bound does not hold.
    """
    console = report.wide_console()
    with scratch() as folder:
        run = Bench(options, folder, console)
        run.found |= {"machine": report.machine(), "model": model}
        run.found |= {"tokens": options.tokens, "runs": options.runs}
        try:
            measure(run)
        except FAILURES as error:
            console.print(str(error), style="red", markup=False)
            sys.exit(1)
        run.found["checks"] = report.checks_json(run.checks)
        report.show_checks(console, run.checks)
    if json_file is not None:
        json_file.write_text(json.dumps(run.found, indent=1), encoding="utf-8")
    if strict and not all(check.ok for check in run.checks):
        sys.exit(1)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder that is removed at the end. Main thread only.

    The first SIGTERM or SIGHUP raises KeyboardInterrupt, so that servers are ended. Later ones are
    ignored, even after the block: a closed terminal sends several, which must not interrupt the
    cleanup and the report. SIGHUP stays ignored under nohup.
    """
    interrupted: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.append(number)
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {one: signal.getsignal(one) for one in numbers}
    before = {one: handler for one, handler in before.items() if handler != signal.SIG_IGN}
    for one in before:
        signal.signal(one, interrupt)
    folder = Path(tempfile.mkdtemp(prefix="mlxcache-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not interrupted:
            for one, handler in before.items():
                signal.signal(one, handler)
