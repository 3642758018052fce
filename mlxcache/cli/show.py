"""Printing of command results: tables and sentences for people, JSON for programs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from mlxcache.cli.output import UNSEEN, console, visible
from mlxcache.config import format_size

WARMING = "warm"
"""`api` of a request that computes a prompt ahead of use; in `types` too, which imports numpy."""

_PIPE_WIDTH = 240
"""Width in columns of a table written to a file or a pipe: wide enough that nothing is cut."""

_MIN_CUT_WIDTH = 10

_MIN_GAP_WIDTH = 24
"""If the shortened column would be narrower than this, the gap between columns is 1, not 2."""

_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


def print_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    print(UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a command: `value` for --json, else `text`, a line or a function that prints."""

    value: Any
    text: str | Callable[[], None]
    status: int = 0

    def print(self, *, as_json: bool) -> None:
        if as_json:
            print_json(self.value)
        elif isinstance(self.text, str):
            console().print(self.text)
        else:
            self.text()
        if self.status:
            raise typer.Exit(self.status)


def print_table(
    columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], *, cut: int | None = None
) -> None:
    """Print `rows` under `columns`, each a heading and `left` or `right`.

    Empty headings are omitted. If the terminal is too narrow, only the column with index `cut` is
    shortened, so that ids in the others can be copied.
    """
    cells = ([visible(cell).replace("\n", " ") for cell in row] for row in rows)
    lines = [[heading for heading, _ in columns], *cells]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    terminal = Console()
    room = terminal.width if terminal.is_terminal else _PIPE_WIDTH
    gap, gaps = 2, len(widths) - 1
    if cut is not None:
        left = room - sum(widths) + widths[cut]  # for that column and the gaps
        if left - gap * gaps < min(widths[cut], _MIN_GAP_WIDTH):
            gap = 1
        widths[cut] = min(widths[cut], max(_MIN_CUT_WIDTH, left - gap * gaps))
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


Column = tuple[str, str, Callable[[dict[str, Any]], str]]
"""A heading, `left` or `right`, and a function that returns the cell of an object."""


def print_objects(
    columns: Sequence[Column],
    objects: Iterable[dict[str, Any]],
    *,
    cut: int | None = None,
) -> None:
    rows = ([text(one) for _, _, text in columns] for one in objects)
    print_table([(heading, justify) for heading, justify, _ in columns], rows, cut=cut)


def print_facts(pairs: Iterable[tuple[str, str]]) -> None:
    print_table((("", "left"), ("", "left")), pairs)


def format_guesses(drafted: int, accepted: int, passes: int, saved_s: float) -> str:
    text = f"{accepted:,} of {drafted:,} tokens accepted in {passes:,} passes"
    if saved_s >= 0:
        return f"{text}, {format_duration(saved_s)} saved"
    return f"{text}, {format_duration(-saved_s)} lost"


def format_saved(cached_tokens: int, saved: Mapping[str, Any]) -> str:
    """Format `saved` of `GET /v1/cache`, whose time may be known of fewer tokens than all."""
    least = "at least " if saved["tokens"] < cached_tokens else ""
    return f"{least}{format_duration(saved['seconds'])}"


def no_sessions_text(computing: int, where: str = "") -> str:
    """Return the sentence to print in place of a table of sessions if there are none.

    `computing`: requests that may still become sessions.
    """
    place = f" ({where})" if where else ""
    if not computing:
        return f"There are no sessions yet{place}."
    if computing == 1:
        return f"The first session is being computed{place}. It is listed when its reply is done."
    return (
        f"The first sessions are being computed{place}. Each is listed when its first reply is "
        "done."
    )


def session_name(session: dict[str, Any]) -> str:
    return visible(str(session["name"] or session["title"] or session["label"] or "-"))


def listed_name(session: dict[str, Any]) -> str:
    """Return a session's name, marked if all of its requests were cancelled before a reply."""
    figures = session["figures"]
    mark = "no reply yet: " if figures["requests"] and not figures["generated_tokens"] else ""
    return mark + session_name(session)


def client_name(client: str | None) -> str:
    """Return a client program's short name: `claude` for `claude-cli/2.1.330`, "" for None."""
    return re.split(r"[/ _-]", visible(client or ""))[0].lower()


def has_several_clients(sessions: Iterable[Mapping[str, Any]]) -> bool:
    return len({client_name(one.get("client")) for one in sessions} - {""}) > 1


def has_several_models(sessions: Iterable[Mapping[str, Any]]) -> bool:
    return len({one.get("model") for one in sessions} - {None}) > 1


_UNLOADED_FOR = {
    "idle": "it was idle",
    "memory": "another model needed the memory",
    "asked": "on request",
}


def unloaded_because(model: Mapping[str, Any]) -> str:
    return _UNLOADED_FOR.get(model.get("unloaded_for") or "", "")


def model_state(model: Mapping[str, Any]) -> str:
    """Return the state of a model of `GET /v1/models`: `loading 40%`, `unloaded: it was idle`."""
    state, because = str(model["state"]), unloaded_because(model)
    if state == "never":
        return "not loaded yet"
    if state == "loading" and model.get("progress") is not None:
        return f"loading {model['progress']:.0%}"
    return f"unloaded: {because}" if because and state == "unloaded" else state


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_size_or_dash(nbytes: int | None) -> str:
    return format_size(nbytes) if nbytes else "-"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds: "0.52 s", "12.3 s", "3 min 5 s" or "2 h 10 min"."""
    if seconds < 0.005:
        return "<0.01 s" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_reuse(tokens: Mapping[str, int]) -> str:
    """Format how many prompt tokens were reused; those a cancel left uncomputed do not count."""
    cached, restored, fed = (tokens[f"{x}_tokens"] for x in ("cached", "restored", "fed"))
    prompt = cached + fed
    share = f" ({cached / prompt:.0%})" if prompt else ""
    disk = f", {restored:,} of them from disk" if restored else ""
    return f"{cached:,} of {prompt:,} prompt tokens{share}{disk}"


def format_age(at: float) -> str:
    """Format the time since `at`, in seconds since 1970: "3 h ago"."""
    passed = max(0.0, time.time() - at)
    for seconds, unit in _AGES:
        if passed >= seconds:
            return f"{int(passed // seconds)} {unit} ago"
    return "now"


def format_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
