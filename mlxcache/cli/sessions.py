"""`mlxcache sessions`: what there is to go on with, and what to call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from mlxcache.cli import show
from mlxcache.cli.output import console
from mlxcache.cli.target import ApiKey, CacheDir, Json, Url, Where, located
from mlxcache.errors import MlxcacheError, NotFound

app = typer.Typer(
    help="List, show, pin, rename, fork and remove sessions, with a running server or without.",
    invoke_without_command=True,
    add_completion=False,
)

Id = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="A session's id, the beginning of one, or its name or title."
    ),
]

_COLUMNS = (
    ("id", "left"),
    ("name", "left"),
    ("tokens", "right"),
    ("RAM", "right"),
    ("disk", "right"),
    ("tier", "left"),
    ("pinned", "left"),
    ("last used", "right"),
)


@app.callback()
def sessions(
    ctx: typer.Context,
    *,
    as_json: Json = False,
    url: Url = None,
    api_key: ApiKey = None,
    cache_dir: CacheDir = None,
) -> None:
    """List, show, pin, rename, fork and remove sessions, with a running server or without.

    Without a command: the list.
    """
    ctx.obj = (url, api_key, cache_dir)
    if ctx.invoked_subcommand is None:
        list_sessions(ctx, as_json=as_json)


@app.command("list")
@located
def list_sessions(
    where: Where,
    *,
    as_json: Json = False,
) -> None:
    """List all sessions, those used last first."""
    found = where.sessions()
    if as_json:
        show.print_json({"object": "list", "data": found})
    elif found:
        show.table(_COLUMNS, map(_row, found), cut=1)
    else:
        console().print(show.no_sessions(where.computing(), str(where)))


@app.command("show")
@located
def show_session(
    where: Where,
    id: Id,
    *,
    as_json: Json = False,
) -> None:
    """Show one session with its leaves: the main conversation and its agents'."""
    found = where.session(find(where.sessions(), id))
    if as_json:
        show.print_json(found)
    else:
        _print(found)


@app.command()
@located
def pin(
    where: Where,
    id: Id,
    *,
    as_json: Json = False,
) -> None:
    """Keep a session: it is evicted last."""
    _change(where, id, "Pinned", as_json=as_json, pinned=True)


@app.command()
@located
def unpin(
    where: Where,
    id: Id,
    *,
    as_json: Json = False,
) -> None:
    """Let a session be evicted like any other."""
    _change(where, id, "Not pinned any more", as_json=as_json, pinned=False)


@app.command()
@located
def rename(
    where: Where,
    id: Id,
    name: Annotated[str, typer.Argument(metavar="NAME", help='The new name; "" for none.')],
    *,
    as_json: Json = False,
) -> None:
    """Give a session a name."""
    _change(where, id, "Renamed", as_json=as_json, name=name)


@app.command()
@located
def fork(
    where: Where,
    id: Id,
    *,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The new one's name.")] = None,
    at: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Where to part; at the end unless given."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a new session that goes on from this one. Its id serves as X-Session-Id."""
    sessions = where.sessions()
    found = find(sessions, id)
    tokens = next(one["tokens"] for one in sessions if one["id"] == found)
    if at is not None and at > tokens:
        raise MlxcacheError(f"--at must be from 1 to {tokens}, which {found} has, not {at}.")
    made = where.fork(found, name, at)
    if as_json:
        show.print_json(made)
    else:
        console().print(f"Forked at {made['tokens']} tokens: {made['id']}")


@app.command()
@located
def rm(
    where: Where,
    id: Id,
    *,
    as_json: Json = False,
) -> None:
    """Remove a session, with all that no other session needs."""
    found = find(where.sessions(), id)
    where.delete(found)
    if as_json:
        show.print_json({"id": found, "deleted": True})
    else:
        console().print(f"Removed: {found}")


def find(sessions: list[dict[str, Any]], text: str) -> str:
    """The id that `text` stands for: an id, a name, the beginning of an id, a title or a label.

    What comes first here counts, and all but an id only where one session alone has it. Raises
    NotFound.
    """
    ways: tuple[Callable[[dict[str, Any]], bool], ...] = (
        lambda one: one["id"] == text,
        lambda one: one["name"] == text,
        lambda one: one["id"].startswith((text, f"ses_{text}")),
        lambda one: text in (one["title"], one["label"]),
    )
    for way in ways if text else ():
        found = [str(one["id"]) for one in sessions if way(one)]
        if len(found) == 1:
            return found[0]
        if found:
            raise NotFound(f"{text!r} may be any of {_some(found)}: give the id.")
    raise NotFound(f"No session has the id, name or title {text!r}; see mlxcache sessions.")


def _some(ids: list[str], most: int = 5) -> str:
    more = len(ids) - most
    return ", ".join(ids[:most]) + (f" and {more} more" if more > 0 else "")


def _change(where: Where, id: str, done: str, *, as_json: bool, **changes: Any) -> None:
    changed = where.patch(find(where.sessions(), id), **changes)
    if as_json:
        show.print_json(changed)
        return
    console().print(f"{done}: {changed['id']} {show.name_of(changed)}".rstrip())


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["id"],
        show.name_of(one),
        f"{one['tokens']:,}",
        show.size(one["ram_bytes"]),
        show.size(one["disk_bytes"]),
        one["tier"] or "-",
        "yes" if one["pinned"] else "",
        show.age(one["last_used_at"]),
    )


def _gained(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """What a session's requests found and saved; what nobody knows is left out."""
    if not figures["requests"]:
        return []
    told = [("requests", f"{figures['requests']:,}")]
    if figures["first_token_s"] is not None:
        told.append(("first token", f"after {show.duration(figures['first_token_s'])} on average"))
    told.append(("reused", show.reuse(figures)))
    if figures["saved_s"] is not None:
        told.append(("time saved", show.duration(figures["saved_s"])))
    return told


def _print(one: dict[str, Any]) -> None:
    show.facts(
        (
            ("id", one["id"]),
            ("name", one["name"] or "-"),
            ("title", one["title"] or "-"),
            ("label", one["label"] or "-"),
            ("model", one["model"]),
            ("namespace", one["namespace"]),
            ("client", one["client"] or "-"),
            ("tokens", f"{one['tokens']:,}, of which {one['durable_tokens']:,} are durable"),
            ("turns", f"{one['turns']:,}"),
            *_gained(one["figures"]),
            ("RAM", show.size(one["ram_bytes"])),
            ("disk", show.size(one["disk_bytes"])),
            ("tier", one["tier"] or "-"),
            ("pinned", "yes" if one["pinned"] else "no"),
            ("created", show.moment(one["created_at"])),
            ("last used", show.moment(one["last_used_at"])),
        )
    )
    columns = (("leaf", "left"), ("tokens", "right"), ("in RAM", "right"), ("durable", "right"))
    print()
    show.table(
        (*columns, ("turns", "right"), ("last used", "right")),
        (
            (
                leaf["kind"],
                f"{leaf['tokens']:,}",
                f"{leaf['ram_tokens']:,}",
                f"{leaf['durable_tokens']:,}",
                f"{leaf['turns']:,}",
                show.age(leaf["last_used_at"]),
            )
            for leaf in one["leaves"]
        ),
    )
