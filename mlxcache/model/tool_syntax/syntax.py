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
    def add(self, text: str) -> None: ...

    def closing(self) -> Closing:
        """Return the role that a closing marker would have if it came next."""


class Syntax(Protocol):
    """Reader of a syntax in which a model family writes tool calls."""

    def scanner(self) -> Scanner: ...

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block; the schemas of `tools` decide the types of values.

        Raises Malformed if the text is no call, or the errors of parsers of JSON and of mlx-lm.
        """


class JsonScanner:
    """Scanner that tracks whether the text so far ends inside a string between `quotes`."""

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


class ForeignSyntax:
    """Syntax of which only mlx-lm has a parser. Where it finds calls, a tool block may end."""

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
