"""Commands of the group `mlxcache cache`: print its figures, verify, prune and clear it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import typer

from mlxcache.cli import show
from mlxcache.cli.confirm import Yes, confirm, require_terminal_or_yes
from mlxcache.cli.figures import print_figures
from mlxcache.cli.output import console
from mlxcache.cli.progress import count_bar
from mlxcache.cli.show import Result
from mlxcache.cli.target import Where, located
from mlxcache.config import format_size, parse_size
from mlxcache.errors import ConfigError

app = typer.Typer(
    name="cache",
    help="Show figures of the cache, verify its files, prune and clear it.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
@located
def stats(where: Where) -> Result:
    """Show what the cache holds and how much it was reused."""
    found = where.stats()
    return Result(found, partial(print_figures, found))


@app.command()
@located
def check(where: Where) -> Result:
    """Read and verify every file of the cache on disk. Exit status 1 if a file is damaged.

    No file is changed, and a server may run at the same time.
    """
    with count_bar("reading the files") as progress:
        problems = where.check(progress)
    listed = {"object": "list", "data": problems}
    if not problems:
        return Result(listed, f"All files {where} are intact.")
    return Result(listed, partial(_print_problems, problems), status=1)


def _print_problems(problems: Sequence[Mapping[str, str]]) -> None:
    rows = ((one["path"], one["what"]) for one in problems)
    show.print_table((("file", "left"), ("problem", "left")), rows)
    console().print(
        "Remove them with `mlxcache cache prune`; their tokens are computed again when needed."
    )


@app.command()
@located
def prune(
    where: Where,
    *,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="SIZE", help="Then evict down to SIZE, such as 5GB."),
    ] = None,
) -> Result:
    """Verify every file of the cache and remove damaged ones.

    With --to, also evict files until that size is left: those used least often and longest ago
    first, pinned ones last.
    """
    limit = None if to is None else _parse_limit(to)
    with count_bar("reading the files") as progress:
        found = where.prune(limit, progress)
    return Result(found, f"Freed {format_size(found['freed_bytes'])}")


@app.command()
@located
def clear(
    where: Where,
    *,
    pinned: Annotated[
        bool, typer.Option("--pinned", metavar="", help="Remove pinned sessions too.")
    ] = False,
    yes: Yes = False,
) -> Result:
    """Remove all sessions and cached tokens, in RAM and on disk; pinned sessions stay on disk.

    Asks for confirmation, unless --yes is given.
    """
    require_terminal_or_yes(yes=yes)
    if not yes:
        confirm(_describe_clearing(where, pinned=pinned), yes=False)
    found = where.clear(pinned=pinned)
    count, freed = found["sessions"], format_size(found["freed_bytes"])
    sessions = show.format_count(count, "session")
    return Result(found, f"Removed {sessions}, freed {freed} on disk")


def _describe_clearing(where: Where, *, pinned: bool) -> str:
    """Return the question that asks to confirm clearing the cache.

    It says what will be removed from `where`, a server or a cache folder. `pinned` tells whether
    pinned sessions are included.
    """
    sessions = where.sessions()
    kept = 0 if pinned else sum(one["pinned"] for one in sessions)
    what = show.format_count(len(sessions) - kept, "session")
    used = format_size(where.stats()["disk"]["used_bytes"])
    stay = f" {show.format_count(kept, 'pinned session')} will stay on disk." if kept else ""
    return f"Remove {what} and all cached tokens {where}, {used} on disk?{stay}"


def _parse_limit(text: str) -> int:
    wrong = ConfigError(f"--to must be a size such as 512MB or 8GB, not {text!r}")
    try:
        size = parse_size(text, total=0)
    except ConfigError as error:
        raise wrong from error
    if not size:
        raise wrong
    return size
