"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mlxcache.config import format_size

_PIPE_WIDTH = 240
"""Columns of a table that goes to a file or a pipe, so that nothing is cut off."""

_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


def print_json(value: Any) -> None:
    """`value` as JSON on the standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under `columns`: each a heading and how it is justified; no headings, no line."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_PIPE_WIDTH)
    made = Table(
        box=None, pad_edge=False, header_style="bold", show_header=any(h for h, _ in columns)
    )
    for heading, justify in columns:
        made.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*row)
    console.print(made)


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names with their values, one per line."""
    table((("", "left"), ("", "left")), pairs)


def name_of(session: dict[str, Any]) -> str:
    """What to call a session: its name, else its title, else its label."""
    return str(session["name"] or session["title"] or session["label"] or "")


def size(nbytes: int | None) -> str:
    """Bytes for a person; none are a dash."""
    return format_size(nbytes) if nbytes else "-"


def age(at: float) -> str:
    """How long ago `at` (seconds since 1970) was."""
    passed = max(0.0, time.time() - at)
    for seconds, unit in _AGES:
        if passed >= seconds:
            return f"{int(passed // seconds)} {unit} ago"
    return "now"


def moment(at: float) -> str:
    """`at` (seconds since 1970) as this machine's clock and calendar have it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
