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

Minutes = Annotated[float, typer.Option(min=0.1, help="No round begins after so long.")]
Seed = Annotated[int | None, typer.Option(help="Decides all; default: another each time.")]
Families = Annotated[
    list[str] | None,
    typer.Option("--family", help="A kind of model; repeatable, they take turns."),
]
Seconds = Annotated[float, typer.Option(min=4.0, help="How long a round is, its checks apart.")]
Agents = Annotated[int, typer.Option(min=1, help="Clients at once.")]
Pause = Annotated[float, typer.Option(min=0.0, help="Seconds that each client waits in between.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the end.")]
Folder = Annotated[Path | None, typer.Option(help="Where files go; default: a temporary folder.")]


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
    """Run servers under random agents, faults and kills, and check what must hold after each round.

    Exit status 1 where something did not.
    """
    seed = random.randrange(10**6) if seed is None else seed
    place = Path(tempfile.mkdtemp(prefix="mlxcache-soak-")) if folder is None else folder
    output = sys.stderr if as_json else sys.stdout
    run = Soak(
        place, seed, tuple(family or FAMILIES), lambda line: print(line, file=output, flush=True),
        agents=agents, pause=pause,
    )  # fmt: skip
    run.ledger.say(f"seed {seed}, in {place}")
    try:
        run.run(minutes, seconds)
    except NotStarted as error:
        run.ledger.violation("start", str(error))
    found = figures(run)
    print(json.dumps(found, indent=1) if as_json else table(found))
    if run.ledger.violations:
        print("\n".join(run.ledger.violations), f"left for a look: {place}", sep="\n", file=output)
        sys.exit(1)
    if folder is None:
        shutil.rmtree(place)


if __name__ == "__main__":
    typer.run(soak)
