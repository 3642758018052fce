"""What `mlxcache explain` prints for a person: short, in colour, 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mlxcache.prompt.recent import common_prefix

_WIDTH = 80
_SHOWN = 64
_MOST = 20
"""Findings of an audit that are listed."""

_REASONS = {
    "edited": "history was changed",
    "system_changed": "a system message was changed",
    "tools_changed": "the tools were changed",
    "template_drift": "the same history is rendered differently",
}


def print_pair(found: Mapping[str, Any]) -> None:
    """Two requests: where they part, why, and what to do."""
    out, lost = _console(), found["lost"]
    total = found["prompt_tokens"]["second"]
    if lost is None:
        shared = min(found["shared_tokens"], total)
        out.print(Text("Nothing is lost.", "bold green"))
        out.print(
            f"The second request goes on with the first: {shared:,} tokens are reused, "
            f"{total - shared:,} are new."
        )
    else:
        _print_lost(out, lost, total)
        if found["later"]:
            later = "; ".join(f"{one['where']} ({one['cause']})" for one in found["later"][:5])
            _row(out, "also", Text(later))
    for one in found["removed"]:
        rule = Text.assemble(
            (f"{one['where']}: {one['cause']}, by rule ", ""), (one["rule"], "bold")
        )
        _row(out, "removed", rule)
    if found["without_effect"]:
        _row(out, "no effect", Text(", ".join(found["without_effect"])))
    _counts(out, found)


def _print_lost(out: Console, lost: Mapping[str, Any], total: int) -> None:
    out.print(
        Text.assemble(
            ("Parts", "bold red"),
            f" at token {lost['at_token']:,} of {total:,}: ",
            f"{_REASONS[lost['reason']]}, ",
            (lost["cause"], "bold"),
            ".",
        )
    )
    before, after = _visible(lost["before"]), _visible(lost["after"])
    same = common_prefix(before, after)
    _row(out, "where", Text(lost["where"]))
    most = min(len(before), len(after)) - same
    end = common_prefix(before[::-1][:most], after[::-1][:most])
    _row(out, "before", _marked(before, same, end, "bold red"))
    _row(out, "now", _marked(after, same, end, "bold green"))
    again = f"{lost['lost_tokens']:,} tokens are computed again"
    _row(out, "lost", Text(again if lost["lost_tokens"] else "nothing that comes again"))
    if lost["lost_tokens"]:
        _row(out, "to do", Text(lost["advice"]))


def print_audit(found: Mapping[str, Any]) -> None:
    """One request: what is likely to change, and what stands behind it."""
    out, total = _console(), found["prompt_tokens"]
    data = [one for one in found["data"] if one["rule"] is None]
    removed = [one for one in found["data"] if one["rule"] is not None]
    if not data:
        out.print(Text("Nothing in it looks as if it would change.", "bold green"))
        out.print(f"{total:,} tokens; tools, system text and reminders were looked at.")
        _print_removed(out, removed)
        _counts(out, found)
        return
    things = "1 thing" if len(data) == 1 else f"{len(data)} things"
    out.print(Text.assemble((things, "bold yellow"), f" likely to change in {total:,} tokens:"))
    for one in data[:_MOST]:
        at = "not rendered" if one["at_token"] is None else f"token {one['at_token']:,}"
        out.print(
            Text.assemble(
                (one["cause"], "bold"),
                f"  {one['where']}, line {one['line']}: {at}, ",
                (f"{one['tokens_behind']:,} tokens behind it", "red"),
            )
        )
        _row(out, "", Text(_visible(one["excerpt"])[:_SHOWN], "cyan"))
    if len(data) > _MOST:
        out.print(f"and {len(data) - _MOST} more: --json lists them.")
    for cause in dict.fromkeys(one["cause"] for one in data[:_MOST]):
        advice = next(one["advice"] for one in data if one["cause"] == cause)
        _row(out, "to do", Text.assemble((f"{cause}: ", "bold"), advice))
    _print_removed(out, removed)
    _counts(out, found)


def _print_removed(out: Console, removed: Sequence[Mapping[str, Any]]) -> None:
    for one in removed:
        text = Text.assemble(f"{one['where']}, line {one['line']}, by rule ", (one["rule"], "bold"))
        _row(out, "removed", text)


def _console() -> Console:
    plain = Console(highlight=False, markup=False)
    width = min(_WIDTH, plain.width) if plain.is_terminal else _WIDTH
    return Console(highlight=False, markup=False, width=width)


def _row(out: Console, name: str, text: Text) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=9, no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row(name, text)
    out.print(Padding(table, (0, 0, 0, 1)))


def _marked(text: str, start: int, end: int, style: str) -> Text:
    """A text that differs from another but for `start` characters in front and `end` behind."""
    shown = Text(text)
    shown.stylize(style, start, len(text) - end)
    return shown[: _SHOWN * 2]


def _visible(text: str) -> str:
    """A text on one line, with what is not seen written out."""
    shown = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    shown = shown.replace("\t", "\\t")
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in shown)


def _counts(out: Console, found: Mapping[str, Sequence[Any]]) -> None:
    if found["estimated"]:
        out.print(
            Text(
                "Tokens are the built-in demo's, an estimate: name your model with --model.", "dim"
            )
        )
