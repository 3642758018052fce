"""The command `mlxcache prove`: measure mlxcache and mlx-lm and write one report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from mlxcache.bench.command import check_names, scratch
from mlxcache.bench.prove import report
from mlxcache.bench.prove.context import FULL, QUICK
from mlxcache.bench.prove.machine import describe_machine
from mlxcache.bench.prove.run import IF_NAMED, SCENARIOS, Options, Proof
from mlxcache.bench.report import wide_console
from mlxcache.errors import MlxcacheError
from mlxcache.model.random_model import SIZES, WEIGHTS, Weights

OnText = Callable[[str], None]

DEFAULT_SIZE, QUICK_SIZE = "0.6b", "tiny"

Model = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|HUB_ID",
        help="Model to measure. Default: a generated one with random weights.",
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help=f"Shape of the generated model: {', '.join(SIZES)}. "
        f"Default: {DEFAULT_SIZE}, with --quick {QUICK_SIZE}.",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="|".join(WEIGHTS),
        help="Weights of the generated model. Default: one model of each.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help=f"One of {', '.join(SCENARIOS)}. Repeatable; default: all but {', '.join(IF_NAMED)}.",
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Use short prompts and replies, for which bounds are not checked."
    ),
]
Minutes = Annotated[
    float,
    typer.Option(
        metavar="N",
        min=0.1,
        help="Time limit of the whole run, including making or loading models.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="The report; its figures are in a .json file of the same name. Both are overwritten. "
        "Default: mlxcache-proof-DATE-TIME.md.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--assert", help="Also exit with 1 if a bound failed or none was checked."),
]


def prove(
    *,
    model: Model = None,
    size: Size = None,
    weights: WeightsOption = None,
    only: Only = None,
    quick: Quick = False,
    minutes: Minutes = 30.0,
    out: Out = None,
    strict: Strict = False,
) -> None:
    """Measure mlxcache and mlx-lm on this machine, and write one report that can be published.

    Exit status 1: a scenario failed, the run was interrupted, nothing was measured, or the report
    could not be written; with --assert also if a figure is outside its bound, or no bound was
    checked. Exit status 2: wrong usage, or a model that cannot be loaded.
    """
    usual = [name for name in SCENARIOS if name not in IF_NAMED]
    check_names(only or (), list(SCENARIOS))
    size = size or (QUICK_SIZE if quick else DEFAULT_SIZE)
    check_names([size], list(SIZES))
    chosen: tuple[Weights, ...] = tuple(one for one in WEIGHTS if weights in (None, one))
    if not chosen:
        raise typer.BadParameter(f"--weights {weights}: not one of {', '.join(WEIGHTS)}")
    began, load = datetime.now(UTC), _load_average()
    out = out or Path(f"mlxcache-proof-{began.astimezone():%Y%m%d-%H%M%S}.md")
    _check_out(out)
    scale = QUICK if quick else FULL
    console, errors = wide_console(), LastingConsole(stderr=True, highlight=False, soft_wrap=True)
    with scratch() as folder, steps(console, errors) as (on_step, on_begin):
        options = Options(model, size, chosen, only or usual, scale, minutes, out)
        proof = Proof(options, folder, on_step, on_begin)
        try:
            proof.play()
        except (MlxcacheError, OSError, ValueError) as error:
            errors.print(Text.assemble(("Error: ", "bold red"), str(error)))
            sys.exit(2)
    run = {
        "date": began.isoformat(timespec="seconds"),
        "lengths": "quick" if quick else "full",
        "minutes": minutes,
        "load average before": load,
        "load average after": _load_average(),
    }
    machine = describe_machine()
    markdown = report.as_markdown(machine, run, proof.found)
    failure: OSError | None = None
    try:  # before it is shown: the terminal may be closed
        beside = report.write(out, markdown, report.as_json(machine, run, proof.found))
        written = f"Written: {out} and {beside}."
    except OSError as error:
        failure, written = error, f"Not written: {error}. The report is above."
    console.print(markdown, markup=False, highlight=False, soft_wrap=True)
    console.print(written, style="red" if failure else "", markup=False, soft_wrap=True)
    if failure is not None:
        sys.exit(1)
    if why := why_failed(proof, strict=strict):
        errors.print(f"Exit status 1: {why}.", markup=False)
        sys.exit(1)


class LastingConsole(Console):
    """Console that stops printing if its terminal or pipe closes, instead of exiting."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def why_failed(proof: Proof, *, strict: bool) -> str | None:
    findings = proof.found
    checks = [check for found in findings for check in found.checks]
    if proof.interrupted is not None:
        return proof.interrupted
    if any(found.status == "failed" for found in findings):
        return "a scenario failed"
    if not any(found.status == "done" or found.tables for found in findings):
        return "nothing was measured"
    if strict and not checks:
        return "no bound was checked"
    if strict and not all(check.ok for check in checks):
        return "a bound failed"
    return None


@contextmanager
def steps(console: Console, errors: Console) -> Iterator[tuple[OnText, OnText]]:
    """Yield `on_step` and `on_begin` of `Proof`: a status on a terminal, else lines."""
    if not console.is_terminal:

        def on_begin(line: str) -> None:
            with suppress(OSError):  # a measurement does not end with the terminal that it began in
                errors.print(line, markup=False)

        yield lambda _: None, on_begin
        return
    with console.status("preparing") as status:
        yield lambda step: status.update(escape(step)), lambda _: None


def _check_out(out: Path) -> None:
    """Raise BadParameter if the report could not be written to `out` after the measurements."""
    if out.suffix == ".json" or not out.parent.is_dir():
        raise typer.BadParameter(f"--out {out}: not a Markdown file in a folder that exists")
    for one in (out, out.with_suffix(".json") if out.name else out):
        if one.is_dir() or not os.access(one if one.exists() else one.parent, os.W_OK):
            raise typer.BadParameter(f"--out {out}: {one} cannot be written")


def _load_average() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())
