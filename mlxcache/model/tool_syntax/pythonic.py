"""Calls as Python writes them: `[NAME(KEY=VALUE, ...), ...]`.

Quotes and line ends in strings are escaped, so there is one reading at most. Lists and objects may
be JSON or Python; raw line ends in strings are accepted. The form is that of the chat templates of
LFM2 and LFM2.5: https://docs.liquid.ai/lfm/key-concepts/tool-use
"""

from __future__ import annotations

import re
from typing import Any

from mlxcache.model.tool_syntax.json_calls import JsonScanner
from mlxcache.model.tool_syntax.schema import Tools
from mlxcache.model.tool_syntax.syntax import Call, Malformed, Scanner
from mlxcache.model.tool_syntax.values import loads

_CALL = re.compile(r"\s*(?P<call>[^\s\[\](),='\"]{1,256})\s*\(\s*")
_KEY = re.compile(r"\s*(?P<key>[^\s\[\](),='\"]{1,256})\s*=\s*")
_BARE = re.compile(r"[\w.+-]+")
_BLANK = re.compile(r"\s*")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ENDS = {q: re.compile(rf"[^\\{q}]*+(?:\\.[^\\{q}]*+)*+{q}", re.DOTALL) for q in "'\""}
_TRIPLE = {q: re.compile(rf"(?:[^\\{q}]++|\\.|{q}(?!{q}{q}))*+{q * 3}", re.DOTALL) for q in "'\""}
_ESCAPE = re.compile(
    r"\\(?:[nrtabfv\\'\"\n]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
)
_SIMPLE = dict(zip("nrtabfv\\'\"\n", "\n\r\t\a\b\f\v\\'\"", strict=False)) | {"\n": ""}
_DEEPEST = 200


class PythonicCalls:
    """The syntax of LFM2."""

    def scanner(self) -> Scanner:
        """Make the scanner of one block."""
        return JsonScanner("'\"")

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a block."""
        reader = _Reader(text)
        reader.take("[")
        calls: list[Call] = []
        while not calls or reader.has(","):
            calls.append(reader.call(tools))
        reader.take("]")
        if text[reader.at :].strip():
            raise Malformed("text follows the calls")
        return calls


class _Reader:
    """Reads from left to right; `at` is the position of what comes next."""

    def __init__(self, text: str):
        self._text = text
        self.at = 0

    def has(self, mark: str) -> bool:
        """Read `mark` if it comes next."""
        self._blank()
        if not self._text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def take(self, mark: str) -> None:
        """Read `mark`. Raises Malformed if something else comes next."""
        if not self.has(mark):
            raise Malformed(f"{mark!r} expected at {self._text[self.at : self.at + 40]!r}")

    def call(self, tools: Tools) -> Call:
        """Read a call."""
        name = self._name(_CALL, "call")
        arguments: dict[str, Any] = {}
        while not self.has(")"):
            if arguments:
                self.take(",")
            key = self._name(_KEY, "key")
            if key in arguments:
                raise Malformed("an argument is given twice")
            start = self.at
            value = self.value()
            parsed = tools[name].check(key, value)
            bare = self._text[start : self.at]
            if not parsed.valid and not isinstance(value, str | dict | list):
                parsed = tools[name].parse(key, bare)
            arguments[key] = parsed.value
        return {"name": name, "arguments": arguments}

    def value(self, depth: int = 0) -> Any:
        """Read a value."""
        self._blank()
        first = self._text[self.at : self.at + 1]
        if depth > _DEEPEST:
            raise Malformed("nested too deeply")
        if first in ("'", '"') and first:
            return self._string(first)
        if first == "{":
            return self._object(depth)
        if first in ("[", "(") and first:
            return self._list("]" if first == "[" else ")", depth)
        found = _BARE.match(self._text, self.at)
        if found is None:
            raise Malformed(f"no value at {self._text[self.at : self.at + 40]!r}")
        self.at = found.end()
        return _WORDS[found[0]] if found[0] in _WORDS else loads(found[0])

    def _object(self, depth: int) -> dict[str, Any]:
        self.at += 1
        value: dict[str, Any] = {}
        while not self.has("}"):
            if value:
                self.take(",")
                if self.has("}"):
                    break
            key = self.value(depth + 1)
            self.take(":")
            if not isinstance(key, str) or key in value:
                raise Malformed("a key is no string, or occurs twice")
            value[key] = self.value(depth + 1)
        return value

    def _list(self, closer: str, depth: int) -> list[Any]:
        self.at += 1
        value: list[Any] = []
        while not self.has(closer):
            if value:
                self.take(",")
                if self.has(closer):
                    break
            value.append(self.value(depth + 1))
        return value

    def _string(self, quote: str) -> str:
        triple = self._text.startswith(quote * 3, self.at)
        start = self.at + (3 if triple else 1)
        found = (_TRIPLE if triple else _ENDS)[quote].match(self._text, start)
        if found is None:
            raise Malformed("a string has no end")
        self.at = found.end()
        return _ESCAPE.sub(_unescape, self._text[start : self.at - (3 if triple else 1)])

    def _name(self, pattern: re.Pattern[str], group: str) -> str:
        found = pattern.match(self._text, self.at)
        if found is None:
            raise Malformed(f"no name at {self._text[self.at : self.at + 40]!r}")
        self.at = found.end()
        return str(found[group])

    def _blank(self) -> None:
        found = _BLANK.match(self._text, self.at)
        self.at = self.at if found is None else found.end()


def _unescape(found: re.Match[str]) -> str:
    """The character that an escape stands for."""
    body = found[0][1:]
    if body in _SIMPLE:
        return _SIMPLE[body]
    return chr(int(body, 8) if body.isdigit() else int(body[1:], 16))
