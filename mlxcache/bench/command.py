"""The command `mlxcache bench`: measure this server and others on the same model."""

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
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from mlxcache.bench import report
from mlxcache.bench.client import Refused
from mlxcache.bench.findings import Check, NotApplicable
from mlxcache.bench.machine import describe_machine
from mlxcache.bench.measure import RESTART, Plan, Results, measure, restart_checks, speed_checks
from mlxcache.bench.own_time import NoOwnTime, OwnTime, measuring
from mlxcache.bench.process import Launch, NotStarted, Server, mlx_lm_server, ours, parse_against
from mlxcache.bench.turns import PARTING, SCENARIOS, Filler, Visit
from mlxcache.config import parse_size
from mlxcache.config.flags import option, switch
from mlxcache.config.models import DEMO_ID
from mlxcache.errors import MlxcacheError

if TYPE_CHECKING:
    from mlxcache.bench.replay import Replay

FAILURES = (NotStarted, NoOwnTime, NotApplicable, MlxcacheError, Refused, OSError, ValueError)


class MeasurementSet(NamedTuple):
    title: str
    names: tuple[str, ...]
    minutes: int


SETS = {
    "speed": MeasurementSet(
        "first and next turns, edits, eight conversations at once",
        tuple(name for name in SCENARIOS if name not in PARTING),
        5,
    ),
    "restart": MeasurementSet("kill -9, and the same command again", ("restart",), 3),
    "branches": MeasurementSet("one long conversation, edited and branched", PARTING, 2),
}
DEFAULT = (*SETS["speed"].names, *SETS["restart"].names)
NAMES = (*DEFAULT, *PARTING)
"""Measurements that --only takes besides the names of `SETS`. Without --only, DEFAULT is used."""

Model = Annotated[
    str | None,
    option("PATH|HUB_ID", "Model to measure. Default: the built-in demo."),
]
PromptTokens = Annotated[
    int,
    option("N", "Prompt tokens of a conversation's first turn.", "--tokens", min=512),
]
Runs = Annotated[int, option("N", "Repetitions; medians are shown.", min=1)]
ReplyTokens = Annotated[
    int,
    option("N", "Tokens generated per reply.", "--reply", min=2, max=1024),
]
Against = Annotated[
    list[str] | None,
    option(
        "NAME=COMMAND",
        "Another OpenAI-compatible server; its command contains {model} and {port}. Repeatable.",
    ),
]
Only = Annotated[
    list[str] | None,
    option(
        "NAME",
        "A set, or one of its measurements. Repeatable; default: speed and restart. "
        "Times are for the default settings on a Linux machine with 2 CPU cores.\n\n"
        + "\n\n".join(
            f"{name}, about {one.minutes} minutes: {one.title} ({', '.join(one.names)})."
            for name, one in SETS.items()
        ),
    ),
]
Keep = Annotated[
    bool,
    switch(
        "Continue the same conversations in each repetition instead of beginning new ones.",
        "--keep",
    ),
]
MlxLm = Annotated[bool, typer.Option(help="Measure mlx_lm.server too.")]
Wait = Annotated[float, option("SECONDS", "Time that a server has to start.")]
JsonFile = Annotated[Path | None, option("FILE", "Also write all figures to FILE.", "--json")]
TraceFiles = Annotated[
    list[Path] | None,
    option(
        "FILE|FOLDER",
        "Play this trace to all servers, one after another, in place of the measurements: "
        "what `mlxcache plan` takes.",
        "--trace",
    ),
]
TraceScale = Annotated[
    float,
    option("SHARE", "Multiply the trace's lengths by this.", min=1e-4, max=1.0),
]
TraceRequests = Annotated[int | None, option("N", "Play the trace's first N requests only.", min=1)]
TraceUsers = Annotated[int, option("N", "Sessions of the trace that are open at once.", min=1)]
TraceRam = Annotated[
    str,
    option(
        "SIZE",
        "RAM of each server for the trace: --ram here, --prompt-cache-bytes of "
        "mlx_lm.server, {ram_mb} in commands of --against.",
    ),
]
TraceDisk = Annotated[str, option("SIZE", "--disk of this server for the trace.")]
Strict = Annotated[bool, switch("Exit with 1 if a bound does not hold.", "--assert")]


def bench(
    *,
    model: Model = None,
    tokens: PromptTokens = 6000,
    runs: Runs = 9,
    reply: ReplyTokens = 16,
    against: Against = None,
    only: Only = None,
    mlx_lm: MlxLm = True,
    keep: Keep = False,
    wait: Wait = 300.0,
    trace: TraceFiles = None,
    trace_scale: TraceScale = 1.0,
    trace_requests: TraceRequests = None,
    trace_users: TraceUsers = 4,
    trace_ram: TraceRam = "1GB",
    trace_disk: TraceDisk = "10GB",
    json_file: JsonFile = None,
    strict: Strict = False,
) -> None:
    """Measure latency, speed and memory of this server and others on the same model, in turn."""
    check_names(only or (), (*SETS, *NAMES))
    names = {
        name for one in only or DEFAULT for name in (SETS[one].names if one in SETS else (one,))
    }
    played = read_replay(
        trace, trace_scale, trace_requests, users=trace_users, ram=trace_ram, disk=trace_disk
    )
    options = Options(tokens, runs, reply, launches(against or (), mlx_lm), wait, keep)

    # MLX and mlx-lm take seconds to import, for which --help does not wait.
    from mlxcache.model.demo import materialise  # noqa: PLC0415
    from mlxcache.model.hub import resolve  # noqa: PLC0415

    def play(run: Bench) -> None:
        path = materialise() if model is None else resolve(model)
        if played is not None:
            run.trace(path, played)
            return
        scenarios = [name for name in SCENARIOS if name in names]
        if scenarios:
            run.speed(path, scenarios)
        if "restart" in names:
            run.restart(path)

    conduct(play, options, model or DEMO_ID, json_file, strict)


def read_replay(
    paths: list[Path] | None, scale: float, requests: int | None, *, users: int, ram: str, disk: str
) -> Replay | None:
    if not paths:
        return None
    from mlxcache.bench.replay import Replay  # noqa: PLC0415 - imports MLX, as in `bench`
    from mlxcache.plan.trace_files import read_trace  # noqa: PLC0415

    try:
        trace = read_trace(*paths).scaled(scale)
        sizes = [parse_size(text, total=0) or 0 for text in (ram, disk)]
    except MlxcacheError as error:
        raise typer.BadParameter(str(error)) from error
    if not all(sizes):
        raise typer.BadParameter("--trace-ram and --trace-disk must be sizes such as 2GB")
    return Replay(trace if requests is None else trace.first(requests), users, *sizes)


def launches(against: Sequence[str], mlx_lm: bool) -> list[Launch]:
    try:
        named = [parse_against(text) for text in against]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return [mlx_lm_server(), *named] if mlx_lm else named


def check_names(named: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in named if name not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(known)}")


# -- one run ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of a run, in tokens, and the other servers to measure. See the command's options."""

    tokens: int
    runs: int
    reply_tokens: int
    launches: Sequence[Launch]
    wait_s: float
    keep: bool = False


@dataclass(slots=True)
class Bench:
    """Measurements of one run, with their figures (`found`) and bounds (`checks`).

    Each method starts servers, prints figures, and raises one of `FAILURES` if it fails.
    """

    options: Options
    folder: Path
    console: Console
    checks: list[Check] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def speed(self, model: Path, names: Sequence[str]) -> None:
        """Run the scenarios `names` at every server, and time warm turns in mlx-lm alone."""
        with ExitStack() as stack:
            own, failures = None, []
            try:
                own = stack.enter_context(measuring(model, self.folder))
            except NotApplicable as why:
                failures = [str(why)]
            results, servers = self._measure(model, "speed", names, own)
        results.failures.extend(failures)
        self.found |= self._report(results, servers)

    def family(self, model: Path, names: Sequence[str], family: str) -> None:
        found = self._report(*self._measure(model, family, names), family)
        self.found.setdefault("families", {})[family] = found

    def restart(self, model: Path, name: str = RESTART) -> None:
        results, _ = self._measure(model, name, [RESTART])
        report.show_restarts(self.console, results, name)
        self.found.setdefault("restart", {})[name] = report.restarts_json(results)
        self.checks += restart_checks(results)

    def trace(self, model: Path, plan: Replay) -> None:
        from mlxcache.bench.replay import show_replay  # noqa: PLC0415 - as above

        launches, wait_s = self.options.launches, self.options.wait_s
        with self.console.status("trace") as status:
            found = plan.play(model, self.folder, launches, wait_s=wait_s, status=status.update)
        show_replay(self.console, plan, found)
        self.found["trace"] = found

    def ours(self, name: str, *extra: str) -> Launch:
        return ours(self.folder / f"cache-{name}", *extra)

    def _measure(
        self, model: Path, name: str, scenarios: Sequence[str], own: OwnTime | None = None
    ) -> tuple[Results, list[Server]]:
        """Run `scenarios` at all servers, which have ended then but hold their memory figures."""
        options, filler = self.options, Filler(model)

        def visit(server: Server, run: int) -> Visit:  # new text in each run: caches persist
            seed = f"{self.folder.name}/{name}/{run}"
            return Visit(server, filler, options.tokens, options.reply_tokens, seed)

        with ExitStack() as stack, self.console.status("starting the servers") as status:
            servers = [
                stack.enter_context(Server(one, model, self.folder, options.wait_s))
                for one in (self.ours(name), *options.launches)
            ]
            for one in servers if scenarios != [RESTART] else ():
                one.start()  # one that is to restart and fails is reported in its turn
            plan = Plan(scenarios, options.runs, visit, status.update, options.keep)
            return measure(plan, servers, own), servers

    def _report(
        self, results: Results, servers: Sequence[Server], family: str = ""
    ) -> dict[str, Any]:
        report.show(self.console, results, servers, family)
        prefix = f"{family}: " if family else ""
        for check in speed_checks(results, [one.name for one in self.options.launches]):
            self.checks.append(replace(check, name=f"{prefix}{check.name}"))
        return report.as_json(results, servers)


def conduct(
    play: Callable[[Bench], None],
    options: Options,
    model: str,
    json_file: Path | None,
    strict: bool,
) -> None:
    """Run `play`, print its bounds, and write all figures to `json_file`.

    Exits with status 1 if it raises one of FAILURES, or with `strict` if a bound does not hold.
    """
    console = report.wide_console()
    with scratch() as folder:
        run = Bench(options, folder, console)
        run.found |= {"machine": describe_machine(), "model": model}
        run.found |= {"tokens": options.tokens, "runs": options.runs}
        try:
            play(run)
        except FAILURES as error:
            console.print(str(error), style="red", markup=False)
            sys.exit(1)
        run.found["checks"] = [check.as_json() for check in run.checks]
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
