"""`mlxcache cache`: figures, a check of the files, and making room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from mlxcache.cli import show
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


_GROUPS = (
    ("Memory", ("ram", "active_bytes", "reserved_bytes", "mlx", "pressure")),
    ("Memory budget, by what it is for", ("ram kinds",)),
    ("Disk", ("disk", "pending_bytes", "restores")),
    ("Disk, by what is there", ("disk kinds",)),
    ("Prefix tree", ("sessions", "tree_tokens", "segments", "checkpoints", "bytes_per_token")),
    ("Requests", ("requests", "queue", "saved")),
    ("Tokens", ("tokens", "anticipated")),
    ("Evictions from RAM", ("evictions",)),
    ("Canonicalised, in so many requests", ("canonicalised",)),
)
"""Headings with what stands below them. A table that comes first is what its heading names."""

_WORDS = {
    "active": "in use by requests",
    "reserved": "set aside",
    "ram_withheld": "given up",
    "mlx_active": "MLX holds",
    "mlx_pool": "MLX pool",
    "disk_written_per_cached_token": "bytes written per cached token",
    "pending": "on its way to disk",
    "tree_tokens": "tokens",
}
"""Where a figure's name alone says too little below its heading."""

Line = tuple[str, str]


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print all of `figures`; what no heading is known for comes last."""
    groups = list(_grouped(figures))
    width = max((len(name) for _, lines in groups for name, _ in lines), default=0)
    out = console()
    for number, (heading, lines) in enumerate(groups):
        out.print(Text(heading, "bold") if not number else Text(f"\n{heading}", "bold"))
        for name, value in lines:
            out.print(f"  {name:<{width}}  {value}".rstrip())


def _grouped(figures: Mapping[str, Any]) -> Iterator[tuple[str, list[Line]]]:
    """Each heading that has something below it."""
    figures = dict(figures)
    for tier in ("ram", "disk"):
        if kinds := figures.get(tier, {}).get("kinds"):
            figures[f"{tier} kinds"] = kinds
    known = {key for _, keys in _GROUPS for key in keys}
    others = tuple(key for key in figures if key not in known)
    for heading, keys in (*_GROUPS, ("Other", others)):
        lines = [
            line
            for number, key in enumerate(keys)
            if key in figures
            for line in _lines(key, figures[key], headed=not number and heading != "Other")
        ]
        if lines:
            yield heading, lines


def _lines(key: str, value: Any, *, headed: bool) -> list[Line]:
    """A figure as lines; a table that is `headed` goes without its own name."""
    if not isinstance(value, Mapping):
        return [(_name(key), _told(key, value))]
    if key == "canonicalised":
        value = {rule: count for rule, count in value.items() if count}
        return [(_name(rule), str(n)) for rule, n in value.items()] or [("none", "")]
    if key.endswith(" kinds"):
        return [(_name(kind), format_size(size)) for kind, size in value.items()]
    lines: list[Line] = []
    prefix = "" if headed else f"{_name(key)} "
    for name, one in value.items():
        if name == "kinds" or (name == "limit_bytes" and "used_bytes" in value):
            continue  # they stand below a heading of their own, and beside what is used
        told = _told(name, one)
        if name == "used_bytes" and value.get("limit_bytes"):
            told += f" of {_told(name, value['limit_bytes'])}"
        named = _WORDS.get(f"{key}_{name.removesuffix('_bytes')}")
        lines.append((named or f"{prefix}{_name(name)}", told))
    return lines


def _name(key: str) -> str:
    short = key.removesuffix("_bytes")
    return _WORDS.get(short) or short.replace("_", " ")


def _told(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return format_size(value) if key.endswith("_bytes") else f"{value:,}"
    return str(value)
