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
from mlxcache.model.guidance.gemma_calls import GemmaCalls
from mlxcache.model.guidance.json_schema import check, is_satisfiable
from mlxcache.model.guidance.lark import Lark, any_text, literal, one_of, repeated
from mlxcache.model.guidance.schema_facts import TYPES, Node, Schema
from mlxcache.model.guidance.schema_merge import names_of
from mlxcache.model.guidance.text_values import Unwritable, text_terminal
from mlxcache.model.guidance.tool_members import (
    EMPTY,
    Tool,
    is_free,
    members_of,
    object_shapes,
    of_kinds,
    separated,
)
from mlxcache.model.markers import GENERIC_END, GENERIC_START

PARAM = "tools"
CODE = "invalid_tool"
_NAME = re.compile(r"[\w.:/-]+")
_FREE_NAME = r"[A-Za-z_][\w.-]{0,63}"
_LINE = '"\\n"?'


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
        """Return a grammar expression for a call of one of `tools`, in its tool block.

        With `several`, more than one call may be made. Raises BadRequest if a tool's name or schema
        cannot be written in this syntax.
        """
        return f"{self.opened(lark)} {self.rest(lark, tools, several=several)}"

    def opened(self, lark: Lark) -> str:
        return lark.marker(self.opening)

    def rest(self, lark: Lark, tools: Sequence[Tool], *, several: bool) -> str:
        """Return the expression that `calls` returns, without the opening of the first tool block.

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

    `tool`: a mapping whose item "function" has a "name" and, optionally, the schema "parameters".
    With `checked`, the schema is checked, and calls must follow it. Without, it is not read, and
    calls may have any object as arguments. Raises BadRequest if the schema cannot be enforced or
    does not allow an object.
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

    `tokenizer`: mlx-lm's TokenizerWrapper. `generic`: True if the tools are described in the system
    text, because the chat template cannot write tools.
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
    if tool.schema is None or is_free(tool.schema):
        free = f"{lark.terminal('/[A-Za-z_]{1}[A-Za-z0-9_]{0,63}=/')} {lark.json(Schema(True))}"
        inside = f"({repeated(free, literal(', '))})?"
        return f"{literal(tool.name + '(')} {inside} {literal(')')}"
    schema = tool.schema

    def write(name: str, node: Node) -> str:
        if not name.isidentifier():
            raise Unwritable(f"properties/{name}")
        return f"{literal(name + '=')} {lark.json(schema.of(node))}"

    shapes = [
        separated(lark, members_of(schema, shape, write), ", ") for shape in object_shapes(schema)
    ]
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
        if tool.schema is None or is_free(tool.schema):
            return f"{start}{line} ({self._free(lark)}{line})*{end}"
        schema = tool.schema
        bodies = []
        for shape in object_shapes(schema):
            parts = members_of(schema, shape, partial(self._written, lark, schema))
            bodies.append(
                " ".join(f"({part}{line})" + ("" if needed else "?") for part, needed in parts)
            )
        return f"{start}{line} {one_of(body or EMPTY for body in bodies)}{end}"

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
        """Return a grammar expression for a string, plain or as `<![CDATA[...]]>`.

        Strings with markup or line breaks can be written as CDATA only. `value`: the expression for
        the value without CDATA, returned unchanged if `node` allows other types than strings.
        """
        text = text_terminal(schema, node, ("]]>", *self.ends))
        if text is None or schema.types(node) != {"string"}:
            return value
        wrapped = lark.terminal(f'"<![CDATA[" ({text}) {literal("]]>" + self.value_end)}')
        try:
            plain = text_terminal(schema, node, ("<", "&", "\n"))
        except Unwritable:  # all of the listed values have markup
            return wrapped
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


def _value(lark: Lark, schema: Schema, node: Node, closing: str, ends: Sequence[str]) -> str:
    """Return a grammar expression for a value that `node` allows, followed by its closing tag.

    `closing`: the text of that tag. A string is written without quotes and cannot contain any of
    `ends`; other values are JSON. Raises Unwritable if a keyword cannot be expressed.
    """
    kinds = schema.types(node)
    options = []
    others = kinds - {"string"}
    other = of_kinds(node, others) if "string" in kinds else node
    if others and is_satisfiable(schema, other):
        options.append(f"{lark.json(schema.of(other))} {lark.marker(closing)}")
    if "string" in kinds and is_satisfiable(schema, of_kinds(node, frozenset({"string"}))):
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
    if tool.schema is None or is_free(tool.schema):
        key = lark.terminal(f'{literal("argument key=")} /"{_FREE_NAME}"/')
        written = partial(_typed_argument, lark, Schema(True), f"{lark.marker('<|open|>')} {key}")
        return f"{written(True)}*"
    schema = tool.schema

    def write(name: str, node: Node) -> str:
        if not re.fullmatch(r"[^\s<>\"&]+", name):
            raise Unwritable(f"properties/{name}")
        return _typed_argument(lark, schema, lark.marker(f'<|open|>argument key="{name}"'), node)

    bodies = []
    for shape in object_shapes(schema):
        parts = members_of(schema, shape, write)
        bodies.append(" ".join(f"({part})" + ("" if needed else "?") for part, needed in parts))
    return one_of(body or EMPTY for body in bodies)


def _typed_argument(lark: Lark, schema: Schema, key: str, node: Node) -> str:
    """Return a grammar expression for one argument of Kimi K3.

    `key`: an expression for the argument's opening tag up to its name. The argument's type and its
    value follow. Raises Unwritable if a keyword cannot be expressed.
    """
    options = []
    for name in names_of(schema.types(node)):
        only = of_kinds(node, TYPES[name] & schema.types(node))
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
        GemmaCalls("<escape>"),
        apart="",
        names=re.compile(r"\w+"),
    ),
    "gemma4": Syntax(
        "<|tool_call>", "<tool_call|>", GemmaCalls('<|"|>'), apart="", names=re.compile(r"[\w-]+")
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
