"""Grammars of tool calls in Gemma's notation: `call:NAME{key:value,...}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from mlxcache.model.guidance.json_schema import is_satisfiable
from mlxcache.model.guidance.lark import Lark, literal, one_of, repeated
from mlxcache.model.guidance.schema_facts import Node, Schema, listed_values
from mlxcache.model.guidance.schema_merge import Plain, alternatives
from mlxcache.model.guidance.text_values import Unwritable, text_terminal
from mlxcache.model.guidance.tool_members import (
    Tool,
    is_free,
    members_of,
    object_shapes,
    of_kinds,
    separated,
)


class GemmaCalls:
    """Writer of grammar expressions for Gemma's calls: `call:NAME{key:value,...}`.

    Strings are between delimiters of their own (`quote`), and keys have none.
    """

    def __init__(self, quote: str):
        self._quote = quote

    def __call__(self, lark: Lark, tool: Tool) -> str:
        schema = tool.schema or Schema({"type": "object"})
        written = _Values(lark, schema, self._quote)
        options = (
            [written.any_object()]
            if is_free(schema)
            else map(written.object, object_shapes(schema))
        )
        return f"{literal(f'call:{tool.name}')} {one_of(options)}"


class _Values:
    """Writer of grammar expressions for values of one schema in Gemma's notation.

    `quote`: the delimiter before and after each string.
    """

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
            return [self._constant(value) for value in listed if _fits(value, kinds)]
        options = []
        kinds = frozenset(one for one in kinds if self._allows(node, one))
        if "string" in kinds and (text := self._text(node)) is not None:
            options.append(text)
        if scalars := kinds & {"null", "boolean", "integer", "fraction"}:
            options.append(self._lark.json(self._schema.of(of_kinds(node, scalars))))
        if "array" in kinds:
            options.append(self._array(node))
        if "object" in kinds:
            free = node in ({}, {"type": "object"})
            options.append(self.any_object() if free else self.object(node))
        return options

    def _allows(self, node: Plain, kind: str) -> bool:
        return is_satisfiable(self._schema, of_kinds(node, frozenset({kind})))

    def _text(self, node: Plain) -> str | None:
        quote = self._lark.marker(self._quote)
        if self._quote in self._lark.added:
            text = text_terminal(self._schema, node, ())
            return None if text is None else f"{quote} {self._lark.terminal(text)} {quote}"
        text = text_terminal(self._schema, node, (self._quote,))
        return None if text is None else f"{quote} {self._lark.terminal(f'({text}) {quote}')}"

    def _constant(self, value: Any) -> str:
        return self._lark.marker(self._plain(value))

    def _plain(self, value: Any) -> str:
        if isinstance(value, str):
            if self._quote in value:
                raise Unwritable("const")
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._plain, value)) + "]"
        if isinstance(value, dict):
            members = (f"{_bare(key)}:{self._plain(one)}" for key, one in value.items())
            return "{" + ",".join(members) + "}"
        return json.dumps(value)

    def _array(self, node: Plain) -> str:
        items, prefix = node.get("items", True), list(node.get("prefixItems", ()))
        if isinstance(items, list):
            prefix, items = items, node.get("additionalItems", True)
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

    def _item(self, items: Node) -> str:
        return self._any() if items in (True, {}) else self.value(items)

    def object(self, node: Plain) -> str:
        def write(name: str, value: Node) -> str:
            body = self._any() if value in (True, {}) else self.value(value)
            return f"{literal(_bare(name) + ':')} {body}"

        for keyword in ("patternProperties", "minProperties", "maxProperties"):
            if node.get(keyword):
                raise Unwritable(keyword)
        return f'"{{" {separated(self._lark, members_of(self._schema, node, write), ",")} "}}"'

    def any_object(self) -> str:
        """Return a grammar expression for an object with any keys and values."""
        key = self._lark.terminal("/[A-Za-z_][0-9A-Za-z_]{0,63}:/")
        return f'"{{" ({repeated(f"{key} {self._any()}", literal(","))})? "}}"'

    def _any(self) -> str:
        return self._named("", lambda: one_of(self._kinds({})))


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    return bool(Schema(True).types({"const": value}) & kinds)


def _bare(name: str) -> str:
    if not re.fullmatch(r"\w+", name):
        raise Unwritable(f"properties/{name}")
    return name
