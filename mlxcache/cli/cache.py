"""Commands of the group `mlxcache cache`, and `mlxcache warm`."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxcache.cli import show
from mlxcache.cli.cache_figures import print_figures
from mlxcache.cli.help import App
from mlxcache.cli.options import TARGET, Where, find_server, located, positive_size, read_input
from mlxcache.cli.output import Yes, confirm, console, count_bar, require_terminal_or_yes
from mlxcache.cli.show import Result, format_count, format_duration
from mlxcache.config import Settings, format_size, load_settings
from mlxcache.config.flags import argument, option, switch
from mlxcache.config.keys import read_remote_key
from mlxcache.config.values import read_duration
from mlxcache.errors import ConfigError

app = App(
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
        option("URL", "For stats and prune: the shared remote at URL, not the cache."),
    ] = None,
    remote_key_file: Annotated[
        Path | None,
        option("FILE", "The remote's key, for stats."),
    ] = None,
) -> None:
    """Show figures of the cache, verify its files, prune and clear it."""
    if remote is not None:
        given = {"remote": remote, "remote_key_file": remote_key_file}
        ctx.meta[TARGET] = load_settings(given, os.environ)
    elif remote_key_file is not None:
        raise ConfigError("--remote-key-file needs a remote: add --remote URL")
    if remote is not None and ctx.invoked_subcommand not in ("stats", "prune"):
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

    def show_problems() -> None:
        rows = ((one["path"], one["what"]) for one in problems)
        show.print_table((("file", "left"), ("problem", "left")), rows)
        console().print(
            "Remove them with `mlxcache cache prune`; their tokens are computed again when needed."
        )

    return Result(listed, show_problems, status=1)


@app.command()
@located
def prune(
    where: Where,
    *,
    older_than: Annotated[
        str | None,
        option("AGE", "With --remote: remove objects older than this, such as 30d."),
    ] = None,
    to: Annotated[
        str | None,
        option("SIZE", "Then evict down to SIZE, such as 5GB.", "--to"),
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
    limit = None if to is None else positive_size("--to", to, "a size such as 512MB or 8GB")
    with count_bar("reading the files") as progress:
        found = where.prune(limit, progress)
    return Result(found, f"Freed {format_size(found['freed_bytes'])}")


@app.command()
@located
def clear(
    where: Where,
    *,
    pinned: Annotated[bool, switch("Remove pinned sessions too.", "--pinned")] = False,
    yes: Yes = False,
) -> Result:
    """Remove all sessions and their KV, in RAM and on disk.

    Pinned sessions stay on disk, unless --pinned is given.

    Asks for confirmation, unless --yes is given.
    """
    require_terminal_or_yes(yes=yes)
    if not yes:
        sessions = where.sessions()
        kept = 0 if pinned else sum(one["pinned"] for one in sessions)
        what = show.format_count(len(sessions) - kept, "session")
        used = format_size(where.stats()["disk"]["used_bytes"])
        stay = f" {show.format_count(kept, 'pinned session')} will stay on disk." if kept else ""
        question = f"Remove {what} and all cached tokens {where}, {used} on disk?{stay}"
        confirm(question, yes=False)
    found = where.clear(pinned=pinned)
    count, freed = show.format_count(found["sessions"], "session"), found["freed_bytes"]
    return Result(found, f"Removed {count}, freed {format_size(freed)} on disk")


# -- a shared remote ---------------------------------------------------------------------------


def show_remote(settings: Settings) -> Result:
    from mlxcache.remote.maintenance import measure  # noqa: PLC0415 - only with --remote
    from mlxcache.remote.objects import form_of  # noqa: PLC0415

    assert settings.remote is not None
    file = settings.remote_key_file
    form = form_of(None if file is None else read_remote_key(file))
    with count_bar("listing the objects") as progress:
        held = measure(settings.remote, form, lambda count: progress(count, 0))
    found: dict[str, Any] = {
        "object": "remote",
        "url": str(settings.remote),
        "objects": held.counts.total(),
        "bytes": held.kinds.total(),
        "kinds": {
            kind: {"objects": held.counts[kind], "bytes": size}
            for kind, size in held.kinds.most_common()
        },
        "ages": dict(held.ages),
        "oldest_at": held.oldest.timestamp() if held.oldest is not None else None,
    }

    def show_counts() -> None:
        objects = show.format_count(found["objects"], "object")
        console().print(f"{found['url']}: {objects}, {format_size(found['bytes'])}")
        if not found["objects"]:
            return
        show.print_table(
            (("kind", "left"), ("objects", "right"), ("size", "right")),
            (
                (kind, f"{held.counts[kind]:,}", format_size(size))
                for kind, size in held.kinds.most_common()
            ),
        )
        ages = ((age, format_size(size)) for age, size in held.ages.items())
        show.print_table((("written", "left"), ("size", "right")), ages)

    return Result(found, show_counts)


def prune_remote(settings: Settings, older_than: str | None) -> Result:
    from mlxcache.remote.maintenance import prune  # noqa: PLC0415 - only with --remote

    assert settings.remote is not None
    if older_than is None:
        raise ConfigError("prune of a remote needs an age: add --older-than 30d")
    try:
        age = timedelta(seconds=read_duration(older_than))
    except ValueError as error:
        raise ConfigError(f"--older-than {error}") from error
    with count_bar("removing old objects") as progress:
        count, freed = prune(settings.remote, age, lambda count: progress(count, 0))
    found = {"object": "remote.pruned", "objects": count, "freed_bytes": freed}
    removed = show.format_count(count, "object")
    return Result(found, f"Removed {removed}, {format_size(freed)}, from {settings.remote}")


# -- warm --------------------------------------------------------------------------------------


@partial(located, find=find_server)
def warm(
    where: Where,
    file: Annotated[
        Path,
        argument(
            "FILE",
            "A chat request of any API as JSON, or a system prompt; - for standard input.",
            exists=True,
            dir_okay=False,
            allow_dash=True,
        ),
    ],
) -> Result:
    """Compute a prefix ahead of its first use, so that the first turn is warm.

    Needs a running server.
    """
    body = read_input(file)
    with count_bar("computing, in tokens") as progress:
        found = where.warm(body, progress)
    text = (
        f"Warm: {format_count(found['prompt_tokens'], 'token')}, {found['fed_tokens']:,} of them "
        f"computed in {format_duration(found['seconds'])}"
    )
    return Result(found, text)
