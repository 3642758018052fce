"""Tool calls whose parameters are between tags, as text or as JSON.

A string is written without quotes or escapes; any other value is JSON. So a string may contain the
tags themselves, and the text after a closing tag decides where the string ends: see `readings`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mlxcache.model.tool_syntax.json_calls import JsonCalls
from mlxcache.model.tool_syntax.readings import Block, Cut, Tag
from mlxcache.model.tool_syntax.scanning import BlockScanner, begins_as_json
from mlxcache.model.tool_syntax.schema import Parsed, Tool, Tools
from mlxcache.model.tool_syntax.syntax import Call, Malformed, Scanner
from mlxcache.model.tool_syntax.values import loads

BLANK = r"\s*"
CDATA, CDATA_END = "<![CDATA[", "]]>"


class TagSyntax:
    """Syntax of a family with tags, given as regular expressions that match in bounded time.

    `call` opens a call, with the group `call` for its name. `parameter` opens a parameter, with the
    group `name`, and the group `hint` if the model writes the type. `close` (a plain text) closes a
    parameter. `end` closes a call; it is empty if the tool block's own marker does so. `blank` may
    occur between tags. `several`: a block may have several calls. `wrap`: the text that the
    template adds at both ends of a value. `cdata`: values with markup are written as
    `<![CDATA[...]]>`. `unescape` reverts the template's escaping of names.
    """

    def __init__(
        self,
        *,
        call: str,
        parameter: str,
        close: str,
        end: str = "",
        blank: str = BLANK,
        several: bool = False,
        wrap: str = "",
        cdata: bool = False,
        unescape: Callable[[str], str] = str,
    ):
        self._call, self._parameter = re.compile(call), re.compile(parameter)
        self._close, self._blank, self._end = close, re.compile(blank), re.compile(end)
        self._tag = re.compile(f"(?P<close>{re.escape(close)})|{parameter}")
        self._several = several
        self._wrap, self._cdata, self._unescape = wrap, cdata, unescape

    def scanner(self) -> Scanner:
        """Make a scanner that finds the end of one tool block while it arrives."""
        return BlockScanner(self.begins, self.ends)

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block, which may also be written as JSON.

        Raises Malformed if there are none or if it cannot be decided which are meant, and
        ValueError for wrong JSON.
        """
        if begins_as_json(text):
            return JsonCalls().read(text, tools)
        head = self._head(text)
        if head is None:
            raise Malformed("the block does not begin with a call")
        if head.name is None:
            return [{"name": name, "arguments": {}} for name in head.calls]
        cuts: list[Cut] = []
        tags: list[Tag] = []
        for found in self._tag.finditer(text, head.start):
            closes = found["close"] is not None
            tags.append(Tag(found.start(), not closes))
            if closes and (cut := self._follow(text, found.start(), found.end())):
                cuts.append(cut)

        def whole(start: int, end: int) -> bool:
            opened = self._cdata and text.startswith(CDATA, start)
            return not opened or text.endswith(CDATA_END, start + len(CDATA), end)

        return Block(text, head, cuts, tags, whole).read(tools, self._convert)

    def begins(self, text: str) -> bool:
        """Return whether a tool block begins with a call that has parameters."""
        head = self._head(text)
        return head is not None and head.name is not None

    def _head(self, text: str) -> Cut | None:
        """Return the cut at the beginning of a tool block, or None if no call begins there.

        A cut is a place where one value may end and the next may begin; no value ends at this one.
        It has the name of the first parameter, and those of the calls that begin before it.
        """
        return self._opened(text, 0, self._skip(text, 0), ())

    def ends(self, tail: str) -> bool:
        """Return whether a tool block that ends with `tail` may be complete."""
        at = tail.rfind(self._close)
        found = self._follow(tail, at, at + len(self._close)) if at >= 0 else None
        return found is not None and found.name is None

    def _follow(self, text: str, end: int, at: int) -> Cut | None:
        """Return the cut at the closing tag of a parameter, or None if the text goes on otherwise.

        After the tag must come a parameter, or the end of the call. The tag is at positions
        [end, at) of `text`. A cut is a place where one value may end and the next may begin.
        """
        at = self._skip(text, at)
        if found := self._parameter.match(text, at):
            return self._cut(end, found, ())
        return self._closed(text, end, at, ())

    def _closed(self, text: str, end: int, at: int, calls: tuple[str, ...]) -> Cut | None:
        """Return the cut at the end of a call, or None if no closing tag of a call is at `at`.

        A cut is a place where one value may end and the next may begin; what stands between the two
        values, such as the tags of calls, belongs to it. `end`: position in `text` at which the
        last value ended, with which the cut begins. `calls`: names of calls that were opened
        between `end` and `at`; they have no parameters.
        """
        found = self._end.match(text, at)
        if found is None:
            return None
        at = self._skip(text, found.end())
        if at == len(text):
            return Cut(end, at, None, calls)
        return self._opened(text, end, at, calls) if self._several else None

    def _opened(self, text: str, end: int, at: int, calls: tuple[str, ...]) -> Cut | None:
        """Return the cut at the beginning of one or more calls, or None if none begins at `at`.

        A cut is a place where one value may end and the next may begin; what stands between the two
        values, such as the tags of calls, belongs to it. `end`: position in `text` at which the
        last value ended, with which the cut begins. `calls`: names of calls that were opened
        between `end` and `at`; they have no parameters.
        """
        while found := self._call.match(text, at):
            calls = (*calls, self._unescape(found["call"]).strip())
            at = self._skip(text, found.end())
            if parameter := self._parameter.match(text, at):
                return self._cut(end, parameter, calls)
            ended = self._end.match(text, at)
            if ended is None:
                return None
            at = self._skip(text, ended.end())
            if at == len(text):
                return Cut(end, at, None, calls)
            if not self._several:
                return None
        return None

    def _cut(self, end: int, found: re.Match[str], calls: tuple[str, ...]) -> Cut:
        hint = found["hint"] if "hint" in found.re.groupindex else None
        return Cut(end, found.end(), self._unescape(found["name"]).strip(), calls, hint or "")

    def _skip(self, text: str, at: int) -> int:
        found = self._blank.match(text, at)
        return at if found is None else found.end()

    def _convert(self, tool: Tool, cut: Cut, text: str) -> Parsed:
        return tool.parse(str(cut.name), self._clean(text), cut.hint)

    def _clean(self, text: str) -> str:
        """Return a value without the text or CDATA marks that the template puts around it."""
        if self._cdata and text.startswith(CDATA) and text.endswith(CDATA_END):
            return text[len(CDATA) : -len(CDATA_END)]
        return text.removeprefix(self._wrap).removesuffix(self._wrap)


class NamedCalls(TagSyntax):
    """Syntax in which the bare name of the tool comes before the tags of its parameters.

    The name may also be alone, or be followed by JSON.
    """

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the call in a tool block. Raises Malformed or ValueError if there is none."""
        name, _, rest = text.strip().partition("{")
        if (name := name.strip()) not in tools or self.begins(text):
            calls = super().read(text, tools)
            if not calls[0].get("arguments") and str(calls[0].get("name")) not in tools:
                raise Malformed("the block names no tool")
            return calls
        return [{"name": name, "arguments": loads("{" + rest) if rest else {}}]
