"""Tool calls in Python's notation: `[NAME(KEY=VALUE, ...), ...]`.

Quotes in strings are escaped, so a tool block has at most one reading. Lists and objects may be
JSON or Python, and unescaped line ends in strings are accepted. The form is that of the chat
templates of LFM2 and LFM2.5: https://docs.liquid.ai/lfm/key-concepts/tool-use
"""

from __future__ import annotations

import re
from typing import Any

from mlxcache.model.tool_syntax.json_calls import JsonScanner
from mlxcache.model.tool_syntax.literals import LiteralReader
from mlxcache.model.tool_syntax.schema import Tools
from mlxcache.model.tool_syntax.syntax import Call, Malformed, Scanner

_CALL = re.compile(r"\s*([^\s\[\](),='\"]{1,256})\s*\(\s*")
_KEY = re.compile(r"\s*([^\s\[\](),='\"]{1,256})\s*=\s*")


class PythonicCalls:
    """Syntax of LFM2's tool calls: `[NAME(KEY=VALUE, ...), ...]`."""

    def scanner(self) -> Scanner:
        """Make a scanner that finds the end of one tool block while it arrives."""
        return JsonScanner("'\"")

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block. Raises ValueError if it is not a list of calls.

        `tools`: the tools of the request. A number or constant of a type that the tool's schema
        does not allow is converted to one that it allows, such as text, if possible.
        """
        reader = LiteralReader(text)
        reader.take("[")
        calls: list[Call] = []
        while not calls or reader.has(","):
            calls.append(_call(reader, text, tools))
        reader.take("]")
        if text[reader.at :].strip():
            raise Malformed("text follows the calls")
        return calls


def _call(reader: LiteralReader, text: str, tools: Tools) -> Call:
    name = reader.name(_CALL)
    arguments: dict[str, Any] = {}
    while not reader.has(")"):
        if arguments:
            reader.take(",")
        key = reader.name(_KEY)
        if key in arguments:
            raise Malformed("an argument is given twice")
        start = reader.at
        value = reader.value()
        parsed = tools[name].check(key, value)
        bare = text[start : reader.at]
        if not parsed.valid and not isinstance(value, str | dict | list):
            parsed = tools[name].parse(key, bare)
        arguments[key] = parsed.value
    return {"name": name, "arguments": arguments}
