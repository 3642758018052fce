"""The command `mlxcache bench`: measure this server and others on the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from mlxcache.bench.process import Launch, mlx_lm_server, parse_against
from mlxcache.bench.replay import Replay
from mlxcache.bench.run import Bench, Options, conduct
from mlxcache.bench.scenarios import PARTING, SCENARIOS
from mlxcache.config import parse_size
from mlxcache.config.models import DEMO_ID
from mlxcache.errors import MlxcacheError
from mlxcache.model.demo import materialise
from mlxcache.model.hub import resolve
from mlxcache.plan.trace import read_trace


class MeasurementSet(NamedTuple):
    """Set of measurements that --only accepts under one name.

    `names` are its measurements, `title` describes them in the help. `minutes` is the time of a run
    with the defaults on a Linux machine with 2 CPU cores.
    """

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
    typer.Option(metavar="PATH|HUB_ID", help="Model to measure. Default: the built-in demo."),
]
PromptTokens = Annotated[
    int,
    typer.Option(
        "--tokens", metavar="N", min=512, help="Prompt tokens of a conversation's first turn."
    ),
]
Runs = Annotated[int, typer.Option(metavar="N", min=1, help="Repetitions; medians are shown.")]
ReplyTokens = Annotated[
    int,
    typer.Option("--reply", metavar="N", min=2, max=1024, help="Tokens generated per reply."),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=COMMAND",
        help="Another OpenAI-compatible server; its command contains {model} and {port}. "
        "Repeatable.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A set, or one of its measurements. Repeatable; default: speed and restart. "
        "Times are for the default settings on a Linux machine with 2 CPU cores.\n\n"
        + "\n\n".join(
            f"{name}, about {one.minutes} minutes: {one.title} ({', '.join(one.names)})."
            for name, one in SETS.items()
        ),
    ),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep",
        help="Continue the same conversations in each repetition instead of beginning new ones.",
    ),
]
MlxLm = Annotated[bool, typer.Option(help="Measure mlx_lm.server too.")]
Wait = Annotated[float, typer.Option(metavar="SECONDS", help="Time that a server has to start.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write all figures to FILE.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Play this trace to all servers, one after another, in place of the measurements: "
        "a file that `mlxcache plan` takes.",
    ),
]
TraceScale = Annotated[
    float,
    typer.Option(metavar="SHARE", min=1e-4, max=1.0, help="Multiply the trace's lengths by this."),
]
TraceRequests = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Play the trace's first N requests only.")
]
TraceUsers = Annotated[
    int, typer.Option(metavar="N", min=1, help="Sessions of the trace that are open at once.")
]
TraceRam = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="RAM of each server for the trace: --ram here, --prompt-cache-bytes of "
        "mlx_lm.server, {ram_mb} in commands of --against.",
    ),
]
TraceDisk = Annotated[
    str, typer.Option(metavar="SIZE", help="--disk of this server for the trace.")
]
Strict = Annotated[bool, typer.Option("--assert", help="Exit with 1 if a bound does not hold.")]


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
    trace: TraceFile = None,
    trace_scale: TraceScale = 1.0,
    trace_requests: TraceRequests = None,
    trace_users: TraceUsers = 4,
    trace_ram: TraceRam = "1GB",
    trace_disk: TraceDisk = "10GB",
    json_file: JsonFile = None,
    strict: Strict = False,
) -> None:
    """Measure latency, speed and memory of this server and others on the same model, in turn."""
    names = chosen_names(only or ()) or DEFAULT
    played = read_replay(
        trace, trace_scale, trace_requests, users=trace_users, ram=trace_ram, disk=trace_disk
    )
    options = Options(tokens, runs, reply, launches(against or (), mlx_lm), wait, keep)

    def measure(run: Bench) -> None:
        path = materialise() if model is None else resolve(model)
        if played is not None:
            run.trace(path, played)
            return
        scenarios = [name for name in SCENARIOS if name in names]
        if scenarios:
            run.speed(path, scenarios)
        if "restart" in names:
            run.restart(path)

    conduct(measure, options, model or DEMO_ID, json_file, strict)


def chosen_names(only: Sequence[str]) -> Sequence[str]:
    """Return the names of measurements in `only`, with each set replaced by its measurements.

    Raises typer.BadParameter for an unknown name.
    """
    check_names(only, (*SETS, *NAMES))
    return [name for one in only for name in (SETS[one].names if one in SETS else (one,))]


def read_replay(
    path: Path | None, scale: float, requests: int | None, *, users: int, ram: str, disk: str
) -> Replay | None:
    """Return the trace in the file `path` with the limits of the servers; None without a file.

    `scale`: factor for the numbers of tokens in the trace. `requests`: maximum number of requests,
    or None. `users`: number of sessions open at once. `ram` and `disk`: limits as text, such as
    `2GB`. Raises typer.BadParameter for a file that is no trace, or a limit that is no size.
    """
    if path is None:
        return None
    try:
        trace = read_trace(path).scaled(scale)
        sizes = [parse_size(text, total=0) or 0 for text in (ram, disk)]
    except MlxcacheError as error:
        raise typer.BadParameter(str(error)) from error
    if not all(sizes):
        raise typer.BadParameter("--trace-ram and --trace-disk must be sizes such as 2GB")
    return Replay(trace if requests is None else trace.first(requests), users, *sizes)


def launches(against: Sequence[str], mlx_lm: bool) -> list[Launch]:
    """Return how to start the other servers to measure.

    These are mlx_lm.server, if `mlx_lm`, and the servers in `against`: each a text NAME=COMMAND,
    as --against takes it. Raises typer.BadParameter for other text.
    """
    try:
        named = [parse_against(text) for text in against]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return [mlx_lm_server(), *named] if mlx_lm else named


def check_names(named: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Return `named`. Raises typer.BadParameter if one of its names is not in `known`."""
    unknown = [name for name in named if name not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return named
