"""The command line of `bin/bench`: `mlxcache bench` with models made on the spot, and proofs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from mlxcache.bench import command
from mlxcache.bench.command import Bench, Options, check_names, conduct, launches
from mlxcache.bench.scenarios import PARTING, SCENARIOS
from tests.proofs.suite import DEFAULT, NAMES, Suite
from tests.toys.configs import FAMILIES

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
    trace: command.TraceFile = None,
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
