"""Syntaxes in which model families write tool calls: the interface of readers, and scanners.

A scanner follows one tool block while it arrives, and tells which closing markers may end it. Its
time is linear in the length of the block, independent of the number of markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Protocol

from mlxcache.model.tool_syntax.arguments import Tools

TAIL = 1_000
"""Characters at the end of a tool block that are examined at a closing marker."""

Call = dict[str, Any]
"""A call as it was read: `name`, `arguments` (a dict, or JSON text), and `id` if there is one."""


class Malformed(ValueError):
    """Error for a text that is no tool call, or that can be read as two different ones."""


class Closing(Enum):
    """Role that a closing marker would have at the end of the text of a tool block so far."""

    INSIDE = auto()
    """The text ends inside a value, so the marker belongs to that value."""
    MAYBE = auto()
    """The text may be complete, or may end inside a value."""
    FINAL = auto()
    """The text is complete, or is no call; more text does not change that."""
    UNKNOWN = auto()
    """Only reading the whole tool block can tell."""


class Scanner(Protocol):
    """Scanner of one tool block while it arrives."""

    def add(self, text: str) -> None: ...

    def closing(self) -> Closing:
        """Return the role that a closing marker would have if it came next."""


class Syntax(Protocol):
    """Reader of a syntax in which a model family writes tool calls."""

    def scanner(self) -> Scanner: ...

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block; the schemas of `tools` decide the types of values.

        Raises Malformed if the text is no call, and the errors of parsers of JSON and of mlx-lm.
        """


class JsonScanner:
    """Scanner that tracks whether the text of a tool block so far ends inside a string.

    `quotes`: the characters that begin and end strings.
    """

    def __init__(self, quotes: str = '"'):
        self._mark = re.compile(rf"\\.|[{quotes}]|\\\Z", re.DOTALL)
        self._quote = ""
        self._escaped = False

    def add(self, text: str) -> None:
        at = int(self._escaped and bool(text))
        if at:
            self._escaped = False
        for found in self._mark.finditer(text, at):
            mark = found[0]
            if mark == "\\":
                self._escaped = True
            elif len(mark) == 1:
                if not self._quote:
                    self._quote = mark
                elif self._quote == mark:
                    self._quote = ""

    def closing(self) -> Closing:
        return Closing.INSIDE if self._quote else Closing.FINAL


def begins_as_json(text: str) -> bool:
    """Return whether a tool block begins like JSON, which some models write instead of tags."""
    return text.lstrip().startswith(("{", "["))


class BlockScanner:
    """Scanner that judges closing markers by the tool block's beginning and end.

    `begins(text)` returns whether a block begins with a call that has parameters, and `ends(tail)`
    whether a block that ends with `tail` may be complete. A block for which `as_json(text)` is true
    is scanned as JSON. The beginning is examined at closing markers, until it is a call with
    parameters or JSON.
    """

    def __init__(
        self,
        begins: Callable[[str], bool],
        ends: Callable[[str], bool],
        as_json: Callable[[str], bool] = begins_as_json,
    ):
        self._begins, self._ends, self._as_json = begins, ends, as_json
        self._parts: list[str] = []
        self._tail = ""
        self._json: JsonScanner | None = None
        self._begun = False

    def add(self, text: str) -> None:
        self._tail = (self._tail + text)[-TAIL:]
        if self._json is not None:
            self._json.add(text)
        elif not self._begun:
            self._parts.append(text)

    def closing(self) -> Closing:
        if not self._begun and not self._begin("".join(self._parts)):
            return Closing.FINAL
        if self._json is not None:
            return self._json.closing()
        return Closing.MAYBE if self._ends(self._tail) else Closing.INSIDE

    def _begin(self, text: str) -> bool:
        if self._as_json(text):
            self._json = JsonScanner()
            self._json.add(text)
        elif not self._begins(text):
            return False
        self._begun = True
        self._parts.clear()
        return True


class ForeignSyntax:
    """Syntax for which only mlx-lm has a parser.

    A tool block ends at the first closing marker before which that parser finds calls.
    """

    def __init__(self, parse: Callable[[str, list[dict[str, Any]]], Any]):
        self._parse = parse

    def scanner(self) -> Scanner:
        return _Unscanned()

    def read(self, text: str, tools: Tools) -> list[Call]:
        parsed = self._parse(text, tools.definitions)
        return parsed if isinstance(parsed, list) else [parsed]


class _Unscanned:
    def add(self, text: str) -> None:
        """Ignore the text, because nothing is known of its syntax."""

    def closing(self) -> Closing:
        return Closing.UNKNOWN


NO_SYNTAX: Syntax = ForeignSyntax(lambda _text, _tools: [])
"""Syntax of replies without tool calls: every tool block is text."""
