"""The commands `mlxcache sessions`, and `snapshot` and `restore`: export and import a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxcache.cli import show
from mlxcache.cli.help import App
from mlxcache.cli.options import Where, list_by_default, located
from mlxcache.cli.output import Yes, byte_bar, confirm, require_terminal_or_yes, visible
from mlxcache.cli.show import Column, Result
from mlxcache.config import format_size, load_settings
from mlxcache.config.flags import argument, option
from mlxcache.errors import ConfigError, MlxcacheError, NotFound, SnapshotRefused
from mlxcache.names import clean_name

app = App(name="sessions", invoke_without_command=True, add_completion=False)


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
    argument(
        "ID",
        "A session's id, name, title or label; also the start of an id, or the end of an "
        "id or label.",
        autocompletion=complete_id,
    ),
]

_LEAST_END = 8
"""Minimum characters of the end of a label or id that names a session."""

_HINT, _MOST_NAMED = 60, 5

_COLUMNS: tuple[Column, ...] = (
    ("id", "left", lambda one: one["id"]),
    ("name", "left", show.listed_name),
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
    found = where.session(find_session(where.sessions(), id)["id"])
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
    name: Annotated[str, argument("NAME", 'The new name; "" removes it.')],
) -> Result:
    """Give a session a name."""
    return _patch_session(where, id, "Renamed", name=clean_name(name))


@app.command()
@located
def fork(
    where: Where,
    id: Id,
    *,
    name: Annotated[str | None, option("NAME", "Name of the new session.")] = None,
    at: Annotated[
        int | None,
        option("TOKENS", "Number of tokens to keep. Default: all.", min=1),
    ] = None,
) -> Result:
    """Make a new session that continues from the tokens of another.

    To use it, send the new id as X-Session-Id.
    """
    name = None if name is None else clean_name(name)
    one = find_session(where.sessions(), id)
    if at is not None and at > one["tokens"]:
        raise MlxcacheError(
            f"--at must be from 1 to {one['tokens']}, the tokens of {one['id']}, not {at}."
        )
    made = where.fork(one["id"], name, at)
    return Result(made, f"Forked at {show.format_count(made['tokens'], 'token')}: {made['id']}")


@app.command()
@located
def rm(where: Where, id: Id, *, yes: Yes = False) -> Result:
    """Remove a session and its cached tokens, except those that other sessions share.

    Asks for confirmation, unless --yes is given.
    """
    require_terminal_or_yes(yes=yes)
    one = find_session(where.sessions(), id)
    tokens = show.format_count(one["tokens"], "token")
    pinned = ", pinned" if one["pinned"] else ""
    confirm(f"Remove {one['id']}, {show.session_name(one)!r} ({tokens}{pinned})?", yes=yes)
    where.delete(one["id"])
    return Result({"id": one["id"], "deleted": True}, f"Removed: {one['id']}")


def find_session(sessions: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """Return the one of `sessions` that `text` names.

    Tries an id, then a name, the start of an id, a title or label, and the end of a label or id.
    Raises NotFound if nothing matches, or if the first of these to match finds several sessions.
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
            return found[0]
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
    changed = where.patch(find_session(where.sessions(), id)["id"], **changes)
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


# -- snapshots ---------------------------------------------------------------------------------

_EXPECTED = (
    "Expected a file written by `mlxcache snapshot ID -o FILE` or by mlx-lm's "
    "`mlx_lm.cache_prompt`."
)
_HEAD = 4096
_SHOWN_CHARS = 40
_LENGTH = 8  # bytes of the length field before a safetensors header
_OFFSETS = b'"data_offsets"'  # a key of each tensor in a safetensors header

_ARCHIVES = (
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)


class Format(StrEnum):
    MLXCACHE = "mlxcache"
    MLX_LM = "mlx-lm"


@located
def snapshot(
    where: Where,
    id: Id,
    *,
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "The file to write. Default: the session's id, with .safetensors.",
            *("--output", "-o"),
            dir_okay=False,
        ),
    ] = None,
    format: Annotated[
        Format,
        typer.Option(help="mlx-lm writes a file for mlx_lm.generate --prompt-cache-file."),
    ] = Format.MLXCACHE,
    yes: Yes = False,
) -> Result:
    """Write a session to one file, to continue it on another machine or server.

    Asks for confirmation before replacing a file, unless --yes is given.
    """
    if str(output) == "-":
        raise ConfigError("--output must be a file: a snapshot cannot go to standard output")
    sessions = where.sessions()
    one = find_session(sessions, id)
    output = output or Path(f"{one['id']}.safetensors")
    _confirm_replacing(output, yes=yes)
    part = output.with_name(f".{output.name}.part")
    try:
        with byte_bar("writing") as progress:
            size = where.snapshot(one["id"], part, format.value, progress)
        part.replace(output)
    except OSError as error:
        raise MlxcacheError(f"{output} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
    written = {"id": one["id"], "path": str(output), "bytes": size}
    text = f"Wrote {output}: {format_size(size)}"
    if show.has_several_models(sessions):
        text += f", of {visible(one['model'])}"
    return Result(written, text)


def _confirm_replacing(path: Path, *, yes: bool) -> None:
    try:
        if not path.exists():
            return
        if not path.is_file():
            raise ConfigError(f"--output must be a regular file, and {path} is none")
        size = format_size(path.stat().st_size)
    except OSError as error:
        raise MlxcacheError(f"{path} cannot be written: {error.strerror}.") from error
    confirm(f"{path} exists ({size}). Replace it?", yes=yes)


@located
def restore(
    where: Where,
    file: Annotated[
        Path,
        argument("FILE", "A snapshot.", exists=True, dir_okay=False, readable=True),
    ],
    *,
    name: Annotated[str | None, option("NAME", "Name of the new session.")] = None,
    prompt: Annotated[
        str | None,
        option(
            "TEXT",
            "The prompt given to mlx_lm.cache_prompt, as text or a JSON list of token ids; "
            "- reads standard input. Needs a server.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "NAME",
            "The model, if the server has several. Default: the file's own, or for a prompt "
            "cache that does not name one of them the default model.",
        ),
    ] = None,
) -> Result:
    """Import a session from a snapshot or a prompt cache of mlx-lm; its next turn is warm."""
    name = None if name is None else clean_name(name)
    _check_snapshot(file)
    if prompt == "-":
        prompt = typer.get_text_stream("stdin").read()
    with byte_bar("reading") as progress:
        made = where.restore(file, name, prompt, model, progress)
    of_model = f"of {visible(made['model'])}"
    text = f"Imported {show.format_count(made['tokens'], 'token')} {of_model}: {made['id']}"
    return Result(made, text)


def _check_snapshot(file: Path) -> None:
    """Raise MlxcacheError, which says what the file is, if `file` can be no snapshot."""
    # numpy takes a while, and --help needs none of it
    from mlxcache.safetensors import OPENING  # noqa: PLC0415
    from mlxcache.store.snapshot_format import FORMAT, detect_format  # noqa: PLC0415

    try:
        detect_format(file)
    except SnapshotRefused as error:
        try:
            with file.open("rb") as opened:
                head, size = opened.read(_HEAD), os.fstat(opened.fileno()).st_size
        except OSError as failure:
            raise MlxcacheError(f"{file} cannot be read: {failure.strerror}.") from failure
        header = head[_LENGTH:]
        if header.startswith(OPENING) or f'"{FORMAT}"'.encode() in header:
            raise MlxcacheError(
                f"{file} is a damaged snapshot: {_reason(error)}. Copy it again, or take it again "
                "with `mlxcache snapshot`."
            ) from error
        raise MlxcacheError(
            f"{file} is not a snapshot: {_describe_wrong(head, size, error)}. {_EXPECTED}"
        ) from error


def _reason(error: SnapshotRefused) -> str:
    return str(error.__cause__ or error).rstrip(".")


def _describe_wrong(head: bytes, size: int, error: SnapshotRefused) -> str:
    if not head:
        return "it is empty"
    for start, name in _ARCHIVES:
        if head.startswith(start):
            return f"it is compressed with {name}; unpack it first"
    if _OFFSETS in head[_LENGTH:]:
        damage = f"; {_reason(error)}" if error.__cause__ else ""
        return f"it is a safetensors file of another kind, such as weights{damage}"
    with suppress(UnicodeDecodeError):
        text = head.decode(errors="strict" if len(head) < _HEAD else "ignore").strip()
        shown = text[:_SHOWN_CHARS]
        if all(c.isprintable() or c.isspace() for c in shown):
            return f"it is a text that begins with {shown!r}"
    return f"it is {format_size(size)} of an unknown format"
