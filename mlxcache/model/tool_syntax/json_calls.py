"""Calls whose arguments are JSON: of several families, and of models that are told a format.

JSON escapes what ends its strings, so there is one reading at most, and a closing marker within a
string is part of it.
"""

from __future__ import annotations

import re
from typing import Any

from mlxcache.model.tool_syntax.schema import Tools
from mlxcache.model.tool_syntax.syntax import Call, Closing, Malformed, Scanner
from mlxcache.model.tool_syntax.values import loads, raw_decode

_BLANK = re.compile(r"\s*")


class JsonScanner:
    """Knows if a block ends within a string. `quotes`: the characters that begin and end one."""

    def __init__(self, quotes: str = '"'):
        self._mark = re.compile(rf"\\.|[{quotes}]|\\\Z", re.DOTALL)
        self._quote = ""
        self._escaped = False

    def add(self, text: str) -> None:
        """Add text to the block."""
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
        """Judge a closing marker that follows the text added so far."""
        return Closing.INSIDE if self._quote else Closing.FINAL


class JsonCalls:
    """`{"name": ..., "arguments": {...}}`, or a list of these.

    Hermes and Qwen write it, and models whose template has no tools are told to.
    """

    def scanner(self) -> Scanner:
        """Make the scanner of one block."""
        return JsonScanner()

    def read(self, text: str, _tools: Tools) -> list[Call]:
        """Read the calls in a block."""
        parsed: Any = loads(text.strip())
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not all(isinstance(call, dict) for call in calls):
            raise Malformed("a call is not a JSON object")
        return calls


class HeadedCalls:
    """Calls that begin with a header, which `header` matches with the group `call`.

    A header is followed by the arguments in JSON, and then by text that `footer` matches. `call_id`
    in a header is the id that the model gave. `listed`: the block may be a JSON list of calls too.
    """

    def __init__(self, header: str, footer: str = "", *, listed: bool = False):
        self._header, self._footer = re.compile(header), re.compile(footer)
        self._listed = listed

    def scanner(self) -> Scanner:
        """Make the scanner of one block."""
        return JsonScanner()

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a block."""
        at = _skip(text, 0)
        if self._listed and text.startswith("[", at):
            return JsonCalls().read(text, tools)
        calls: list[Call] = []
        while at < len(text) or not calls:
            call, at = self._one(text, at)
            calls.append(call)
        return calls

    def _one(self, text: str, at: int) -> tuple[Call, int]:
        header = self._header.match(text, at)
        if header is None:
            raise Malformed(f"no call begins with {text[at : at + 40]!r}")
        at = _skip(text, header.end())
        arguments: Any = {}
        if at < len(text) and self._footer.fullmatch(text, at) is None:
            arguments, at = raw_decode(text, at)
        footer = self._footer.match(text, _skip(text, at))
        if footer is None:
            raise Malformed("a call has no end")
        call = {"name": header["call"], "arguments": arguments}
        if "call_id" in header.re.groupindex:
            call["id"] = header["call_id"]
        return call, _skip(text, footer.end())


def _skip(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return at if found is None else found.end()
