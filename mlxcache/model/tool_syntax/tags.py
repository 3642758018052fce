"""Tool calls whose parameters are between tags, as text or as JSON.

A string is written without quotes or escapes; any other value is JSON. So a string may contain the
tags themselves, and the text after a closing tag decides where the string ends: see `reading`. A
grammar allows no string that contains a tag which would end it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlxcache.model.json_schema import TYPES, Node, Schema
from mlxcache.model.lark import Lark, any_text, literal, one_of
from mlxcache.model.tool_syntax.arguments import Tool, Tools, loads
from mlxcache.model.tool_syntax.json_calls import HeadedCalls, JsonCalls
from mlxcache.model.tool_syntax.reading import Call, Cut, Malformed, Tag, UnescapedCalls, Whole
from mlxcache.model.tool_syntax.writing import (
    FREE_NAME,
    LINE,
    Signature,
    Unwritable,
    arguments_json,
    in_order,
    is_free,
    names_of,
    of_kinds,
    text_terminal,
)

CDATA, CDATA_END = "<![CDATA[", "]]>"

# reading


class TagSyntax(UnescapedCalls):
    """Reader of a family with tags; its other arguments are those of `UnescapedCalls`.

    `close` (a plain text) closes a parameter. `end` is empty if the tool block's own marker closes
    the call. `wrap`: the text that the template adds at both ends of a value. `cdata`: values with
    markup are written as `<![CDATA[...]]>`.
    """

    def __init__(
        self, *, parameter: str, close: str, wrap: str = "", cdata: bool = False, **calls: Any
    ):
        super().__init__(parameter=parameter, **calls)
        self._close = close
        self._tag = re.compile(f"(?P<close>{re.escape(close)})|{parameter}")
        self._wrap, self._cdata = wrap, cdata

    def read(self, text: str, tools: Tools) -> list[Call]:
        if super().is_json(text):
            return JsonCalls().read(text, tools)
        return super().read(text, tools)

    def ends(self, tail: str) -> bool:
        at = tail.rfind(self._close)
        found = self._follow(tail, at, at + len(self._close)) if at >= 0 else None
        return found is not None and found.name is None

    def _cuts(self, text: str, start: int) -> tuple[list[Cut], list[Tag]]:
        cuts: list[Cut] = []
        tags: list[Tag] = []
        for found in self._tag.finditer(text, start):
            closes = found["close"] is not None
            tags.append((found.start(), not closes))
            if closes and (cut := self._follow(text, found.start(), found.end())):
                cuts.append(cut)
        return cuts, tags

    def _follow(self, text: str, end: int, at: int) -> Cut | None:
        at = self._skip(text, at)
        if found := self._parameter.match(text, at):
            return self._cut(end, found)
        ended = self._end.match(text, at)
        return self._closed(text, end, ended.end()) if ended else None

    def _whole(self, text: str) -> Whole:
        def whole(start: int, end: int) -> bool:
            opened = self._cdata and text.startswith(CDATA, start)
            return not opened or text.endswith(CDATA_END, start + len(CDATA), end)

        return whole

    def _convert(self, tool: Tool, cut: Cut, text: str) -> tuple[Any, bool]:
        if self._cdata and text.startswith(CDATA) and text.endswith(CDATA_END):
            text = text[len(CDATA) : -len(CDATA_END)]
        else:
            text = text.removeprefix(self._wrap).removesuffix(self._wrap)
        return tool.parse(str(cut.name), text, cut.hint)


class NamedCalls(TagSyntax):
    """Reader of calls whose bare name comes before the tags of parameters, before JSON or alone."""

    def read(self, text: str, tools: Tools) -> list[Call]:
        name, _, rest = text.strip().partition("{")
        if (name := name.strip()) not in tools or self.begins(text):
            calls = super().read(text, tools)
            if not calls[0].get("arguments") and str(calls[0].get("name")) not in tools:
                raise Malformed("the block names no tool")
            return calls
        return [{"name": name, "arguments": loads("{" + rest) if rest else {}}]


_K3_CALL = r"<\|open\|>call\b[^<>]{0,200}?\btool=\"(?P<call>[^\"<>]{1,256})\"[^<>]{0,200}<\|sep\|>"
_K3_JSON = r"\s*<\|open\|>json\b[^<>]{0,200}<\|sep\|>"
_K3_AS_JSON = re.compile(rf"\s*{_K3_CALL}{_K3_JSON}")


class KimiK3Calls(TagSyntax):
    """Reader of Kimi K3's calls: tags that name the type of each argument, or one JSON object.

    <|open|>call tool="NAME" index="1"<|sep|>
    <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|><|close|>call<|sep|>
    """

    def __init__(self) -> None:
        super().__init__(
            call=_K3_CALL,
            parameter=(
                r"<\|open\|>argument\b[^<>]{0,100}?\bkey=\"(?P<name>[^\"<>]{0,256})\""
                r"(?:\s+type=\"(?P<hint>\w{1,20})\")?[^<>]{0,100}<\|sep\|>"
            ),
            close="<|close|>argument<|sep|>",
            end=re.escape("<|close|>call<|sep|>"),
            unescape=_unescape,
        )
        end = re.escape("<|close|>json<|sep|>") + r"\s*" + re.escape("<|close|>call<|sep|>")
        self._as_json = HeadedCalls(f"{_K3_CALL}{_K3_JSON}", end)

    def is_json(self, text: str) -> bool:
        return _K3_AS_JSON.match(text) is not None

    def read(self, text: str, tools: Tools) -> list[Call]:
        if not self.is_json(text):
            return super().read(text, tools)
        calls = self._as_json.read(text, tools)
        return [{**call, "name": _unescape(call["name"])} for call in calls]


def _unescape(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


# writing


@dataclass(frozen=True, slots=True)
class TagGrammar:
    """Grammar of calls with a tag for each parameter.

    `{}` in a text stands for a name. `call`, `end`: the texts before and after a call. `key`: the
    text before a value, with the parameter's name. `after_key`: text between `key` and the value,
    or "". `value_end`: the text after the value. `ends`: texts that a string value must not
    contain, because a parser would end the value there. `line`: the template may write a line break
    between the parts. `cdata`: strings with markup are written as `<![CDATA[...]]>`.
    """

    call: str
    end: str
    key: str
    value_end: str
    ends: tuple[str, ...]
    after_key: str = ""
    line: bool = False
    cdata: bool = False

    def __call__(self, lark: Lark, tool: Signature) -> str:
        start = lark.marker(self.call.format(tool.name))
        end = f" {lark.marker(self.end)}" if self.end else ""
        line = f" {LINE}" if self.line else ""
        if is_free(tool.schema):
            return f"{start}{line} ({self._free(lark)}{line})*{end}"
        body = in_order(tool.schema, partial(self._written, lark, tool.schema), line)
        return f"{start}{line} {body}{end}"

    def _written(self, lark: Lark, schema: Schema, name: str, node: Node) -> str:
        if not re.fullmatch(r"[^\s<>\"'&]+", name):
            raise Unwritable(f"properties/{name}")
        key = lark.marker(self.key.format(name))
        if self.after_key:
            key += f" {LINE} " if self.line else " "
            key += lark.marker(self.after_key)
        value = _value(lark, schema, node, self.value_end, self.ends)
        if self.cdata:
            value = self._in_cdata(lark, schema, node, value)
        return f"{key} {value}"

    def _in_cdata(self, lark: Lark, schema: Schema, node: Node, value: str) -> str:
        text = text_terminal(schema, node, (CDATA_END, *self.ends))
        if text is None or schema.types(node) != {"string"}:
            return value
        wrapped = lark.terminal(f'"{CDATA}" ({text}) {literal(CDATA_END + self.value_end)}')
        try:
            plain = text_terminal(schema, node, ("<", "&", "\n"))
        except Unwritable:  # all of the listed values have markup
            return wrapped
        short = lark.terminal(f"({plain}) {literal(self.value_end)}")
        return one_of((wrapped, short))

    def _free(self, lark: Lark) -> str:
        before, after = self.key.split("{}")
        # the name and what follows it are one terminal: it ends where they do
        key = lark.terminal(f"{literal(before)} /{FREE_NAME}/ {literal(after)}")
        if self.after_key:
            key += f" {LINE} {lark.marker(self.after_key)}"
        return f"{key} {lark.terminal(f'({any_text(self.ends)}) {literal(self.value_end)}')}"


def _value(lark: Lark, schema: Schema, node: Node, closing: str, ends: Sequence[str]) -> str:
    kinds = schema.types(node)
    options = []
    others = kinds - {"string"}
    other = of_kinds(node, others) if "string" in kinds else node
    if others and schema.is_satisfiable(other):
        options.append(f"{lark.json(schema.text(other))} {lark.marker(closing)}")
    if "string" in kinds and schema.is_satisfiable(of_kinds(node, frozenset({"string"}))):
        text = text_terminal(schema, node, ends, mixed=bool(others))
        first, *later = lark.parts(closing)
        if text is not None and first in lark.added:
            options.append(f"{lark.terminal(text)} {lark.marker(closing)}")
        elif text is not None:
            # one terminal: text that may contain anything would swallow the tag that follows
            name = lark.terminal(f"({text}) {literal(first)}")
            options.append(" ".join((name, *(lark.marker(part) for part in later))))
    if not options:
        raise Unwritable("type")
    return one_of(options)


def kimi_k3_call(lark: Lark, tool: Signature) -> str:
    """Return an expression for a call with typed arguments, or one JSON object if that fails."""
    header = literal(f"call tool={json.dumps(tool.name)} index=")
    number = lark.terminal(f'{header} /"[1-9][0-9]{{0,2}}"/')
    start = f"{lark.marker('<|open|>')} {number} {lark.marker('<|sep|>')}"
    end = lark.marker("<|close|>call<|sep|>")
    try:
        body = _typed_arguments(lark, tool)
    except Unwritable:
        opened = lark.marker('<|open|>json type="object"<|sep|>')
        closed = lark.marker("<|close|>json<|sep|>")
        body = f"{opened} {arguments_json(lark, tool)} {closed}"
    return f"{start} {body} {end}"


def _typed_arguments(lark: Lark, tool: Signature) -> str:
    if is_free(tool.schema):
        key = lark.terminal(f'{literal("argument key=")} /"{FREE_NAME}"/')
        any_argument = f"{lark.marker('<|open|>')} {key}"
        return f"{_typed_argument(lark, Schema(True), any_argument, True)}*"

    def write(name: str, node: Node) -> str:
        if not re.fullmatch(r"[^\s<>\"&]+", name):
            raise Unwritable(f"properties/{name}")
        key = lark.marker(f'<|open|>argument key="{name}"')
        return _typed_argument(lark, tool.schema, key, node)

    return in_order(tool.schema, write)


def _typed_argument(lark: Lark, schema: Schema, key: str, node: Node) -> str:
    options = []
    for name in names_of(schema.types(node)):
        only = of_kinds(node, TYPES[name] & schema.types(node))
        if not schema.is_satisfiable(only):
            continue
        if name != "string":
            body = lark.json(schema.text(only))
        elif (text := text_terminal(schema, node, ())) is not None:
            body = lark.terminal(text)
        else:
            continue
        # integers are numbers in the template
        kind = "number" if name == "integer" else name
        head = lark.marker(f' type="{kind}"<|sep|>')
        options.append(f"{key} {head} {body} {lark.marker('<|close|>argument<|sep|>')}")
    if not options:
        raise Unwritable("type")
    return one_of(options)
