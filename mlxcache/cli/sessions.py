"""The commands `mlxcache sessions`: list, show, pin, rename, fork and remove sessions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import typer

from mlxcache.cli import show
from mlxcache.cli.options import Where, list_by_default, located
from mlxcache.cli.output import Yes, confirm, require_terminal_or_yes, visible
from mlxcache.cli.show import Column, Result
from mlxcache.config import load_settings
from mlxcache.errors import ConfigError, MlxcacheError, NotFound
from mlxcache.names import clean_name

app = typer.Typer(name="sessions", invoke_without_command=True, add_completion=False)


def complete_id(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete ids of the cache folder's sessions, each with its name; then names, with the id."""
    # Here and not above: a shell that completes something else need not wait for it.
    from mlxcache.store.database import list_session_names  # noqa: PLC0415
    from mlxcache.store.folder import STORE  # noqa: PLC0415

    try:
        settings = load_settings({"cache_dir": ctx.params.get("cache_dir")}, os.environ)
    except ConfigError:
        return []  # the command itself says what is wrong
    rows = list_session_names(settings.cache_dir / STORE)
    ids = [(id, visible(name)[:_HINT]) for id, name in rows if id.startswith(incomplete)]
    names = [(name, id) for id, name in rows if incomplete and name.startswith(incomplete)]
    return [*ids, *((name, id) for name, id in names if name.isprintable() and " " not in name)]


Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="A session's id, name, title or label; also the start of an id, or the end of an "
        "id or label, as in logs.",
        autocompletion=complete_id,
    ),
]

_LEAST_END = 8
"""Minimum characters of the end of a label or id that names a session; the log shows as many."""

_HINT, _MOST_NAMED = 60, 5

_COLUMNS: tuple[Column, ...] = (
    ("id", "left", lambda one: one["id"]),
    ("name", "left", show.session_name),
    ("tokens", "right", lambda one: f"{one['tokens']:,}"),
    ("RAM", "right", lambda one: show.format_size_or_dash(one["ram_bytes"])),
    ("disk", "right", lambda one: show.format_size_or_dash(one["disk_bytes"])),
    ("tier", "left", lambda one: one["tier"] or "-"),
    ("pinned", "left", lambda one: "yes" if one["pinned"] else ""),
    ("last used", "right", lambda one: show.format_age(one["last_used_at"])),
)


@app.command("list")
@located
def list_sessions(where: Where) -> Result:
    """List all sessions, most recently used first."""
    found = where.sessions()
    listed = {"object": "list", "data": found}
    if found:
        return Result(listed, partial(print_sessions, found))
    return Result(listed, show.no_sessions_text(where.computing(), str(where)))


list_by_default(
    app,
    list_sessions,
    "List, show, pin, rename, fork and remove sessions, with a running server or without.",
)


@app.command("show")
@located
def show_session(where: Where, id: Id) -> Result:
    """Show one session with its leaves: the main conversation and those of sub-agents."""
    found = where.session(find_session(where.sessions(), id))
    return Result(found, partial(_print_session, found))


@app.command()
@located
def pin(where: Where, id: Id) -> Result:
    """Pin a session, so that it is evicted last."""
    return _patch_session(where, id, "Pinned", pinned=True)


@app.command()
@located
def unpin(where: Where, id: Id) -> Result:
    """Unpin a session, so that it is evicted like any other."""
    return _patch_session(where, id, "Unpinned", pinned=False)


@app.command()
@located
def rename(
    where: Where,
    id: Id,
    name: Annotated[str, typer.Argument(metavar="NAME", help='The new name; "" removes it.')],
) -> Result:
    """Give a session a name."""
    return _patch_session(where, id, "Renamed", name=clean_name(name))


@app.command()
@located
def fork(
    where: Where,
    id: Id,
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the new session.")
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Number of tokens to keep. Default: all."),
    ] = None,
) -> Result:
    """Make a new session that continues from the tokens of another.

    To use it, send the new id as X-Session-Id.
    """
    name = None if name is None else clean_name(name)
    sessions = where.sessions()
    found = find_session(sessions, id)
    tokens = next(one["tokens"] for one in sessions if one["id"] == found)
    if at is not None and at > tokens:
        raise MlxcacheError(f"--at must be from 1 to {tokens}, the tokens of {found}, not {at}.")
    made = where.fork(found, name, at)
    return Result(made, f"Forked at {show.format_count(made['tokens'], 'token')}: {made['id']}")


@app.command()
@located
def rm(where: Where, id: Id, *, yes: Yes = False) -> Result:
    """Remove a session and its cached tokens, except those that other sessions share.

    Asks for confirmation, unless --yes is given.
    """
    require_terminal_or_yes(yes=yes)
    sessions = where.sessions()
    found = find_session(sessions, id)
    one = next(one for one in sessions if one["id"] == found)
    tokens = show.format_count(one["tokens"], "token")
    pinned = ", pinned" if one["pinned"] else ""
    confirm(f"Remove {found}, {show.session_name(one)!r} ({tokens}{pinned})?", yes=yes)
    where.delete(found)
    return Result({"id": found, "deleted": True}, f"Removed: {found}")


def find_session(sessions: list[dict[str, Any]], text: str) -> str:
    """Return the id of the one of `sessions` that `text` names.

    Tries an id, then a name, the start of an id, a title or label, and the end of a label or id, as
    the log shows it. Raises NotFound if nothing matches, or if the first of these to match finds
    several sessions.
    """
    ways: tuple[Callable[[dict[str, Any]], bool], ...] = (
        lambda one: one["id"] == text,
        lambda one: one["name"] == text,
        lambda one: one["id"].startswith((text, f"ses_{text}")),
        lambda one: text in (one["title"], one["label"]),
        # A client may send a session's id as the label.
        lambda one: (
            len(text) >= _LEAST_END
            and any(end.endswith(text) for end in (one["label"] or "", one["id"]))
        ),
    )
    for way in ways if text else ():
        found = [one for one in sessions if way(one)]
        if len(found) == 1:
            return str(found[0]["id"])
        if found:
            several = len({one["model"] for one in found}) > 1
            of = [f" ({visible(one['model'])})" if several else "" for one in found]
            named = [f"{one['id']}{model}" for one, model in zip(found, of, strict=True)]
            some = ", ".join(named[:_MOST_NAMED])
            some += f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
            raise NotFound(f"{text!r} matches several sessions: {some}. Give the id.")
    raise NotFound(f"No session has the id, name or title {text!r}: see `mlxcache sessions`.")


def print_sessions(sessions: Iterable[dict[str, Any]]) -> None:
    """Print a table of sessions, with clients and models if there are several of them."""
    listed, columns = list(sessions), list(_COLUMNS)
    if show.has_several_models(listed):
        columns.insert(2, ("model", "left", lambda one: one["model"]))
    if show.has_several_clients(listed):
        columns.insert(
            2, ("client", "left", lambda one: show.client_name(one.get("client")) or "-")
        )
    show.print_objects(columns, listed, cut=1)


def _patch_session(where: Where, id: str, done: str, **changes: Any) -> Result:
    changed = where.patch(find_session(where.sessions(), id), **changes)
    return Result(changed, f"{done}: {changed['id']} {show.session_name(changed)}".rstrip())


def _request_facts(figures: dict[str, Any]) -> list[tuple[str, str]]:
    if not figures["requests"]:
        return []
    facts = [("requests", f"{figures['requests']:,}")]
    if figures["first_token_s"] is not None:
        facts.append(
            ("first token", f"after {show.format_duration(figures['first_token_s'])} on average")
        )
    facts.append(("reused", show.format_reuse(figures)))
    if figures["saved_s"] is not None:
        saved = {"tokens": figures["saved_tokens"], "seconds": figures["saved_s"]}
        facts.append(("time saved", show.format_saved(figures["cached_tokens"], saved)))
    if figures.get("guess_passes"):
        names = ("drafted_tokens", "accepted_tokens", "guess_passes", "guess_saved_s")
        facts.append(("guesses", show.format_guesses(*(figures[name] for name in names))))
    return facts


def _print_session(one: dict[str, Any]) -> None:
    show.print_facts(
        (
            ("id", one["id"]),
            ("name", one["name"] or "-"),
            ("title", one["title"] or "-"),
            ("label", one["label"] or "-"),
            ("model", one["model"]),
            ("namespace", one["namespace"]),
            *(("also on", f"{other['model']}: {other['id']}") for other in one["related"]),
            ("client", one["client"] or "-"),
            ("tokens", f"{one['tokens']:,}, of which {one['durable_tokens']:,} are durable"),
            ("turns", f"{one['turns']:,}"),
            *_request_facts(one["figures"]),
            ("RAM", show.format_size_or_dash(one["ram_bytes"])),
            ("disk", show.format_size_or_dash(one["disk_bytes"])),
            ("tier", one["tier"] or "-"),
            ("pinned", "yes" if one["pinned"] else "no"),
            ("created", show.format_time(one["created_at"])),
            ("last used", show.format_time(one["last_used_at"])),
        )
    )
    print()
    show.print_objects(
        (
            ("leaf", "left", lambda leaf: leaf["kind"]),
            ("tokens", "right", lambda leaf: f"{leaf['tokens']:,}"),
            ("in RAM", "right", lambda leaf: f"{leaf['ram_tokens']:,}"),
            ("durable", "right", lambda leaf: f"{leaf['durable_tokens']:,}"),
            ("turns", "right", lambda leaf: f"{leaf['turns']:,}"),
            ("last used", "right", lambda leaf: show.format_age(leaf["last_used_at"])),
        ),
        one["leaves"],
    )
