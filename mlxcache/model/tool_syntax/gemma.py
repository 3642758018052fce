"""Gemma's tool calls: `call:NAME{KEY:VALUE,...}`, with delimiters of their own around strings.

Strings are written unescaped between two delimiters, also in lists and objects. Keys have no
delimiters unless a template adds them. The form is that of `format_argument` in the chat templates
of FunctionGemma (delimiter `<escape>`) and Gemma 4 (delimiter `<|"|>`).
"""

from __future__ import annotations

import re
from typing import Any

from mlxcache.model.tool_syntax.readings import Block, Cut
from mlxcache.model.tool_syntax.scanning import BlockScanner
from mlxcache.model.tool_syntax.schema import Parsed, Tool, Tools
from mlxcache.model.tool_syntax.syntax import Call, Malformed, Scanner
from mlxcache.model.tool_syntax.values import loads

_BARE = re.compile(r"[^,{}\[\]]*")
_CLOSERS = re.compile(r"[\s\]}]*")
_WORDS = {"None": None, "True": True, "False": False}


class GemmaSyntax:
    """Syntax of one of Gemma's formats. `delimiter` is the text before and after each string."""

    def __init__(self, delimiter: str):
        mark = re.escape(delimiter)
        key = rf"(?:{mark})?(?P<key>[^\s:,{{}}\[\]<>]{{1,256}})(?:{mark})?:"
        self._delimiter = delimiter
        self._key = re.compile(rf"\s*{key}")
        self._call = re.compile(r"\s*+(?:,\s*+)?call:(?P<call>[^\s:,{}\[\]<>]{1,256})\s*\{")
        self._place = re.compile(rf",{self._key.pattern}|\}}")
        self._over = re.compile(r"\s*\}\s*")
        self._ending = re.compile(rf"(?:{mark}|[\]}}\w.+-])\s*\}}\s*\Z")

    def scanner(self) -> Scanner:
        """Make a scanner that finds the end of one tool block while it arrives."""
        return BlockScanner(self._begins, lambda tail: self._ending.search(tail) is not None)

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block. Raises Malformed or ValueError if it cannot be read.

        `tools`: the tools of the request, whose schemas decide the types of values, and which of
        several possible readings is right.
        """
        head = self._opened(text, 0, 0, ())
        if head is None:
            raise Malformed("the block does not begin with a call")
        if head.name is None:
            return [{"name": name, "arguments": {}} for name in head.calls]
        cuts = []
        for found in self._place.finditer(text, head.start):
            if found["key"] is not None:
                cuts.append(Cut(found.start(), found.end(), found["key"]))
            elif cut := self._closed(text, found.start(), ()):
                cuts.append(cut)
        ends: dict[int, int] = {}

        def whole(start: int, end: int) -> bool:
            if start not in ends:
                ends[start] = self._end_of_container(text, start)
            return self._whole(text, start, end, ends[start])

        return Block(text, head, cuts, whole=whole).read(tools, self._convert)

    def _begins(self, text: str) -> bool:
        """Return whether a tool block begins with a call that has parameters."""
        head = self._opened(text, 0, 0, ())
        return head is not None and head.name is not None

    def _opened(self, text: str, end: int, at: int, calls: tuple[str, ...]) -> Cut | None:
        """Return the cut from the last value before `at` to the first value of the calls at `at`.

        A cut is a place where one value may end and the next may begin. Calls without parameters
        have no values: the cut goes over them, to the next call with parameters or to the end of
        the block. Returns None if no call begins at `at`, or if other text follows such a call.
        `end`: the end position of the last value. `calls`: names of tools called without parameters
        between `end` and `at`.
        """
        while found := self._call.match(text, at):
            calls = (*calls, found["call"])
            if key := self._key.match(text, found.end()):
                return Cut(end, key.end(), key["key"], calls)
            over = self._over.match(text, found.end())
            if over is None:
                return None
            if over.end() == len(text):
                return Cut(end, len(text), None, calls)
            at = over.end()
        return None

    def _closed(self, text: str, end: int, calls: tuple[str, ...]) -> Cut | None:
        """Return the cut at the end of a call.

        A cut is a place where one value may end and the next may begin. Returns None if neither
        another call nor the end of the block follows. `end`: position of the bracket that ends the
        call, which is also the end of its last value. `calls`: names of tools to put first in the
        cut's `calls`.
        """
        at = end + 1
        if not text[at : at + 400].strip() and not text[at:].strip():
            return Cut(end, len(text), None, calls)
        return self._opened(text, end, at, calls)

    def _end_of_container(self, text: str, start: int) -> int:
        """Return the end position of the object or list that begins at `start`.

        White space may be between `start` and its bracket. Returns -1 if no object or list begins
        there, and 0 if one does but is malformed or incomplete.
        """
        if not text[start : start + 400].lstrip().startswith(("{", "[")):
            return -1
        try:
            return _Reader(text, self._delimiter).read(start)[1]
        except (Malformed, ValueError):
            return 0

    def _whole(self, text: str, start: int, end: int, container: int) -> bool:
        """Return whether characters [start, end) of `text` can be one whole value.

        `container`: the result of `_end_of_container` for `start`.
        """
        if container >= 0:
            return container <= end < container + 400 and not text[container:end].strip()
        value = text[start:end] if end - start < 400 else text[start : start + 200]
        if not value.lstrip().startswith(self._delimiter):
            return self._delimiter not in value
        while end > start and text[end - 1].isspace():
            end -= 1
        first = text.find(self._delimiter, start) + len(self._delimiter)
        return text.endswith(self._delimiter, first, end)

    def _convert(self, tool: Tool, cut: Cut, text: str) -> Parsed:
        name, mark = str(cut.name), self._delimiter
        value = text.strip()
        if value.startswith(mark):
            inner = value[len(mark) : -len(mark)]
            parsed = tool.parse(name, inner, "string")
            return parsed if parsed.valid else tool.parse(name, inner)
        if value.startswith(("{", "[")):
            return tool.check(name, _Reader(value, mark).read(0)[0])
        return tool.parse(name, "null" if value == "None" else value)


class _Reader:
    """Reader of an object or a list in Gemma's notation, from left to right.

    `delimiter`: the text before and after each string. A string may contain it, and ends at the
    first delimiter that valid text follows: brackets that close open objects and lists, then a
    comma and another item, or the end.
    """

    def __init__(self, text: str, delimiter: str):
        self._text = text
        self._mark = delimiter
        self._stack: list[Any] = []
        self._keys: list[str] = []
        mark = re.escape(delimiter)
        self._key = re.compile(rf"\s*(?:{mark})?([^\s:,{{}}\[\]<>]{{1,256}})(?:{mark})?\s*:\s*")
        self._item = re.compile(rf"\s*(?:{mark}|[\[{{\w.+-])")
        self._blank = re.compile(r"\s*")

    def read(self, at: int) -> tuple[Any, int]:
        """Read the value at position `at`; return it and the position of its end.

        Raises Malformed if no complete value begins there.
        """
        at = self._skip(at)
        while True:
            value, at = self._value(at)
            while value is not _OPEN:
                if not self._stack:
                    return value, at
                self._put(value)
                at = self._skip(at)
                if self._text.startswith(",", at):
                    at = self._skip(at + 1)
                    break
                value, at = self._close(at)
            if self._stack and isinstance(self._stack[-1], dict) and not self._empty_next(at):
                at = self._read_key(at)

    def _value(self, at: int) -> tuple[Any, int]:
        """Read a string or an unquoted value at position `at`, or open an object or list there.

        Returns the value and the position after it. If a container is opened that is not empty,
        `_OPEN` stands in place of the value, and the position is that of its content.
        """
        text = self._text
        if text.startswith(self._mark, at):
            end = self._string_end(at + len(self._mark))
            return text[at + len(self._mark) : end], end + len(self._mark)
        if text.startswith(("{", "["), at):
            self._stack.append({} if text[at] == "{" else [])
            after = self._skip(at + 1)
            return (_OPEN, after) if not self._empty_next(after) else self._close(after)
        found = _BARE.match(text, at)
        bare = found[0].strip() if found else ""
        if not bare:
            raise Malformed("a value is missing")
        value = _WORDS[bare] if bare in _WORDS else loads(bare)
        return value, at + len(found[0] if found else "")

    def _empty_next(self, at: int) -> bool:
        closer = "}" if isinstance(self._stack[-1], dict) else "]"
        return not self._stack[-1] and self._text.startswith(closer, at)

    def _read_key(self, at: int) -> int:
        found = self._key.match(self._text, at)
        if found is None or found[1] in self._stack[-1]:
            raise Malformed("an object has no key, or one twice")
        self._keys.append(found[1])
        return found.end()

    def _put(self, value: Any) -> None:
        container = self._stack[-1]
        if isinstance(container, dict):
            container[self._keys.pop()] = value
        else:
            container.append(value)

    def _close(self, at: int) -> tuple[Any, int]:
        """Close the innermost open object or list with the bracket at position `at`.

        Returns its value and the position after the bracket. Raises Malformed for another bracket.
        """
        container = self._stack.pop()
        if not self._text.startswith("}" if isinstance(container, dict) else "]", at):
            raise Malformed("a list or an object has no end")
        return container, at + 1

    def _string_end(self, at: int) -> int:
        """Return the position of the delimiter that ends a string.

        `at`: the position of the string's first character. Raises Malformed if no delimiter from
        there on can end it.
        """
        while (at := self._text.find(self._mark, at)) >= 0:
            if self._can_follow(at + len(self._mark)):
                return at
            at += 1
        raise Malformed("a string has no end")

    def _can_follow(self, at: int) -> bool:
        """Return whether the text at `at` can follow a string in the objects and lists now open."""
        depth = len(self._stack)
        at = self._skip(at)
        while depth and self._text.startswith(("]", "}"), at):
            closer = "}" if isinstance(self._stack[depth - 1], dict) else "]"
            if not self._text.startswith(closer, at):
                return False
            depth -= 1
            at = self._skip(at + 1)
        if not self._text.startswith(",", at):
            return depth == 0 and (at == len(self._text) or self._text.startswith("}", at))
        if depth and isinstance(self._stack[depth - 1], list):
            return self._item.match(self._text, at + 1) is not None
        return self._key.match(self._text, at + 1) is not None

    def _skip(self, at: int) -> int:
        found = self._blank.match(self._text, at)
        return at if found is None else found.end()


_OPEN: Any = object()
"""Value of a container that was opened and is not read yet."""
