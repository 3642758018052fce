"""Tool results in the form in which a reply would write them again.

A tool result shows a file with line numbers. A reply that edits the file writes it without them,
and if the model's tool calls are JSON, with its line ends and quotes escaped. The two forms have
few tokens in common, so guesses need the second one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

LEAST_CHARACTERS = 24
"""Least length of a result that is given a form of its own."""

_NUMBERED = re.compile(
    r"(?P<file>[^\s:]{1,200}?[:-])??[ \t]*L?(?P<line>\d{1,7})(?P<mark>[\t→:-]| ?\|)(?P<rest>.*)",
    re.DOTALL,
)
"""A line of a numbered file, as of `cat -n` or an agent's reading tool, or of `grep -n`."""

_FEWEST = 2
"""Lines with ascending numbers that count as numbered."""

_SPACED = (":", "|")
"""Marks behind which some tools write a space before the line itself."""


def without_line_numbers(text: str) -> str:
    """Return `text` without ascending line numbers in one notation, and file names of `grep`."""
    return "\n".join(line for run in _runs(text.split("\n")) for line in run)


def _runs(lines: list[str]) -> Iterator[list[str]]:
    """Yield all lines in groups, of numbered lines without their numbers or of other lines."""
    run: list[str] = []
    rests: list[str] = []
    last, notation = -1, ("", "")
    for line in lines:
        match = _NUMBERED.match(line)
        number, found = (int(match["line"]), _notation(match)) if match else (-1, ("", ""))
        if match is None or not (number > last >= 0 and found == notation):
            yield _stripped(rests, notation[1]) if len(run) >= _FEWEST else run
            run, rests = [], []
        run.append(line)
        rests.append(match["rest"] if match else line)
        last, notation = number, found
    yield _stripped(rests, notation[1]) if len(run) >= _FEWEST else run


def _notation(match: re.Match[str]) -> tuple[str, str]:
    """Return the file's name, or "", and the mark behind the number, for one numbered line."""
    mark = match["mark"].strip(" ").replace("-", ":")  # grep has "-" around the lines that match
    return (match["file"] or "")[:-1], mark


def _stripped(rests: list[str], mark: str) -> list[str]:
    """Return the rests of numbered lines, without the space that some tools write before each.

    A tool wrote such a space if its notation is one that may have it, every line begins with a
    space, and the smallest indentation is odd, because that of code is even.
    """
    indents = [len(rest) - len(rest.lstrip(" ")) for rest in rests if rest.strip()]
    spaced = mark in _SPACED and bool(indents) and min(indents) % 2 == 1
    return [rest[1:] if spaced and rest.startswith(" ") else rest for rest in rests]


def unwrapped(result: str) -> str:
    """Return the long texts within a tool result that is JSON, in lines; else `result`."""
    if result[:1] not in ("{", "["):
        return result
    try:
        texts = list(_texts(json.loads(result)))
    except (ValueError, RecursionError):
        return result
    long = [text for text in texts if len(text) >= LEAST_CHARACTERS]
    return "\n".join(long) or result


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def reply_form(result: str, *, escaped: bool) -> str | None:
    """Return a tool result as a tool call in a reply would write it; None if it is the same."""
    if len(result) < LEAST_CHARACTERS:
        return None
    text = without_line_numbers(unwrapped(result))
    if escaped:
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return None if text == result else text


def writes_escaped(shown: Callable[[str], str]) -> bool:
    """Return whether a model writes strings in its tool calls as JSON."""
    return "zq\\nzq" in shown("zq\nzq")
