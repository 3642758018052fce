"""The command line of `mlxcache prove`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlxcache.bench.command import check_names
from mlxcache.bench.prove import report
from mlxcache.bench.prove.machine import describe_machine
from mlxcache.bench.prove.run import SCENARIOS, Options, Proof
from mlxcache.bench.prove.scale import FULL, QUICK
from mlxcache.bench.report import wide_console
from mlxcache.bench.run import scratch
from mlxcache.errors import MlxcacheError
from mlxcache.model.random_model import SIZES, WEIGHTS, Weights

DEFAULT_SIZE, QUICK_SIZE = "0.6b", "tiny"

Model = Annotated[
    str | None,
    typer.Option(metavar="PATH|HUB_ID", help="Default: random weights, made on the spot."),
]
Size = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help=f"Shape of the model made on the spot: {', '.join(SIZES)}. "
        f"Default: {DEFAULT_SIZE}, with --quick {QUICK_SIZE}.",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="|".join(WEIGHTS),
        help="Weights of the model made on the spot. Default: one model of each.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help=f"One of {', '.join(SCENARIOS)}. Repeatable; default: all."),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small lengths: shows that all works, and no bounds.")
]
Minutes = Annotated[float, typer.Option(min=0.1, help="Time limit of the scenarios together.")]
Out = Annotated[
    Path,
    typer.Option("--out", metavar="FILE", help="The report; its figures go beside it, as .json."),
]
Strict = Annotated[bool, typer.Option("--assert", help="Exit with 1 where a bound failed, too.")]


def prove(
    *,
    model: Model = None,
    size: Size = None,
    weights: WeightsOption = None,
    only: Only = None,
    quick: Quick = False,
    minutes: Minutes = 30.0,
    out: Out = Path("mlxcache-proof.md"),
    strict: Strict = False,
) -> None:
    """Measure this machine beside mlx-lm, and write one report that can be published.

    Exit status 1: a scenario failed. The others are in the report.
    """
    names = check_names(only or (), list(SCENARIOS)) or list(SCENARIOS)
    size = size or (QUICK_SIZE if quick else DEFAULT_SIZE)
    check_names([size], list(SIZES))
    chosen: tuple[Weights, ...] = tuple(one for one in WEIGHTS if weights in (None, one))
    if not chosen:
        raise typer.BadParameter(f"--weights {weights}: not one of {', '.join(WEIGHTS)}")
    _check_out(out)
    scale = QUICK if quick else FULL
    console = wide_console()
    with scratch() as folder, console.status("preparing") as status:
        options = Options(model, size, chosen, names, scale, minutes, out)
        proof = Proof(options, folder, status.update)
        try:
            proof.play()
        except (MlxcacheError, OSError, ValueError) as error:
            console.print(str(error), style="red", markup=False)
            sys.exit(1)
    run = {"lengths": "quick" if quick else "full", "minutes": minutes}
    machine = describe_machine()
    markdown = report.as_markdown(machine, run, proof.found)
    failure: OSError | None = None
    try:  # before it is shown: the terminal may be closed
        beside = report.write(out, markdown, report.as_json(machine, run, proof.found))
        written = f"Written: {out} and {beside}."
    except OSError as why:
        failure, written = why, f"Not written: {why}. The report is above."
    console.print(markdown, markup=False, highlight=False, soft_wrap=True)
    console.print(written, style="red" if failure else "", markup=False, soft_wrap=True)
    if failure is not None:
        sys.exit(1)
    failed = any(found.status == "failed" for found in proof.found)
    broken = any(not check.ok for found in proof.found for check in found.checks)
    if failed or (strict and broken):
        sys.exit(1)


def _check_out(out: Path) -> None:
    """Raise BadParameter for a report that could not be written after the measurements."""
    if out.suffix == ".json" or not out.parent.is_dir():
        raise typer.BadParameter(f"--out {out}: not a Markdown file in a folder that exists")
    for one in (out, out.with_suffix(".json") if out.name else out):
        if one.is_dir() or not os.access(one if one.exists() else one.parent, os.W_OK):
            raise typer.BadParameter(f"--out {out}: {one} cannot be written")
