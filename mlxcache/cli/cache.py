"""The commands `mlxcache cache`: print its figures, verify its files, prune and clear it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich.text import Text

from mlxcache.cli import show
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

_GROUPS = (
    ("Memory", ("ram", "active_bytes", "reserved_bytes", "mlx", "pressure")),
    ("Memory budget, by kind", ("ram kinds",)),
    ("Disk", ("disk", "pending_bytes", "restores")),
    ("Disk, by kind", ("disk kinds",)),
    ("Prefix tree", ("sessions", "tree_tokens", "segments", "checkpoints", "bytes_per_token")),
    ("Requests", ("requests", "queue", "saved")),
    ("Tokens", ("tokens", "anticipated")),
    ("Evictions from RAM", ("evictions",)),
    ("Requests canonicalised, by rule", ("canonicalised",)),
)
"""Headings, each with the keys of `GET /v1/cache` shown below it.

If the first key's value is an object, its figures are not prefixed with the key's name.
"""

_LABELS = {
    "active": "in use by requests",
    "ram_withheld": "withheld",
    "mlx_active": "MLX active",
    "mlx_pool": "MLX pool",
    "disk_written_per_cached_token": "bytes written per cached token",
    "pending": "pending writes",
    "tree_tokens": "tokens",
}
"""Labels of figures whose key is not clear enough as a label."""

Line = tuple[str, str]


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

    With --to, also remove the least recently used files.
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
) -> Result:
    """Remove all sessions and cached tokens, in RAM and on disk; pinned sessions stay on disk."""
    found = where.clear(pinned=pinned)
    count, freed = found["sessions"], format_size(found["freed_bytes"])
    sessions = show.format_count(count, "session")
    return Result(found, f"Removed {sessions}, freed {freed} on disk")


def _parse_limit(text: str) -> int:
    wrong = ConfigError(f"--to must be a size such as 512MB or 8GB, not {text!r}")
    try:
        size = parse_size(text, total=0)
    except ConfigError as error:
        raise wrong from error
    if not size:
        raise wrong
    return size


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print the body of `GET /v1/cache` as figures under headings; unknown keys come last."""
    groups = list(_group_lines(figures))
    width = max((len(name) for _, lines in groups for name, _ in lines), default=0)
    out = console()
    for number, (heading, lines) in enumerate(groups):
        out.print(Text(heading, "bold") if not number else Text(f"\n{heading}", "bold"))
        for name, value in lines:
            out.print(f"  {name:<{width}}  {value}".rstrip())


def _group_lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, list[Line]]]:
    """Yield each heading with its lines; headings without lines are omitted."""
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
            for line in _figure_lines(key, figures[key], headed=not number and heading != "Other")
        ]
        if lines:
            yield heading, lines


def _figure_lines(key: str, value: Any, *, headed: bool) -> list[Line]:
    """Return the lines, each a label and a text, that show the figure `key`.

    An object becomes one line per member. The label of each begins with that of `key`, unless
    `headed`.
    """
    if not isinstance(value, Mapping):
        return [(_label(key), _format_value(key, value))]
    if key == "canonicalised":
        value = {rule: count for rule, count in value.items() if count}
        return [(_label(rule), str(n)) for rule, n in value.items()] or [("none", "")]
    if key.endswith(" kinds"):
        return [(_label(kind), format_size(size)) for kind, size in value.items()]
    lines: list[Line] = []
    prefix = "" if headed else f"{_label(key)} "
    for name, one in value.items():
        if name == "kinds" or (name == "limit_bytes" and "used_bytes" in value):
            continue  # kinds have their own heading; the limit is printed beside the used bytes
        text = _format_value(name, one)
        if name == "used_bytes" and value.get("limit_bytes"):
            text += f" of {_format_value(name, value['limit_bytes'])}"
        label = _LABELS.get(f"{key}_{name.removesuffix('_bytes')}")
        lines.append((label or f"{prefix}{_label(name)}", text))
    return lines


def _label(key: str) -> str:
    short = key.removesuffix("_bytes")
    return _LABELS.get(short) or short.replace("_", " ")


def _format_value(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return format_size(value) if key.endswith("_bytes") else f"{value:,}"
    return str(value)
