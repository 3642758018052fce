"""`python -m tests.soak`: see `bin/soak --help`."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mlxcache.bench.process import NotStarted
from tests.soak.plan import FAMILIES
from tests.soak.report import figures, table
from tests.soak.run import Soak

Minutes = Annotated[float, typer.Option(min=0.1, help="Start no round after this time.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the plan; default: random.")]
Families = Annotated[
    list[str] | None,
    typer.Option("--family", help="A model family; repeatable, used in turn."),
]
Seconds = Annotated[float, typer.Option(min=4.0, help="Duration of a round without its checks.")]
Agents = Annotated[int, typer.Option(min=1, help="Number of concurrent clients.")]
Pause = Annotated[float, typer.Option(min=0.0, help="Seconds between the steps of a client.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON at the end.")]
Folder = Annotated[Path | None, typer.Option(help="Folder of all files; default: temporary.")]


def soak(
    *,
    minutes: Minutes = 10.0,
    seed: Seed = None,
    family: Families = None,
    seconds: Seconds = 20.0,
    agents: Agents = 5,
    pause: Pause = 0.0,
    as_json: AsJson = False,
    folder: Folder = None,
) -> None:
    """Run servers under random agents, faults and kills, and check them after each round.

    Exit status 1 after a violation.
    """
    seed = random.randrange(10**6) if seed is None else seed
    place = Path(tempfile.mkdtemp(prefix="mlxcache-soak-")) if folder is None else folder
    output = sys.stderr if as_json else sys.stdout
    run = Soak(
        place, seed, tuple(family or FAMILIES), lambda line: print(line, file=output, flush=True),
        agents=agents, pause=pause,
    )  # fmt: skip
    run.ledger.print_line(f"seed {seed}, in {place}")
    try:
        run.run(minutes, seconds)
    except NotStarted as error:
        run.ledger.add_violation("start", str(error))
    found = figures(run)
    print(json.dumps(found, indent=1) if as_json else table(found))
    if run.ledger.violations:
        print("\n".join(run.ledger.violations), f"files kept in {place}", sep="\n", file=output)
        sys.exit(1)
    if folder is None:
        shutil.rmtree(place)


if __name__ == "__main__":
    typer.run(soak)
