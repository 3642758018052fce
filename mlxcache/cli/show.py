"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxcache.cli.output import UNSEEN, visible
from mlxcache.config import format_size

if TYPE_CHECKING:
    from mlxcache.engine.metrics import Tally


_PIPE_WIDTH = 240
"""Columns of a table that goes to a file or a pipe, so that nothing is cut off."""

_LEAST_CUT = 10
"""Columns that a text keeps at least when it is cut for a narrow terminal."""

_ROOMY = 24
"""Where less than this would remain of it, columns stand closer together."""

_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


def print_json(value: Any) -> None:
    """`value` as JSON on the standard output."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    print(UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def table(
    columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], *, cut: int | None = None
) -> None:
    """Print rows under `columns`: each a heading and how it is justified; no headings, no line.

    Where a line is wider than the terminal, column `cut` gives way; no other is ever shortened, so
    that ids can be copied.
    """
    cells = ([visible(cell).replace("\n", " ") for cell in row] for row in rows)
    lines = [[heading for heading, _ in columns], *cells]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    terminal = Console()
    room = terminal.width if terminal.is_terminal else _PIPE_WIDTH
    gap, gaps = 2, len(widths) - 1
    if cut is not None:
        left = room - sum(widths) + widths[cut]  # for that column and the gaps
        if left - gap * gaps < min(widths[cut], _ROOMY):
            gap = 1
        widths[cut] = min(widths[cut], max(_LEAST_CUT, left - gap * gaps))
    made = Table(
        box=None,
        padding=(0, gap, 0, 0),
        pad_edge=False,
        header_style="bold",
        show_header=any(h for h, _ in columns),
    )
    for (heading, justify), width in zip(columns, widths, strict=True):
        made.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis", width=width)  # type: ignore[arg-type]
    for row in lines[1:]:
        made.add_row(*row)
    full = max(room, sum(widths) + gap * gaps)
    Console(highlight=False, markup=False, width=full).print(made)


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names with their values, one per line."""
    table((("", "left"), ("", "left")), pairs)


def no_sessions(computed: int, where: str = "") -> str:
    """What is said instead of a list, of requests that run or wait how many there are."""
    place = f" ({where})" if where else ""
    if not computed:
        return f"There are no sessions yet{place}."
    if computed == 1:
        return f"The first one is being computed{place}: it is listed once its reply is there."
    return f"The first ones are being computed{place}: each is listed once a reply of it is there."


def name_of(session: dict[str, Any]) -> str:
    """What to call a session: its name, else its title, else its label."""
    return visible(str(session["name"] or session["title"] or session["label"] or "-"))


def size(nbytes: int | None) -> str:
    """Bytes for a person; none are a dash."""
    return format_size(nbytes) if nbytes else "-"


def duration(seconds: float) -> str:
    """How long something took, to three digits or so."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def reuse(tokens: Mapping[str, int]) -> str:
    """How much of the prompts was not computed; of `prompt_tokens`, `cached_tokens` and
    `restored_tokens`."""
    prompt, cached, restored = (tokens[f"{x}_tokens"] for x in ("prompt", "cached", "restored"))
    share = f" ({cached / prompt:.0%})" if prompt else ""
    disk = f", {restored:,} of them from disk" if restored else ""
    return f"{cached:,} of {prompt:,} prompt tokens{share}{disk}"


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


def print_run_summary(console: Console, figures: Mapping[str, Any], tally: Tally) -> None:
    """Print requests, waiting times, what was reused and the time that this saved.

    `figures` are what `GET /v1/cache` says, of a run that had requests.
    """
    requests, saved = figures["requests"], figures["saved"]
    tokens = {f"{name}_tokens": count for name, count in figures["tokens"].items()}
    kinds = [
        f"{requests[kind]:,} {kind}" for kind in ("cold", "warm", "restored") if requests[kind]
    ]
    waits = [
        f"{duration(times.average)} {kind}"
        for kind, times in tally.first_token.items()
        if times.average is not None
    ]
    lines = [("Requests", f"{requests['total']:,} ({', '.join(kinds)})")]
    if waits:
        lines.append(("First token", f"after {', '.join(waits)}, on average"))
    lines.append(("Reused", reuse(tokens)))
    if saved["tokens"]:
        least = "at least " if saved["tokens"] < tokens["cached_tokens"] else ""
        lines.append(("Time saved", f"{least}{duration(saved['seconds'])}"))
    console.print(Text("\nThis run", "bold"))
    for name, value in lines:
        console.print(f"{name:<12} {value}")
