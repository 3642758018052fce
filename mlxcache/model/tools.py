"""Reading of tool blocks into calls that clients can run."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxcache.model.tool_syntax.schema import Tools
from mlxcache.model.tool_syntax.syntax import Call, Closing, Scanner, Syntax
from mlxcache.model.tool_syntax.values import dumps, loads
from mlxcache.types import ToolCall

Parse = Callable[[str, list[dict[str, Any]]], Any]
"""One of mlx-lm's tool parsers: takes the text of a tool block and the tools, returns a dict or a
list of dicts.
"""

# parsers of mlx-lm use json, ast and regular expressions on the model's text, and catch no errors
_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class CallReader:
    """Reader of the tool blocks of one reply. It gives each call an index and an id.

    `syntax`: the syntax of the calls. `tools`: definitions of the request's tools. `calls`: number
    of calls that became part of the reply. `problem`: if the last block that was read gave no
    calls, the reason.
    """

    def __init__(self, syntax: Syntax, tools: Sequence[Mapping[str, Any]]):
        self._syntax = syntax
        self._tools = Tools(tools)
        self._ids: set[str] = set()
        self.calls = 0
        """Number of calls that became part of the reply."""
        self.problem = ""
        """Reason why the last tool block that was read is no call."""

    def scanner(self) -> Scanner:
        """Make a scanner that finds the end of one tool block while it arrives."""
        return self._syntax.scanner()

    def read(self, text: str) -> list[ToolCall]:
        """Read the calls in one tool block; return an empty list if any part is malformed.

        A call of a tool that the request does not have is accepted, because the client reports it
        to the model. If there are no calls, sets `problem` to the reason. The calls are not counted
        before they are passed to `take`.
        """
        self.problem = "it holds no call"
        ids = set(self._ids)
        try:
            found = self._syntax.read(text, self._tools)
            return [_call(raw, self.calls + i, ids) for i, raw in enumerate(found)]
        except _MALFORMED as error:
            self.problem = f"{type(error).__name__}: {str(error)[:200]}"
            return []

    def take(self, calls: Sequence[ToolCall]) -> None:
        """Count calls that become part of the reply, so that later ones get new indices and ids."""
        self.calls += len(calls)
        self._ids.update(call.id for call in calls)


class ForeignSyntax:
    """Syntax for which only mlx-lm has a parser.

    A tool block ends at the first closing marker before which that parser finds calls.
    """

    def __init__(self, parse: Parse):
        self._parse = parse

    def scanner(self) -> Scanner:
        """Make the scanner of one tool block, which leaves all decisions to the parser."""
        return _Unscanned()

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block by mlx-lm's parser, whose errors are raised unchanged."""
        parsed = self._parse(text, tools.definitions)
        return parsed if isinstance(parsed, list) else [parsed]


class NoSyntax:
    """Syntax of replies without tool calls: every tool block is text."""

    def scanner(self) -> Scanner:
        """Make the scanner of one tool block, which leaves all decisions to `read`."""
        return _Unscanned()

    def read(self, _text: str, _tools: Tools) -> list[Call]:
        """Return an empty list: no text is read as a call."""
        return []


class _Unscanned:
    """Scanner for a syntax whose values cannot be recognised while they arrive."""

    def add(self, text: str) -> None:
        """Ignore the text, because nothing is known of its syntax."""

    def closing(self) -> Closing:
        """Return UNKNOWN, so that `read` of the syntax decides where the tool block ends."""
        return Closing.UNKNOWN


def _call(raw: Any, index: int, taken: set[str]) -> ToolCall:
    function = raw.get("function")
    body = function if isinstance(function, dict) else raw
    name = body.get("name", function)
    if not isinstance(name, str) or not name.strip():
        raise ValueError("the call has no name")
    name.encode()  # raises for half a surrogate pair, which cannot be sent
    arguments = _arguments(body.get("arguments", body.get("parameters")))
    given = raw.get("id")
    if not isinstance(given, str) or not given or given in taken:
        given = f"call_{secrets.token_hex(12)}"
    taken.add(given)
    return ToolCall(index=index, id=given, name=name.strip(), arguments=arguments)


def _arguments(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        value = loads(value)
    if value is None or value == "":
        value = {}
    if not isinstance(value, dict):
        raise ValueError("the arguments are not a JSON object")
    return dumps(value)
