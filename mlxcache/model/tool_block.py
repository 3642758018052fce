"""One tool block of a reply while it arrives: the positions at which it may end, and its calls.

The marker that closes a block may also occur in an argument, spelled out or as a token. One after
which the block may be complete is an *end*, but the block waits for the text that follows: white
space and then another call, or the end of the reply, confirm the end. Any other text may continue
the argument. If several ends leave a block that can be read, the last of them counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.model.markers import NORMAL, REASONING, Markers
from mlxcache.model.tool_syntax.arguments import Tools, dumps, loads
from mlxcache.model.tool_syntax.reading import Closing, Syntax
from mlxcache.types import ToolCall

LOOK_ON = 8_000  # characters after a complete call that are searched for another end
_MOST_TRIED = 8  # ends of a block at which it is read, so that a long block takes linear time
_SHOWN = 64  # characters that tell if a marker follows

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

    `problem`: why the last tool block that was read is no call.
    """

    def __init__(self, syntax: Syntax, tools: Sequence[Mapping[str, Any]]):
        self.syntax = syntax
        self._tools = Tools(tools)
        self._ids: set[str] = set()
        self.calls = 0
        self.problem = ""

    def read(self, text: str) -> list[ToolCall]:
        """Read the calls in one tool block; return an empty list if any part is malformed.

        A call of a tool that the request does not have is accepted, because the client reports it
        to the model. The calls are not counted before they are passed to `take`.
        """
        self.problem = "it holds no call"
        ids = set(self._ids)
        try:
            found = self.syntax.read(text, self._tools)
            return [_call(raw, self.calls + i, ids) for i, raw in enumerate(found)]
        except _MALFORMED as error:
            self.problem = f"{type(error).__name__}: {str(error)[:200]}"
            return []

    def take(self, calls: Sequence[ToolCall]) -> None:
        self.calls += len(calls)
        self._ids.update(call.id for call in calls)


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


@dataclass(frozen=True, slots=True)
class End:
    """A closing marker at [body, after) of a tool block, after which it may be complete.

    `target`: the parser's state after it. Not `clean`: it may close an opening marker inside the
    block instead, which has no other closing marker.
    """

    body: int
    after: int
    target: str
    clean: bool


Ended = tuple[End, list[ToolCall]]


class ToolBlock:
    """A tool block that began while the parser was in the state `source`.

    `opening`: the marker that opened the block, as the model wrote it, with the message header
    before it if the format has one. `first`: the length of the text up to the end of the first
    closing marker, also inside a value.
    """

    def __init__(self, reader: CallReader, markers: Markers, opening: str, source: str):
        self.opening, self.source = opening, source
        self.first: int | None = None
        self._reader, self._scanner = reader, reader.syntax.scanner()
        self._head = opening if markers.whole else ""
        self._marker = markers.opening
        thinking = [m for m, to in markers.edges[NORMAL].items() if to == REASONING]
        self._confirming = tuple(m for m in (self._marker, *thinking) if m)
        self._parts: list[str] = []
        self._size = 0
        self._run: list[str] = []
        self._depth = 0
        self._ends: list[End] = []
        self._next, self._beyond, self._judged = "", 0, False
        self._scanner.add(self._head)

    @property
    def text(self) -> str:
        """Text of the tool block so far, without the marker that opened it."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def add(self, text: str) -> None:
        self._scanner.add(text)
        self._parts.append(text)
        self._run.append(text)
        self._size += len(text)
        if self._ends:
            self._beyond += len(text)
            if len(self._next) < _SHOWN:
                self._next = (self._next + text).lstrip()[:_SHOWN]

    def closing(self) -> Closing:
        return self._scanner.closing()

    def close(self, marker: str, target: str, verdict: Closing) -> None:
        """Append a closing marker, as a possible end unless its role `verdict` is INSIDE."""
        clean = self._count_markers()
        body = self._size
        self.add(marker)
        self._run.clear()
        self.first = self._size if self.first is None else self.first
        if verdict is not Closing.INSIDE:
            self._ends.append(End(body, self._size, target, clean))
            self._next, self._beyond, self._judged = "", 0, False

    def _count_markers(self) -> bool:
        """Pair the next closing marker with an opening one inside; return True if there is none."""
        self._depth += "".join(self._run).count(self._marker) if self._marker else 0
        if not self._depth:
            return True
        self._depth -= 1
        return False

    def _is_confirmed(self) -> bool:
        return any(self._next.startswith(marker) for marker in self._confirming)

    def goes_on(self) -> bool:
        begun = any(marker.startswith(self._next) for marker in ("", *self._confirming))
        return not begun and not self._is_confirmed()

    def confirmed(self) -> Ended | None:
        """Return the end of the tool block once later text confirms it, with the calls before it.

        A marker of another call or of thinking does, after white space. After `LOOK_ON` characters
        of other text the best end counts; if none can be read, all ends so far are discarded.
        """
        if not self._ends or self._judged:
            return None
        if self._is_confirmed():
            self._judged = True
            last = self._ends[-1]
            if last.clean and len(self._ends) <= _MOST_TRIED and (calls := self._before(last)):
                return last, calls
        elif self._beyond > LOOK_ON and self.goes_on():
            if found := self._best():
                return found
            self._ends.clear()
        return None

    def finished(self, target: str, *, complete: bool) -> Ended | None:
        """Choose the end of the tool block that is open when the reply ends.

        `complete`: it may also end where the reply does; `target` is the parser's state then. Else
        calls are read only if nothing but a confirming marker follows the last possible end: other
        text may belong to an argument that was cut off.
        """
        ended = bool(self._ends) and not self.goes_on()
        if not complete:
            return self._best() if ended else None
        if not ended and (self.first is None or self.closing() is not Closing.INSIDE):
            self.close("", target, Closing.MAYBE)
        return self._best()

    def _best(self) -> Ended | None:
        """Return the last end at which the tool block can be read, with the calls before it.

        The newest 8 clean ends (see `End`) are tried first, the last one first. If none of them can
        be read:

        - If the block's first closing marker is an end, only that end is tried.
        - Otherwise the newest 8 of all ends are tried, the last one first. One of them counts only
          if the text after the last opening marker before it is not a call of its own.
        """
        clean = [end for end in self._ends if end.clean][-_MOST_TRIED:]
        for end in reversed(clean):
            if calls := self._before(end):
                return end, calls
        if self._ends and self._ends[0].after == self.first:
            calls = self._before(self._ends[0])
            return (self._ends[0], calls) if calls else None
        for end in reversed(self._ends[-_MOST_TRIED:]):
            opened = self.text.rfind(self._marker, 0, end.body) + len(self._marker)
            own = self._reader.read(self.text[opened : end.body])
            if not own and (calls := self._before(end)):
                return end, calls
        return None

    def _before(self, end: End) -> list[ToolCall]:
        return self._reader.read(self._head + self.text[: end.body])

    def calls(self) -> list[ToolCall]:
        return self._reader.read(self._head + self.text)

    def split(self, after: int | None) -> tuple[str, str]:
        after = self._size if after is None else after
        return self.opening + self.text[:after], self.text[after:]
