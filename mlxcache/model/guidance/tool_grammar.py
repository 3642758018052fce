"""Grammars of tool calls, in each model family's own syntax.

The family is the name of mlx-lm's parser of its calls. Calls are written in the form of the
family's chat template, so that the parser reads exactly the arguments that the schema allows. In
syntaxes with a tag for each parameter, a string is written without quotes, and cannot contain a tag
that ends it; all other values are JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.model.guidance.json_schema import check, is_satisfiable
from mlxcache.model.guidance.lark import Lark, any_text, literal, one_of, repeated
from mlxcache.model.guidance.schema_facts import TYPES, Node, Schema, listed_values
from mlxcache.model.guidance.schema_merge import Plain, alternatives, names_of
from mlxcache.model.guidance.text_values import Unwritable, text_terminal
from mlxcache.model.markers import GENERIC_END, GENERIC_START

PARAM = "tools"
CODE = "invalid_tool"
_NAME = re.compile(r"[\w.:/-]+")
_FREE_NAME = r"[A-Za-z_][\w.-]{0,63}"
_LINE = '"\\n"?'


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called, by its name.

    `schema` is that of its arguments, or None for any object.
    """

    name: str
    schema: Schema | None


Call = Callable[[Lark, Tool], str]
"""Function that writes the grammar expression of one call, without the texts around a tool block.
"""


@dataclass(frozen=True, slots=True)
class Syntax:
    """Syntax of a model family's tool calls, for writing a grammar.

    `opening` and `closing`: the texts around a tool block. `call(lark, tool)` returns the grammar
    expression of one call. `between`: the text between calls in one block; if None, a block has one
    call, and `apart` is the text between blocks. `names`: a pattern for the tool names that the
    syntax can write.
    """

    opening: str
    closing: str
    call: Call
    between: str | None = None
    apart: str = "\n"
    names: re.Pattern[str] = _NAME

    def calls(self, lark: Lark, tools: Sequence[Tool], *, several: bool) -> str:
        """Return a grammar expression for one call of `tools`, or with `several` for one or more.

        Raises BadRequest if a tool's name or schema cannot be written in this syntax.
        """
        return f"{self.opened(lark)} {self.rest(lark, tools, several=several)}"

    def opened(self, lark: Lark) -> str:
        return lark.marker(self.opening)

    def rest(self, lark: Lark, tools: Sequence[Tool], *, several: bool) -> str:
        """Return a grammar expression for the text after the opening of the first tool block.

        With `several`, more than one call may be made. Raises BadRequest if a tool's name or schema
        cannot be written in this syntax.
        """
        call = lark.rule(one_of(self._call(lark, tool) for tool in tools))
        closing = f" {lark.marker(self.closing)}" if self.closing else ""
        if not several:
            return call + closing
        if self.between is not None:
            return repeated(call, lark.marker(self.between) if self.between else '""') + closing
        apart = f"({literal(self.apart)})? " if self.apart else ""
        return f"{call}{closing} ({apart}{lark.marker(self.opening)} {call}{closing})*"

    def _call(self, lark: Lark, tool: Tool) -> str:
        marked = any(part in lark.added for part in lark.parts(tool.name))
        names = _NAME if marked else self.names  # the text of a marker would be read as one
        if not names.fullmatch(tool.name):
            name = json.dumps(tool.name)
            reason = f"the tool name {name} cannot be written in this model's calls"
            raise BadRequest(reason, param=PARAM, code=CODE)
        try:
            return self.call(lark, tool)
        except Unwritable as error:
            reason = f"the schema of tool {json.dumps(tool.name)}: {error}"
            raise BadRequest(reason, param=PARAM, code=CODE) from error


def read_tool(tool: Mapping[str, Any], *, checked: bool) -> Tool:
    """Read a tool from its definition in a request.

    With `checked`, its schema is checked and enforced in calls; without, any object is allowed.
    Raises BadRequest if the schema cannot be enforced or does not allow an object.
    """
    function = tool["function"]
    name = str(function["name"])
    if not checked:
        return Tool(name, None)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    schema = check(parameters, param=PARAM, at=f"the schema of tool {json.dumps(name)}")
    if "object" not in schema.types(schema.root):
        reason = f"the schema of tool {json.dumps(name)}: expected an object of arguments"
        raise BadRequest(reason, param=PARAM, code=CODE)
    return Tool(name, schema)


def syntax_of(tokenizer: Any, *, generic: bool) -> Syntax:
    """Return the syntax of a model's tool calls. Raises Unsupported if it is unknown.

    `tokenizer`: mlx-lm's TokenizerWrapper. `generic`: the tools are described in the system text,
    because the chat template has none.
    """
    if generic:
        return Syntax(GENERIC_START, GENERIC_END, _json_call, names=re.compile(".+"))
    if tokenizer.tool_parser is None:
        raise Unsupported(
            "tool calls cannot be forced: the syntax of this model's calls is not known; request "
            "neither a forced call, a strict tool, nor a format with tools",
            param=PARAM,
        )
    family = tokenizer.tool_parser.__module__.rpartition(".")[2]
    if family not in _SYNTAXES:
        raise Unsupported(
            f"tool calls cannot be forced for the family {family!r}; request neither a forced "
            "call, a strict tool, nor a format with tools",
            param=PARAM,
        )
    found = _SYNTAXES[family]
    return found(tokenizer) if callable(found) else found


# JSON


def arguments_json(lark: Lark, tool: Tool) -> str:
    """Return a grammar expression for a tool's arguments as one JSON object."""
    if tool.schema is None:
        return lark.json(Schema({"type": "object"}))
    schema, root = tool.schema, tool.schema.root
    if schema.types(root) != {"object"}:
        root = {"allOf": [root], "type": "object"} if root not in (True, {}) else {"type": "object"}
    return lark.json(schema.of(root))


def _json_call(lark: Lark, tool: Tool) -> str:
    name = literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    return f'{_LINE} {name} {arguments_json(lark, tool)} "}}" {_LINE}'


def _list_call(lark: Lark, tool: Tool) -> str:
    name = literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    return f'{name} {arguments_json(lark, tool)} "}}"'


def _header_call(lark: Lark, tool: Tool) -> str:
    return f"{lark.marker(tool.name + '[ARGS]')} {arguments_json(lark, tool)}"


def _mistral(tokenizer: Any) -> Syntax:
    """Return the syntax of a Mistral model's tool calls.

    This is `NAME[ARGS]{...}` if the vocabulary or the template has `[ARGS]`, otherwise a JSON list.
    `tokenizer`: mlx-lm's TokenizerWrapper.
    """
    template = tokenizer.chat_template
    if "[ARGS]" in tokenizer.get_added_vocab() or "[ARGS]" in str(template):
        names = re.compile(r"[\w-]+")
        return Syntax("[TOOL_CALLS]", "", _header_call, apart="", names=names)
    return Syntax("[TOOL_CALLS][", "]", _list_call, between=", ", names=re.compile(".+"))


def _kimi_k2_call(lark: Lark, tool: Tool) -> str:
    number = lark.terminal(f"{literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/")
    arguments = arguments_json(lark, tool)
    begin, argument, end = (
        lark.marker(f"<|tool_call_{part}|>") for part in ("begin", "argument_begin", "end")
    )
    return f"{begin} {number} {argument} {arguments} {end}"


def _pythonic_call(lark: Lark, tool: Tool) -> str:
    """Return a grammar expression for `name(key=value, ...)`.

    The values are JSON, which the family's parser reads as Python.
    """
    if tool.schema is None or _is_free(tool.schema):
        free = f"{lark.terminal('/[A-Za-z_]{1}[A-Za-z0-9_]{0,63}=/')} {lark.json(Schema(True))}"
        inside = f"({repeated(free, literal(', '))})?"
        return f"{literal(tool.name + '(')} {inside} {literal(')')}"
    schema = tool.schema

    def write(name: str, node: Node) -> str:
        if not name.isidentifier():
            raise Unwritable(f"properties/{name}")
        return f"{literal(name + '=')} {lark.json(schema.of(node))}"

    shapes = [_separated(lark, _members(schema, shape, write), ", ") for shape in _shapes(schema)]
    return f"{literal(tool.name + '(')} {one_of(shapes)} {literal(')')}"


# parameters with tags


@dataclass(frozen=True, slots=True)
class Tags:
    """Writer of grammar expressions for calls with a tag for each parameter.

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

    def __call__(self, lark: Lark, tool: Tool) -> str:
        start = lark.marker(self.call.format(tool.name))
        end = f" {lark.marker(self.end)}" if self.end else ""
        line = f" {_LINE}" if self.line else ""
        if tool.schema is None or _is_free(tool.schema):
            return f"{start}{line} ({self._free(lark)}{line})*{end}"
        schema = tool.schema
        bodies = []
        for shape in _shapes(schema):
            parts = _members(schema, shape, partial(self._written, lark, schema))
            bodies.append(
                " ".join(f"({part}{line})" + ("" if needed else "?") for part, needed in parts)
            )
        return f"{start}{line} {one_of(body or _EMPTY for body in bodies)}{end}"

    def _written(self, lark: Lark, schema: Schema, name: str, node: Node) -> str:
        if not re.fullmatch(r"[^\s<>\"'&]+", name):
            raise Unwritable(f"properties/{name}")
        line = f" {_LINE} " if self.line and self.after_key else " "
        key = lark.marker(self.key.format(name))
        if self.after_key:
            key += line + lark.marker(self.after_key)
        value = _value(lark, schema, node, self.value_end, self.ends)
        if self.cdata:
            value = self._in_cdata(lark, schema, node, value)
        return f"{key} {value}"

    def _in_cdata(self, lark: Lark, schema: Schema, node: Node, value: str) -> str:
        """Return a grammar expression for a string value, also as `<![CDATA[...]]>`.

        Text with markup can be written in that form only. `value`: the expression without this
        form, which is returned unchanged if `node` allows other types than strings.
        """
        text = text_terminal(schema, node, ("]]>", *self.ends))
        if text is None or schema.types(node) != {"string"}:
            return value
        plain = text_terminal(schema, node, ("<", "&", "\n"))
        wrapped = lark.terminal(f'"<![CDATA[" ({text}) {literal("]]>" + self.value_end)}')
        short = lark.terminal(f"({plain}) {literal(self.value_end)}")
        return one_of((wrapped, short))

    def _free(self, lark: Lark) -> str:
        """Return a grammar expression for a parameter of any name whose value is any text."""
        before, after = self.key.split("{}")
        # the name and what follows it are one terminal: it ends where they do
        key = lark.terminal(f"{literal(before)} /{_FREE_NAME}/ {literal(after)}")
        if self.after_key:
            key += f" {_LINE} {lark.marker(self.after_key)}"
        return f"{key} {lark.terminal(f'({any_text(self.ends)}) {literal(self.value_end)}')}"


_EMPTY = '""'


def _value(lark: Lark, schema: Schema, node: Node, closing: str, ends: Sequence[str]) -> str:
    """Return a grammar expression for a value that `node` allows, followed by its closing tag.

    `closing`: the text of that tag. A string is written without quotes and cannot contain any of
    `ends`; other values are JSON. Raises Unwritable if a keyword cannot be expressed.
    """
    kinds = schema.types(node)
    options = []
    others = kinds - {"string"}
    other = _of_kinds(node, others) if "string" in kinds else node
    if others and is_satisfiable(schema, other):
        options.append(f"{lark.json(schema.of(other))} {lark.marker(closing)}")
    if "string" in kinds and is_satisfiable(schema, _of_kinds(node, frozenset({"string"}))):
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


def _of_kinds(node: Node, kinds: frozenset[str]) -> Node:
    types = {"type": names_of(kinds)}
    return types if isinstance(node, bool) else {"allOf": [node, types]}


def _tagged(
    opening: str, closing: str, tags: Tags, *, between: str | None = None, apart: str = "\n"
) -> Syntax:
    return Syntax(opening, closing, tags, between, apart)


def _arg_tags(prefix: str) -> Syntax:
    """Return the syntax of tool calls in the tags of GLM, such as `<arg_key>`.

    `prefix`: text before the name of each tag, as LongCat writes it, or "".
    """
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    ends = (f"</{value}>", f"</{prefix}tool_call>")
    tags = Tags(
        "{}", "", f"<{key}>{{}}</{key}>", f"</{value}>", ends, after_key=f"<{value}>", line=True
    )
    return _tagged(f"<{prefix}tool_call>", f"</{prefix}tool_call>", tags)


def _kimi_k3_call(lark: Lark, tool: Tool) -> str:
    """Return a grammar expression for a call of Kimi K3.

    Each argument is written with its type. If the schema cannot be expressed in that form, all
    arguments are one JSON object.
    """
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


def _typed_arguments(lark: Lark, tool: Tool) -> str:
    if tool.schema is None or _is_free(tool.schema):
        key = lark.terminal(f'{literal("argument key=")} /"{_FREE_NAME}"/')
        written = partial(_typed_argument, lark, Schema(True), f"{lark.marker('<|open|>')} {key}")
        return f"{written(True)}*"
    schema = tool.schema

    def write(name: str, node: Node) -> str:
        if not re.fullmatch(r"[^\s<>\"&]+", name):
            raise Unwritable(f"properties/{name}")
        return _typed_argument(lark, schema, lark.marker(f'<|open|>argument key="{name}"'), node)

    bodies = []
    for shape in _shapes(schema):
        parts = _members(schema, shape, write)
        bodies.append(" ".join(f"({part})" + ("" if needed else "?") for part, needed in parts))
    return one_of(body or _EMPTY for body in bodies)


def _typed_argument(lark: Lark, schema: Schema, key: str, node: Node) -> str:
    """Return a grammar expression for one argument of Kimi K3.

    It is `key`, an expression too, then the argument's type and its value.
    """
    options = []
    for name in names_of(schema.types(node)):
        only = _of_kinds(node, TYPES[name] & schema.types(node))
        if not is_satisfiable(schema, only):
            continue
        if name != "string":
            body = lark.json(schema.of(only))
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


# arguments as members of an object


Written = list[tuple[str, bool]]
"""Grammar expressions of an object's members in order, and whether each is required."""


def _is_free(schema: Schema) -> bool:
    """Return whether a schema allows arguments of any names and values."""
    return schema.resolve(schema.root) in (True, {}, {"type": "object"})


def _shapes(schema: Schema) -> list[Plain]:
    """Return schemas without combinators for the objects that arguments may be.

    Raises Unwritable if a keyword cannot be expressed in a tool-call syntax.
    """
    found = []
    for shape in alternatives(schema, schema.root):
        if "object" not in schema.types(shape):
            continue
        if listed_values(shape) is not None:
            raise Unwritable("const" if "const" in shape else "enum")
        required = set(shape.get("required", ()))
        if shape.get("minProperties", 0) > len(required):
            raise Unwritable("minProperties")
        if shape.get("maxProperties", len(shape.get("properties", {}))) < len(
            required | set(shape.get("properties", {}))
        ):
            raise Unwritable("maxProperties")
        if shape.get("patternProperties"):
            raise Unwritable("patternProperties")
        found.append(shape)
    if not found:
        raise Unwritable("type")
    return found


def _members(schema: Schema, shape: Plain, write: Callable[[str, Node], str]) -> Written:
    """Write the named members of a JSON object by `write(name, node)`, in the schema's order.

    Returns pairs of a member's grammar expression and whether it is required. `shape`: the object's
    schema. Members that no value satisfies are left out; raises Unwritable if one of them is
    required.
    """
    named: dict[str, Node] = dict(shape.get("properties", {}))
    required = shape.get("required", ())
    for name in required:
        named.setdefault(name, shape.get("additionalProperties", True))
    found = []
    for name, node in named.items():
        if is_satisfiable(schema, node):
            found.append((write(name, node), name in required))
        elif name in required:
            raise Unwritable("required")
    return found


def _separated(lark: Lark, members: Written, comma: str) -> str:
    """Return a grammar expression for an object's members, with `comma` between those present.

    `members`: the result of `_members`. Those that are not required may be absent.
    """
    rest, first = _EMPTY, _EMPTY  # what may follow a member, and what may come where none is yet
    for member, needed in reversed(members):
        after = f"{literal(comma)} {member} {rest}"
        begun = f"{member} {rest}"
        first = lark.rule(begun if needed else one_of((begun, first)))
        rest = lark.rule(after if needed else one_of((after, rest)))
    return first


# Gemma


class _Gemma:
    """Writer of grammar expressions for Gemma's calls: `call:NAME{key:value,...}`.

    Strings are between delimiters of their own (`quote`), and keys have none.
    """

    def __init__(self, quote: str):
        self._quote = quote

    def __call__(self, lark: Lark, tool: Tool) -> str:
        schema = tool.schema or Schema({"type": "object"})
        written = _GemmaValues(lark, schema, self._quote)
        options = (
            [written.any_object()] if _is_free(schema) else map(written.object, _shapes(schema))
        )
        return f"{literal(f'call:{tool.name}')} {one_of(options)}"


class _GemmaValues:
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
            options.append(self._lark.json(self._schema.of(_of_kinds(node, scalars))))
        if "array" in kinds:
            options.append(self._array(node))
        if "object" in kinds:
            free = node in ({}, {"type": "object"})
            options.append(self.any_object() if free else self.object(node))
        return options

    def _allows(self, node: Plain, kind: str) -> bool:
        return is_satisfiable(self._schema, _of_kinds(node, frozenset({kind})))

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
        return f'"{{" {_separated(self._lark, _members(self._schema, node, write), ",")} "}}"'

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


_QWEN = Tags(
    "<function={}>\n",
    "</function>",
    "<parameter={}>\n",
    "\n</parameter>\n",
    ("</parameter>", "</function>", "</tool_call>", "<parameter="),
)
_MINIMAX = Tags(
    '<invoke name="{}">\n',
    "</invoke>\n",
    '<parameter name="{}">',
    "</parameter>\n",
    ("</parameter>", "</invoke>", "</minimax:tool_call>", "<parameter name="),
)
_MUSE = Tags(
    '<atem:invoke name="{}">\n',
    "</atem:invoke>\n",
    '<atem:parameter name="{}">',
    "</atem:parameter>\n",
    ("</atem:parameter>", "</atem:invoke>", "</atem:function_calls>", "<atem:parameter"),
)
_MINICPM = Tags(
    '"{}">',
    "",
    '<param name="{}">',
    "</param>",
    ("</param>", "</function>"),
    cdata=True,
)
_SYNTAXES: dict[str, Syntax | Callable[[Any], Syntax]] = {
    "function_gemma": Syntax(
        "<start_function_call>",
        "<end_function_call>",
        _Gemma("<escape>"),
        apart="",
        names=re.compile(r"\w+"),
    ),
    "gemma4": Syntax(
        "<|tool_call>", "<tool_call|>", _Gemma('<|"|>'), apart="", names=re.compile(r"[\w-]+")
    ),
    "glm47": _arg_tags(""),
    "json_tools": Syntax(GENERIC_START, GENERIC_END, _json_call, names=re.compile(".+")),
    "kimi_k2": Syntax(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _kimi_k2_call, between=""
    ),
    "kimi_k3": Syntax("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _kimi_k3_call, between=""),
    "longcat": _arg_tags("longcat_"),
    "minicpm5": _tagged("<function name=", "</function>", _MINICPM),
    "minimax_m2": _tagged("<minimax:tool_call>\n", "</minimax:tool_call>", _MINIMAX, between=""),
    "mistral": _mistral,
    "muse_spark": _tagged("<atem:function_calls>\n", "</atem:function_calls>", _MUSE, between=""),
    "pythonic": Syntax(
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        _pythonic_call,
        between=", ",
        names=re.compile(r"[A-Za-z_][\w.]*"),
    ),
    "qwen3_coder": _tagged("<tool_call>\n", "\n</tool_call>", _QWEN),
}
