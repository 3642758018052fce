"""Tool calls with JSON arguments, or with Python's, as models without a syntax write them too.

Quotes in strings are escaped. So a tool block has at most one reading, and a closing marker inside
a string belongs to the string.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mlxcache.model.json_schema import Node, Schema
from mlxcache.model.lark import Lark, literal, one_of, repeated
from mlxcache.model.tool_syntax.arguments import LiteralReader, Tools, loads, raw_decode, skip
from mlxcache.model.tool_syntax.reading import Call, JsonScanner, Malformed, Scanner
from mlxcache.model.tool_syntax.writing import (
    LINE,
    Signature,
    Unwritable,
    arguments_json,
    is_free,
    members_of,
    object_shapes,
    separated,
)

_NAME = re.compile(r"\s*([^\s\[\](),='\"]{1,256})\s*\(\s*")
_KEY = re.compile(r"\s*([^\s\[\](),='\"]{1,256})\s*=\s*")

# reading


class JsonCalls:
    """Reader of calls written as `{"name": ..., "arguments": {...}}`, or a list of these."""

    def scanner(self) -> Scanner:
        return JsonScanner()

    def read(self, text: str, tools: Tools) -> list[Call]:
        parsed: Any = loads(text.strip())
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not all(isinstance(call, dict) for call in calls):
            raise Malformed("a call is not a JSON object")
        return calls


class HeadedCalls(JsonCalls):
    """Reader of calls with a header before their JSON arguments.

    `header`: a regular expression with the group `call` for the tool's name, and optionally the
    group `call_id` for an id that the model gave. `footer`: a regular expression for the text after
    the arguments. `listed`: the tool block may also be a JSON list of calls, as `JsonCalls` reads.
    """

    def __init__(self, header: str, footer: str = "", *, listed: bool = False):
        self._header, self._footer = re.compile(header), re.compile(footer)
        self._listed = listed

    def read(self, text: str, tools: Tools) -> list[Call]:
        at = skip(text, 0)
        if self._listed and text.startswith("[", at):
            return super().read(text, tools)
        calls: list[Call] = []
        while at < len(text) or not calls:
            call, at = self._one(text, at)
            calls.append(call)
        return calls

    def _one(self, text: str, at: int) -> tuple[Call, int]:
        header = self._header.match(text, at)
        if header is None:
            raise Malformed(f"no call begins with {text[at : at + 40]!r}")
        at = skip(text, header.end())
        arguments: Any = {}
        if at < len(text) and self._footer.fullmatch(text, at) is None:
            arguments, at = raw_decode(text, at)
        footer = self._footer.match(text, skip(text, at))
        if footer is None:
            raise Malformed("a call has no end")
        call = {"name": header["call"], "arguments": arguments}
        if "call_id" in header.re.groupindex:
            call["id"] = header["call_id"]
        return call, skip(text, footer.end())


class PythonicCalls:
    """Reader of LFM2's calls: `[NAME(KEY=VALUE, ...), ...]`.

    Lists and objects may be JSON or Python. The form is that of the chat templates of LFM2 and
    LFM2.5: https://docs.liquid.ai/lfm/key-concepts/tool-use
    """

    def scanner(self) -> Scanner:
        return JsonScanner("'\"")

    def read(self, text: str, tools: Tools) -> list[Call]:
        reader = LiteralReader(text)
        reader.take("[")
        calls: list[Call] = []
        while not calls or reader.has(","):
            calls.append(_pythonic(reader, text, tools))
        reader.take("]")
        if text[reader.at :].strip():
            raise Malformed("text follows the calls")
        return calls


def _pythonic(reader: LiteralReader, text: str, tools: Tools) -> Call:
    name = reader.name(_NAME)
    arguments: dict[str, Any] = {}
    while not reader.has(")"):
        if arguments:
            reader.take(",")
        key = reader.name(_KEY)
        if key in arguments:
            raise Malformed("an argument is given twice")
        start = reader.at
        value = reader.value()
        if not isinstance(value, str | dict | list) and not tools[name].fits(key, value):
            value, _ = tools[name].parse(key, text[start : reader.at])
        arguments[key] = value
    return {"name": name, "arguments": arguments}


# writing


def json_call(lark: Lark, tool: Signature) -> str:
    return f"{LINE} {listed_call(lark, tool)} {LINE}"


def listed_call(lark: Lark, tool: Signature) -> str:
    name = literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    return f'{name} {arguments_json(lark, tool)} "}}"'


def mistral_call(lark: Lark, tool: Signature) -> str:
    return f"{lark.marker(tool.name + '[ARGS]')} {arguments_json(lark, tool)}"


def kimi_k2_call(lark: Lark, tool: Signature) -> str:
    number = lark.terminal(f"{literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/")
    arguments = arguments_json(lark, tool)
    begin, argument, end = (
        lark.marker(f"<|tool_call_{part}|>") for part in ("begin", "argument_begin", "end")
    )
    return f"{begin} {number} {argument} {arguments} {end}"


def pythonic_call(lark: Lark, tool: Signature) -> str:
    schema = tool.schema

    def write(name: str, node: Node) -> str:
        if not name.isidentifier():
            raise Unwritable(f"properties/{name}")
        return f"{literal(name + '=')} {lark.json(schema.text(node))}"

    if is_free(schema):
        key = lark.terminal("/[A-Za-z_]{1}[A-Za-z0-9_]{0,63}=/")
        free = f"{key} {lark.json(Schema(True).text(True))}"
        inside = f"({repeated(free, literal(', '))})?"
    else:
        shapes = object_shapes(schema)
        inside = one_of(separated(lark, members_of(schema, one, write), ", ") for one in shapes)
    return f"{literal(tool.name + '(')} {inside} {literal(')')}"
