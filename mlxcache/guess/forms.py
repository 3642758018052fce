"""Tool results in the form in which a reply would write them again.

A result shows a file with line numbers; a reply that edits the file writes it without them, and in
JSON with its line ends escaped. Tokens of the one form are seldom tokens of the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

LEAST_CHARACTERS = 24
"""Shorter results are not worth an entry of their own."""

_NUMBERED = re.compile(
    r"(?P<file>[^\s:]{1,200}[:-])?[ \t]*(?P<line>\d{1,7})(?P<mark>\t|→|: (?! )|:|-| ?\| ?)"
)
"""Start of a line of a numbered file (cat -n, Read) or of a search (grep -n)."""

_FEWEST = 2
"""Lines with ascending numbers that count as numbered."""


def without_line_numbers(text: str) -> str:
    """Return `text` with the line numbers of numbered lines removed.

    Numbered are `_FEWEST` or more lines in a row whose numbers ascend, in one notation. The rest of
    the text stays.
    """
    return "\n".join(line for run in _runs(text.split("\n")) for line in run)


def _runs(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines in runs of numbered lines, stripped of their numbers, and of other lines."""
    run: list[str] = []
    stripped: list[str] = []
    last, name, mark = -1, "", ""
    for line in lines:
        match = _NUMBERED.match(line)
        ascends = match is not None and int(match["line"]) > last >= 0
        if match and ascends and (match["file"] or "") == name and match["mark"][:1] == mark[:1]:
            run.append(line)
            stripped.append(line[match.start("mark") :].removeprefix(mark))
        else:
            yield stripped if len(run) >= _FEWEST else run
            run, stripped = [line], [line[match.end() :] if match else line]
            name, mark = (match["file"] or "", match["mark"]) if match else ("", "")
        last = int(match["line"]) if match else -1
    yield stripped if len(run) >= _FEWEST else run


def reply_form(result: str, *, escaped: bool) -> str | None:
    """Return a tool result as a tool call in a reply would write it; None if it is the same.

    `escaped`: the family's tool calls are JSON. Results of fewer than `LEAST_CHARACTERS` characters
    have no such form.
    """
    if len(result) < LEAST_CHARACTERS:
        return None
    text = without_line_numbers(result)
    if escaped:
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return None if text == result else text


def writes_escaped(shown: Callable[[str], str]) -> bool:
    """Return whether a family writes strings in its tool calls as JSON.

    `shown(value)`: the text of a reply that calls a tool with `value` as argument.
    """
    return "zq\\nzq" in shown("zq\nzq")
