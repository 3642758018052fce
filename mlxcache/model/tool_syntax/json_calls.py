"""Tool calls with JSON arguments, as several families and models without a syntax write them.

JSON escapes the characters that end its strings. So a tool block has at most one reading, and a
closing marker inside a string belongs to the string.
"""

from __future__ import annotations

import re
from typing import Any

from mlxcache.model.tool_syntax.schema import Tools
from mlxcache.model.tool_syntax.syntax import Call, Closing, Malformed, Scanner
from mlxcache.model.tool_syntax.values import loads, raw_decode

_BLANK = re.compile(r"\s*")


class JsonScanner:
    """Scanner that tracks whether the text of a tool block so far ends inside a string.

    `quotes`: the characters that begin and end strings.
    """

    def __init__(self, quotes: str = '"'):
        self._mark = re.compile(rf"\\.|[{quotes}]|\\\Z", re.DOTALL)
        self._quote = ""
        self._escaped = False

    def add(self, text: str) -> None:
        """Scan `text`, which continues the tool block."""
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
        """Return the `Closing`: the role that a closing marker would have if it came next."""
        return Closing.INSIDE if self._quote else Closing.FINAL


class JsonCalls:
    """Syntax of calls written as `{"name": ..., "arguments": {...}}`, or a list of these.

    Hermes and Qwen write it. Models whose chat template has no tools are told to write it.
    """

    def scanner(self) -> Scanner:
        """Make a scanner that finds the end of one tool block while it arrives."""
        return JsonScanner()

    def read(self, text: str, _tools: Tools) -> list[Call]:
        """Return the JSON objects in a tool block, one for each call, as the model wrote them.

        Their keys are not checked. Raises ValueError if the text is neither a JSON object nor a
        list of objects.
        """
        parsed: Any = loads(text.strip())
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not all(isinstance(call, dict) for call in calls):
            raise Malformed("a call is not a JSON object")
        return calls


class HeadedCalls:
    """Syntax of calls with a header before their JSON arguments.

    `header`: a regular expression with the group `call` for the tool's name, and optionally the
    group `call_id` for an id that the model gave. `footer`: a regular expression for the text after
    the arguments. `listed`: the tool block may also be a JSON list of calls, as `JsonCalls` reads.
    """

    def __init__(self, header: str, footer: str = "", *, listed: bool = False):
        self._header, self._footer = re.compile(header), re.compile(footer)
        self._listed = listed

    def scanner(self) -> Scanner:
        """Make a scanner that finds the end of one tool block while it arrives."""
        return JsonScanner()

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block.

        Raises ValueError if a header or a footer is missing, or arguments are not JSON.
        """
        at = _skip(text, 0)
        if self._listed and text.startswith("[", at):
            return JsonCalls().read(text, tools)
        calls: list[Call] = []
        while at < len(text) or not calls:
            call, at = self._one(text, at)
            calls.append(call)
        return calls

    def _one(self, text: str, at: int) -> tuple[Call, int]:
        """Read the call that begins at `at`; return it and the position of the text after it.

        White space after the call is skipped. A call without JSON has the arguments {}. Raises
        ValueError if the header or the footer is missing, or the arguments are not JSON.
        """
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
