"""Commands of the group `mlxcache cache`: stats, check, prune and clear."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mlxcache.cli import show
from mlxcache.cli.confirm import Yes, confirm, require_terminal_or_yes
from mlxcache.cli.figures import print_figures
from mlxcache.cli.output import console, reporting
from mlxcache.cli.progress import count_bar
from mlxcache.cli.shared import prune_remote, show_remote
from mlxcache.cli.show import Result
from mlxcache.cli.target import TARGET, Where, located
from mlxcache.config import Settings, format_size, load_settings, parse_size
from mlxcache.errors import ConfigError

app = typer.Typer(
    name="cache",
    help="Show figures of the cache, verify its files, prune and clear it.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def group(
    ctx: typer.Context,
    remote: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="For stats and prune: the shared remote at URL, not the cache."
        ),
    ] = None,
    remote_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The remote's key, for stats."),
    ] = None,
) -> None:
    """Show figures of the cache, verify its files, prune and clear it."""
    with reporting():
        if remote is not None:
            given = {"remote": remote, "remote_key_file": remote_key_file}
            ctx.meta[TARGET] = load_settings(given, os.environ)
        elif remote_key_file is not None:
            raise ConfigError("--remote-key-file needs a remote: add --remote URL")
    if remote is not None and ctx.invoked_subcommand not in ("stats", "prune"):
        with reporting():
            raise ConfigError(f"--remote has no {ctx.invoked_subcommand}: use stats or prune")


@app.command()
@located
def stats(where: Where) -> Result:
    """Show what the cache holds and how much it was reused.

    With --remote before the command, show what the shared remote holds instead.
    """
    if isinstance(where, Settings):
        return show_remote(where)
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
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="With --remote: remove objects older than this, such as 30d."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="SIZE", help="Then evict down to SIZE, such as 5GB."),
    ] = None,
) -> Result:
    """Verify every file of the cache and remove damaged ones.

    With --to, also evict files until the cache takes at most that size on disk: those
    used least often and longest ago first, pinned ones last.

    With --remote before the command, the cache is left alone: the objects of the shared remote
    that are older than --older-than are removed.
    """
    if isinstance(where, Settings):
        return prune_remote(where, older_than)
    if older_than is not None:
        raise ConfigError("--older-than is of a remote: add --remote URL before prune")
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
    """Remove all sessions and their KV, in RAM and on disk.

    Pinned sessions stay on disk, unless --pinned is given.

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

    It says how many sessions, and how many bytes on disk, will be removed from `where`, a server or
    a cache folder. `pinned` tells whether pinned sessions are removed too.
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
