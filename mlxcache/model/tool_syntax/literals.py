"""Reader of Python and JSON literals, which executes nothing.

Unescaped line ends in strings are accepted. Numbers are those of JSON.
"""

from __future__ import annotations

import re
from typing import Any

from mlxcache.model.tool_syntax.values import loads

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


class LiteralReader:
    """Reader of literals in a text, from left to right.

    `at` is the position of the next character. Methods raise ValueError if the text there is not
    what they read.
    """

    def __init__(self, text: str):
        self._text = text
        self.at = 0
        """Position of the next character."""

    def has(self, symbol: str) -> bool:
        """Skip white space, then read `symbol` if it comes next; return whether it did."""
        self._blank()
        if not self._text.startswith(symbol, self.at):
            return False
        self.at += len(symbol)
        return True

    def take(self, symbol: str) -> None:
        """Skip white space, then read `symbol`. Raises ValueError if it does not come next."""
        if not self.has(symbol):
            raise ValueError(f"{symbol!r} expected at {self._text[self.at : self.at + 40]!r}")

    def value(self, depth: int = 0) -> Any:
        """Skip white space, then read a literal and return its value.

        A literal is a string, a number, a constant such as `True` or `null`, a list, a tuple (its
        value is a list) or an object. `depth`: the number of containers around it, at most 200.
        """
        self._blank()
        first = self._text[self.at : self.at + 1]
        if depth > _DEEPEST:
            raise ValueError("nested too deeply")
        if first in ("'", '"') and first:
            return self._string(first)
        if first == "{":
            return self._object(depth)
        if first in ("[", "(") and first:
            return self._list("]" if first == "[" else ")", depth)
        found = _BARE.match(self._text, self.at)
        if found is None:
            raise ValueError(f"no value at {self._text[self.at : self.at + 40]!r}")
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
                raise ValueError("a key is no string, or occurs twice")
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
            raise ValueError("a string has no end")
        self.at = found.end()
        return _ESCAPE.sub(_unescape, self._text[start : self.at - (3 if triple else 1)])

    def name(self, pattern: re.Pattern[str]) -> str:
        """Read what `pattern` matches from the position `at` on; return the match's first group."""
        found = pattern.match(self._text, self.at)
        if found is None:
            raise ValueError(f"no name at {self._text[self.at : self.at + 40]!r}")
        self.at = found.end()
        return str(found[1])

    def _blank(self) -> None:
        found = _BLANK.match(self._text, self.at)
        self.at = self.at if found is None else found.end()


def _unescape(found: re.Match[str]) -> str:
    """Return the character that an escape sequence stands for; "" for an escaped line end.

    `found`: a match of `_ESCAPE`. Raises ValueError for a number above that of any character.
    """
    body = found[0][1:]
    if body in _SIMPLE:
        return _SIMPLE[body]
    return chr(int(body, 8) if body.isdigit() else int(body[1:], 16))
