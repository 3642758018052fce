"""Gemma's tool calls: `call:NAME{KEY:VALUE,...}`, with delimiters of their own around strings.

Strings are written unescaped between two delimiters, also in lists and objects. Keys have no
delimiters unless a template adds them. The form is that of `format_argument` in the chat templates
of FunctionGemma (delimiter `<escape>`) and Gemma 4 (delimiter `<|"|>`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from mlxcache.model.json_schema import Node, Schema, item_schemas, kind, listed_values
from mlxcache.model.lark import Lark, literal, one_of, repeated
from mlxcache.model.tool_syntax.arguments import (
    DEEPEST_LITERAL,
    LiteralReader,
    Tool,
    loads,
    skip,
)
from mlxcache.model.tool_syntax.reading import Cut, Malformed, Tag, UnescapedCalls, Whole
from mlxcache.model.tool_syntax.writing import (
    Plain,
    Signature,
    Unwritable,
    alternatives,
    is_free,
    members_of,
    object_shapes,
    of_kinds,
    separated,
    text_terminal,
)

_BARE = re.compile(r"[^,{}\[\]]*")
_WORDS = {"None": None, "True": True, "False": False}

# reading


class GemmaSyntax(UnescapedCalls):
    def __init__(self, delimiter: str):
        mark = re.escape(delimiter)
        key = rf"\s*(?:{mark})?(?P<name>[^\s:,{{}}\[\]<>]{{1,256}})(?:{mark})?:"
        call = r"(?:,\s*+)?call:(?P<call>[^\s:,{}\[\]<>]{1,256})\s*\{"
        super().__init__(call=call, parameter=key, end=r"\}")
        self._delimiter = delimiter
        self._place = re.compile(rf",{key}|\}}")
        self._ending = re.compile(rf"(?:{mark}|[\]}}\w.+-])\s*\}}\s*\Z")

    def ends(self, tail: str) -> bool:
        return self._ending.search(tail) is not None

    def _cuts(self, text: str, start: int) -> tuple[list[Cut], list[Tag]]:
        cuts = []
        for found in self._place.finditer(text, start):
            if found["name"] is not None:
                cuts.append(self._cut(found.start(), found))
            elif cut := self._closed(text, found.start(), found.end()):
                cuts.append(cut)
        return cuts, []

    def _whole(self, text: str) -> Whole:
        ends: dict[int, int] = {}

        def whole(start: int, end: int) -> bool:
            if start not in ends:
                ends[start] = self._end_of_container(text, start)
            return self._is_value(text, start, end, ends[start])

        return whole

    def _end_of_container(self, text: str, start: int) -> int:
        """Return the end of the object or list at `start`; -1 for none, 0 for a malformed one."""
        if not text[start : start + 400].lstrip().startswith(("{", "[")):
            return -1
        try:
            reader = _Reader(text, self._delimiter, start)
            reader.value()
        except ValueError:
            return 0
        return reader.at

    def _is_value(self, text: str, start: int, end: int, container: int) -> bool:
        if container >= 0:
            return container <= end < container + 400 and not text[container:end].strip()
        value = text[start:end] if end - start < 400 else text[start : start + 200]
        if not value.lstrip().startswith(self._delimiter):
            return self._delimiter not in value
        while end > start and text[end - 1].isspace():
            end -= 1
        first = text.find(self._delimiter, start) + len(self._delimiter)
        return text.endswith(self._delimiter, first, end)

    def _convert(self, tool: Tool, cut: Cut, text: str) -> tuple[Any, bool]:
        name, mark = str(cut.name), self._delimiter
        value = text.strip()
        if value.startswith(mark):
            inner = value[len(mark) : -len(mark)]
            parsed = tool.parse(name, inner, "string")
            return parsed if parsed[1] else tool.parse(name, inner)
        if value.startswith(("{", "[")):
            read = _Reader(value, mark).value()
            return read, tool.fits(name, read)
        return tool.parse(name, "null" if value == "None" else value)


class _Reader(LiteralReader):
    """Reader of a value in Gemma's notation.

    A string may contain the delimiter, and ends at the first one that valid text follows: brackets
    that close open objects and lists, then a comma and another item, or the end.
    """

    def __init__(self, text: str, delimiter: str, at: int = 0):
        super().__init__(text)
        self.at = at
        self._mark = delimiter
        self._open: list[str] = []  # the brackets that will close objects and lists
        mark = re.escape(delimiter)
        self._key = re.compile(rf"\s*(?:{mark})?([^\s:,{{}}\[\]<>]{{1,256}})(?:{mark})?\s*:\s*")
        self._item = re.compile(rf"\s*(?:{mark}|[\[{{\w.+-])")

    def value(self, depth: int = 0) -> Any:
        if depth > DEEPEST_LITERAL:
            raise Malformed("nested too deeply")
        if self.has(self._mark):
            start, end = self.at, self._string_end()
            self.at = end + len(self._mark)
            return self._text[start:end]
        if self.has("{"):
            return self._object(depth)
        if self.has("["):
            return [self.value(depth + 1) for _ in self._until("]")]
        found = _BARE.match(self._text, self.at)
        bare = found[0].strip() if found else ""
        if not bare:
            raise Malformed("a value is missing")
        self.at += len(found[0] if found else "")
        return _WORDS[bare] if bare in _WORDS else loads(bare)

    def _object(self, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in self._until("}"):
            key = self.name(self._key)
            if key in value:
                raise Malformed("an object has a key twice")
            value[key] = self.value(depth + 1)
        return value

    def _until(self, closer: str) -> Iterator[None]:
        self._open.append(closer)
        begun = False
        while not self.has(closer):
            if begun:
                self.take(",")
            yield
            begun = True
        self._open.pop()

    def _string_end(self) -> int:
        at = self.at
        while (at := self._text.find(self._mark, at)) >= 0:
            if self._can_follow(at + len(self._mark)):
                return at
            at += 1
        raise Malformed("a string has no end")

    def _can_follow(self, at: int) -> bool:
        depth = len(self._open)
        at = skip(self._text, at)
        while depth and self._text.startswith(("]", "}"), at):
            if not self._text.startswith(self._open[depth - 1], at):
                return False
            depth -= 1
            at = skip(self._text, at + 1)
        if not self._text.startswith(",", at):
            return depth == 0 and (at == len(self._text) or self._text.startswith("}", at))
        following = self._item if depth and self._open[depth - 1] == "]" else self._key
        return following.match(self._text, at + 1) is not None


# writing


def gemma_call(quote: str, lark: Lark, tool: Signature) -> str:
    written = _Values(lark, tool.schema, quote)
    if is_free(tool.schema):
        options = [written.any_object()]
    else:
        options = [written.object(shape) for shape in object_shapes(tool.schema)]
    return f"{literal(f'call:{tool.name}')} {one_of(options)}"


class _Values:
    def __init__(self, lark: Lark, schema: Schema, quote: str):
        self._lark = lark
        self._schema = schema
        self._quote = quote
        self._names: dict[str, str] = {}

    def value(self, node: Node) -> str:
        if isinstance(node, dict) and set(node) == {"$ref"}:
            ref = node["$ref"]
            return self._named(ref, lambda: self._any_of(self._schema.target(ref)))
        return self._any_of(node)

    def _named(self, key: str, body: Callable[[], str]) -> str:
        if key not in self._names:
            self._names[key] = self._lark.reserve()
            self._lark.define(self._names[key], body())
        return self._names[key]

    def _any_of(self, node: Node) -> str:
        plain = alternatives(self._schema, node)
        options = [option for one in plain for option in self._kinds(one)]
        if not options:
            raise Unwritable("type")
        return one_of(options)

    def _kinds(self, node: Plain) -> list[str]:
        kinds = self._schema.types(node)
        if (listed := listed_values(node)) is not None:
            allowed = [value for value in listed if kind(value) in kinds]
            return [self._lark.marker(self._constant(value)) for value in allowed]
        options = []
        kinds = frozenset(one for one in kinds if self._allows(node, one))
        if "string" in kinds and (text := self._text(node)) is not None:
            options.append(text)
        if scalars := kinds & {"null", "boolean", "integer", "fraction"}:
            options.append(self._lark.json(self._schema.text(of_kinds(node, scalars))))
        if "array" in kinds:
            options.append(self._array(node))
        if "object" in kinds:
            free = node in ({}, {"type": "object"})
            options.append(self.any_object() if free else self.object(node))
        return options

    def _allows(self, node: Plain, one: str) -> bool:
        return self._schema.is_satisfiable(of_kinds(node, frozenset({one})))

    def _text(self, node: Plain) -> str | None:
        quote = self._lark.marker(self._quote)
        if self._quote in self._lark.added:
            text = text_terminal(self._schema, node, ())
            return None if text is None else f"{quote} {self._lark.terminal(text)} {quote}"
        text = text_terminal(self._schema, node, (self._quote,))
        return None if text is None else f"{quote} {self._lark.terminal(f'({text}) {quote}')}"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            if self._quote in value:
                raise Unwritable("const")
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._constant, value)) + "]"
        if isinstance(value, dict):
            members = (f"{_bare(key)}:{self._constant(one)}" for key, one in value.items())
            return "{" + ",".join(members) + "}"
        return json.dumps(value)

    def _array(self, node: Plain) -> str:
        prefix, items = item_schemas(node)
        least, most = node.get("minItems", 0), node.get("maxItems")
        if prefix and (least not in (0, len(prefix)) or most not in (None, len(prefix))):
            raise Unwritable("prefixItems")
        if prefix:
            first = literal(",").join(f" {self.value(one)} " for one in prefix)
            open_ended = most is None and items is not False
            more = f"({literal(',')} {self._item(items)})*" if open_ended else ""
            whole = f'"[" {first} {more} "]"'
            return whole if least else one_of((whole, literal("[]")))
        if items is False or most == 0:
            return literal("[]")
        item = self._item(items)
        low, high = max(least - 1, 0), "" if most is None else most - 1
        filled = f'"[" {item} ("," {item}){{{low},{high}}} "]"'
        return filled if least else one_of((filled, literal("[]")))

    def _item(self, node: Node) -> str:
        return self._any() if node in (True, {}) else self.value(node)

    def object(self, node: Plain) -> str:
        def write(name: str, value: Node) -> str:
            return f"{literal(_bare(name) + ':')} {self._item(value)}"

        for keyword in ("patternProperties", "minProperties", "maxProperties"):
            if node.get(keyword):
                raise Unwritable(keyword)
        return f'"{{" {separated(self._lark, members_of(self._schema, node, write), ",")} "}}"'

    def any_object(self) -> str:
        key = self._lark.terminal("/[A-Za-z_][0-9A-Za-z_]{0,63}:/")
        return f'"{{" ({repeated(f"{key} {self._any()}", literal(","))})? "}}"'

    def _any(self) -> str:
        return self._named("", lambda: one_of(self._kinds({})))


def _bare(name: str) -> str:
    if not re.fullmatch(r"\w+", name):
        raise Unwritable(f"properties/{name}")
    return name
