"""`mlxcache cache`: figures, a check of the files, and making room."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxcache.cli import show
from mlxcache.cli.figures import print_figures
from mlxcache.cli.output import console
from mlxcache.cli.progress import counting
from mlxcache.cli.target import Json, Where, located
from mlxcache.config import format_size, parse_size
from mlxcache.errors import ConfigError

app = typer.Typer(
    help="Figures of the cache, a check of its files, and making room.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
@located
def stats(
    where: Where,
    *,
    as_json: Json = False,
) -> None:
    """Show what the cache holds, and what it was good for."""
    found = where.stats()
    if as_json:
        show.print_json(found)
    else:
        print_figures(found)


@app.command()
@located
def check(
    where: Where,
    *,
    as_json: Json = False,
) -> None:
    """Read every file on disk and verify it; exit status 1 if something is wrong.

    Nothing is changed, and a server may run meanwhile.
    """
    with counting("reading the files") as progress:
        problems = where.check(progress)
    if as_json:
        show.print_json({"object": "list", "data": problems})
    elif problems:
        show.table((("file", "left"), ("what is wrong", "left")), map(_problem, problems))
        console().print("mlxcache cache prune removes them; what is needed is computed again.")
    else:
        console().print(f"All files {where} are as they should be.")
    if problems:
        raise typer.Exit(1)


@app.command()
@located
def prune(
    where: Where,
    *,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="SIZE", help="Evict what is beyond it, such as 5GB."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every file, remove what is damaged and, with --to, what was used least recently."""
    limit = None if to is None else _bytes(to)
    with counting("reading the files") as progress:
        found = where.prune(limit, progress)
    if as_json:
        show.print_json(found)
    else:
        console().print(f"Freed {format_size(found['freed_bytes'])}")


@app.command()
@located
def clear(
    where: Where,
    *,
    pinned: Annotated[
        bool, typer.Option("--pinned", metavar="", help="Remove pinned sessions too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove all sessions and all that is cached, in RAM and on disk; pinned ones stay on disk."""
    found = where.clear(pinned=pinned)
    if as_json:
        show.print_json(found)
    else:
        count, freed = found["sessions"], format_size(found["freed_bytes"])
        sessions = "1 session" if count == 1 else f"{count} sessions"
        console().print(f"Removed {sessions}, freed {freed} on disk")


def _bytes(text: str) -> int:
    wrong = ConfigError(f"--to must be a size such as 512MB or 8GB, not {text!r}")
    try:
        size = parse_size(text, total=0)
    except ConfigError as error:
        raise wrong from error
    if not size:
        raise wrong
    return size


def _problem(problem: dict[str, str]) -> tuple[str, str]:
    return problem["path"], problem["what"]
