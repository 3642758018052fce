"""`python -m tests.soak`: see `bin/soak --help`."""

from __future__ import annotations

import json
import platform
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from mlxcache.bench.process import NotStarted
from tests.soak.checks import first_after_quarter
from tests.soak.plan import FAMILIES
from tests.soak.run import Soak

Minutes = Annotated[float, typer.Option(min=0.1, help="Start no round after this time.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the plan; default: random.")]
Families = Annotated[
    list[str] | None, typer.Option("--family", help="A model family; repeatable, used in turn.")
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


LOSSES = {"sessions lost": "session lost", "wrong tokens": "wrong tokens", "hangs": "hang"}


def figures(soak: Soak) -> dict[str, Any]:
    ledger = soak.ledger
    worst = max(ledger.overshoots, key=lambda over: over.nbytes, default=None)
    return {
        "seed": soak.seed,
        "families": list(soak.families),
        "seconds": round(time.monotonic() - soak.began),
        "machine": f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores",
        "rounds": soak.rounds,
        "requests": dict(ledger.requests),
        "tokens": dict(ledger.tokens),
        "ends": dict(ledger.ends),
        "faults": dict(ledger.faults),
        "replies_verified": ledger.checks["checked"],
        **{name.replace(" ", "_"): ledger.kinds[kind] for name, kind in LOSSES.items()},
        "violations": dict(ledger.kinds),
        "memory": {name: _memory(one.rests) for name, one in soak.steady.items() if one.rests},
        "largest_overshoot_bytes": worst.nbytes if worst else None,
        "largest_overshoot_of": worst.of if worst else None,
        "largest_overshoot_with_200MB": max(
            (over.share for over in ledger.overshoots if over.of.endswith("200MB")), default=None
        ),
    }


def _memory(rests: list[Any]) -> dict[str, Any]:
    quarter, last = first_after_quarter(rests), rests[-1]
    return {
        "first_bytes": rests[0].nbytes,
        "quarter_bytes": quarter.nbytes,
        "end_bytes": last.nbytes,
        "most_bytes": max(rest.nbytes for rest in rests),
        "files": [rests[0].files, last.files],
        "threads": [rests[0].threads, last.threads],
        "series": [[round(rest.at), rest.nbytes] for rest in rests],
    }


def table(found: dict[str, Any]) -> str:
    lines: list[tuple[str, str]] = []
    for name, value in found.items():
        words = name.replace("_", " ")
        if name == "memory":
            lines += [(f"memory, {one}", _held(held)) for one, held in value.items()]
        elif isinstance(value, dict):
            lines.append((words, ", ".join(f"{k} {v}" for k, v in sorted(value.items())) or "0"))
        elif isinstance(value, float):
            lines.append((words, f"{value:.1%}"))
        else:
            lines.append((words, str(value)))
    width = max(len(words) for words, _ in lines)
    return "\n".join(f"{words:<{width}}  {value}" for words, value in lines)


def _held(held: dict[str, Any]) -> str:
    at = [f"{held[f'{when}_bytes'] / 1e6:.0f} MB" for when in ("quarter", "end", "most")]
    files, threads = held["files"], held["threads"]
    return (
        f"{at[0]} at a quarter, {at[1]} at the end, {at[2]} at most; "
        f"files {files[0]} to {files[1]}, threads {threads[0]} to {threads[1]}"
    )


if __name__ == "__main__":
    typer.run(soak)
