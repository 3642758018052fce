"""Grammars of tool calls: what all families share, for tool blocks, arguments and strings.

Calls are written in the form of the family's chat template, so that its reader reads exactly the
arguments that the schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.errors import BadRequest
from mlxcache.model.json_schema import TYPES, Node, Schema, listed_values, type_names
from mlxcache.model.lark import (
    Lark,
    any_text,
    compile_error,
    literal,
    one_of,
    regex,
    repeated,
)

PARAM = "tools"
CODE = "invalid_tool"
EMPTY = '""'
LINE = '"\\n"?'
FREE_NAME = r"[A-Za-z_][\w.-]{0,63}"
ANY_NAME = re.compile(".+")
_NAME = re.compile(r"[\w.:/-]+")

FREE = Schema({"type": "object"})


class Unwritable(ValueError):
    """Error for a schema that a tool-call syntax cannot express, because of a keyword."""

    def __init__(self, keyword: str):
        super().__init__(f"the keyword `{keyword}` cannot be enforced in this model's call syntax")


@dataclass(frozen=True, slots=True)
class Signature:
    name: str
    schema: Schema


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Grammar of a model family's tool calls.

    `opening` and `closing`: the texts around a tool block. `call(lark, tool)` returns the
    expression of one call, without these texts. `between`: the text between calls in one block; if
    None, a block has one call, and `apart` is the text between blocks. `names`: a pattern for the
    tool names that the syntax can write.
    """

    opening: str
    closing: str
    call: Callable[[Lark, Signature], str]
    between: str | None = None
    apart: str = "\n"
    names: re.Pattern[str] = _NAME

    def calls(self, lark: Lark, tools: Sequence[Signature], *, several: bool) -> str:
        return f"{lark.marker(self.opening)} {self.rest(lark, tools, several=several)}"

    def rest(self, lark: Lark, tools: Sequence[Signature], *, several: bool) -> str:
        call = lark.rule(one_of(self._call(lark, tool) for tool in tools))
        closing = f" {lark.marker(self.closing)}" if self.closing else ""
        if not several:
            return call + closing
        if self.between is not None:
            return repeated(call, lark.marker(self.between) if self.between else EMPTY) + closing
        apart = f"({literal(self.apart)})? " if self.apart else ""
        return f"{call}{closing} ({apart}{lark.marker(self.opening)} {call}{closing})*"

    def _call(self, lark: Lark, tool: Signature) -> str:
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


# arguments


def arguments_json(lark: Lark, tool: Signature) -> str:
    schema, root = tool.schema, tool.schema.root
    if schema.types(root) != {"object"}:
        root = FREE.root if root in (True, {}) else {"allOf": [root], "type": "object"}
    return lark.json(schema.text(root))


def is_free(schema: Schema) -> bool:
    return schema.resolve(schema.root) in (True, {}, FREE.root)


def of_kinds(node: Node, kinds: frozenset[str]) -> Node:
    """Return the schema of the values of `node` of some kinds, named as in `Schema.types`."""
    types = {"type": names_of(kinds)}
    return types if isinstance(node, bool) else {"allOf": [node, types]}


def names_of(kinds: frozenset[str]) -> list[str]:
    if "fraction" in kinds:
        kinds = kinds - {"fraction", "integer"} | {"number"}
    return sorted(kinds)


Plain = dict[str, Any]
"""A schema node without references and combinators at its top level."""

Members = list[tuple[str, bool]]
"""Expressions of an object's members in order, and whether each is required."""


def object_shapes(schema: Schema) -> list[Plain]:
    found = []
    for shape in alternatives(schema, schema.root):
        if "object" not in schema.types(shape):
            continue
        if listed_values(shape) is not None:
            raise Unwritable("const" if "const" in shape else "enum")
        required, named = set(shape.get("required", ())), shape.get("properties", {})
        if shape.get("minProperties", 0) > len(required):
            raise Unwritable("minProperties")
        if shape.get("maxProperties", len(named)) < len(required | set(named)):
            raise Unwritable("maxProperties")
        if shape.get("patternProperties"):
            raise Unwritable("patternProperties")
        found.append(shape)
    if not found:
        raise Unwritable("type")
    return found


def members_of(schema: Schema, shape: Plain, write: Callable[[str, Node], str]) -> Members:
    named: dict[str, Node] = dict(shape.get("properties", {}))
    required = shape.get("required", ())
    for name in required:
        named.setdefault(name, shape.get("additionalProperties", True))
    found = []
    for name, node in named.items():
        if schema.is_satisfiable(node):
            found.append((write(name, node), name in required))
        elif name in required:
            raise Unwritable("required")
    return found


def in_order(schema: Schema, write: Callable[[str, Node], str], after: str = "") -> str:
    bodies = []
    for shape in object_shapes(schema):
        parts = members_of(schema, shape, write)
        bodies.append(" ".join(f"({part}{after})" + ("" if must else "?") for part, must in parts))
    return one_of(body or EMPTY for body in bodies)


def separated(lark: Lark, members: Members, comma: str) -> str:
    rest, first = EMPTY, EMPTY  # what may follow a member, and what may come where none is yet
    for member, needed in reversed(members):
        after = f"{literal(comma)} {member} {rest}"
        begun = f"{member} {rest}"
        first = lark.rule(begun if needed else one_of((begun, first)))
        rest = lark.rule(after if needed else one_of((after, rest)))
    return first


# schemas without the combinators `$ref`, `anyOf` and `allOf`

_MOST = 64  # alternatives of one schema
_MOST_READ = 5000  # nodes that are visited for one schema, in which references may branch
_COMBINE = ("$ref", "anyOf", "allOf")
_HIGHER = ("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum")
_LOWER = ("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum")
_OBJECT = ("properties", "additionalProperties")


def alternatives(schema: Schema, node: Node) -> list[Plain]:
    """Return nodes without combinators; `node` allows the values that any of them allows.

    Nodes below the top level keep their combinators. Raises Unwritable if keywords cannot be
    merged, if there are too many alternatives, or if combinators lead from `node` back to itself.
    """
    return _expand(schema, node, frozenset(), iter(range(_MOST_READ)))


def _expand(schema: Schema, node: Node, within: frozenset[str], left: Iterator[int]) -> list[Plain]:
    if next(left, None) is None:
        raise Unwritable("anyOf")
    if isinstance(node, bool):
        return [{}] if node else []
    found: list[Plain] = [{key: node[key] for key in node if key not in _COMBINE}]
    parts: list[tuple[str, list[Node]]] = [("allOf", [one]) for one in node.get("allOf", ())]
    if (ref := node.get("$ref")) is not None:
        if ref in within:
            raise Unwritable("$ref")
        parts.append(("$ref", [schema.target(ref)]))
        within |= {ref}
    if "anyOf" in node:
        parts.append(("anyOf", node["anyOf"]))
    for keyword, options in parts:
        expanded = [one for option in options for one in _expand(schema, option, within, left)]
        if len(found) * len(expanded) > _MOST:
            raise Unwritable(keyword)
        merged = [_merge(first, second) for first in found for second in expanded]
        found = [one for one in merged if one is not None]
    return found


def _merge(first: Plain, second: Plain) -> Plain | None:
    out = {**first, **{key: value for key, value in second.items() if key not in first}}
    for key in first.keys() & second.keys() - set(_OBJECT):
        mine, its = first[key], second[key]
        if mine == its:
            continue
        if key == "type":
            kinds = [
                frozenset().union(*(TYPES[name] for name in type_names(side)))
                for side in (first, second)
            ]
            out[key] = names_of(kinds[0] & kinds[1])
            if not out[key]:
                return None
        elif key == "required":
            out[key] = [*mine, *(name for name in its if name not in mine)]
        elif key in _HIGHER:
            out[key] = max(mine, its)
        elif key in _LOWER:
            out[key] = min(mine, its)
        else:
            raise Unwritable(key)
    if any(key in side for key in _OBJECT for side in (first, second)):
        out |= _merged_objects(first, second)
    return out


def _merged_objects(first: Plain, second: Plain) -> Plain:
    named: dict[str, Node] = {}
    mine, its = (
        (side.get("properties", {}), side.get("additionalProperties", True))
        for side in (first, second)
    )
    for name in (*mine[0], *its[0]):
        named[name] = _both(mine[0].get(name, mine[1]), its[0].get(name, its[1]))
    return {"properties": named, "additionalProperties": _both(mine[1], its[1])}


def _both(first: Node, second: Node) -> Node:
    if first is False or second is False:
        return False
    if first in (True, {}) or first == second:
        return second
    return first if second in (True, {}) else {"allOf": [first, second]}


# strings, in syntaxes that write them without quotes

_MOST_READ_FOR_TEXT = 2000
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"[0-9]{{4}}-{_DAY}"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_N = "[0-9]{1,6}"
_HOURS = f"({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_DAYS = f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}(T{_HOURS})?|T{_HOURS}|{_N}W)",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL}){{1,2}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,2}}",
    "ipv4": _IPV4,
    "ipv6": f"({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,3}}(:{_GROUP}){{1,4}}|::({_GROUP})?",
    "time": _TIME,
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$&'()*+,;=-]+",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Regular expressions by `format`. Some valid texts are left out, such as dates of February 29."""

_AS_JSON = (
    r"~/(?is:\s*([-+0-9.\[{\"'(].*|(true|false|null|none|nil|nan|infinity|yes|no|on|off)\s*))/"
)
"""Expression for text that cannot be read as JSON, where a value may be text or JSON."""


def text_terminal(
    schema: Schema, node: Node, without: Sequence[str], *, mixed: bool = False
) -> str | None:
    """Return the body of a terminal for the strings that `node` allows, or None if it allows none.

    `without`: the texts that no string may contain. `mixed`: values of other types may be written
    as JSON in the same place, so strings which could be read as JSON are excluded.
    """
    parts = _text_parts(schema, node, without, frozenset(), iter(range(_MOST_READ_FOR_TEXT)))
    if parts is None:
        return None
    return " & ".join([any_text(without), *parts, *([_AS_JSON] if mixed else [])])


def _text_parts(
    schema: Schema,
    node: Node,
    without: Sequence[str],
    within: frozenset[str],
    left: Iterator[int],
) -> list[str] | None:
    """Return expressions that a string of `node` must satisfy, or None if it allows no strings."""
    if next(left, None) is None:
        raise Unwritable("anyOf")
    if "string" not in schema.types(node):
        return None
    if isinstance(node, bool):
        return []

    def follow(one: Node, through: frozenset[str] = within) -> list[str] | None:
        return _text_parts(schema, one, without, through, left)

    parts = list(_own_text_parts(node, without))
    every = [(one, within) for one in node.get("allOf", ())]
    if (ref := node.get("$ref")) is not None:
        if ref in within:
            raise Unwritable("$ref")
        every.insert(0, (schema.target(ref), within | {ref}))
    for one, through in every:
        if (found := follow(one, through)) is None:
            return None
        parts += found
    if "anyOf" in node:
        possible = [option for one in node["anyOf"] if (option := follow(one)) is not None]
        if not possible:
            return None
        if all(possible):
            parts.append(one_of("(" + " & ".join(option) + ")" for option in possible))
    return parts


def _own_text_parts(node: dict[str, object], without: Sequence[str]) -> Iterator[str]:
    if (listed := listed_values(node)) is not None:
        texts = [text for text in listed if isinstance(text, str)]
        texts = [text for text in texts if not any(part in text for part in without)]
        if not texts:
            raise Unwritable("const" if "const" in node else "enum")
        yield one_of(literal(text) for text in texts)
    least, most = node.get("minLength", 0), node.get("maxLength", "")
    if least or most != "":
        yield f"/(?s:.{{{least},{most}}})/"
    if (pattern := node.get("pattern")) is not None:
        yield _searched(str(pattern))
    if (form := node.get("format")) is not None:
        yield regex(_FORMATS[str(form)])


def _searched(pattern: str) -> str:
    found = one_of(_anchored(option) for option in _options(pattern))
    if compile_error(f"start: T\nT: {found}") is not None:
        raise Unwritable("pattern")
    return found


def _options(pattern: str) -> list[str]:
    options, depth, in_class = [""], 0, False
    for part in re.findall(r"\\.|.", pattern, flags=re.DOTALL):
        if part == "|" and not depth and not in_class:
            options.append("")
            continue
        if in_class:
            in_class = part != "]"
        elif part == "[":
            in_class = True
        depth += (part == "(") - (part == ")") if not in_class else 0
        options[-1] += part
    return options


def _anchored(option: str) -> str:
    """Return a regular expression for whole texts in which one alternative matches somewhere."""
    before = after = ".*"
    if option.startswith("^"):
        before, option = "", option[1:]
    if re.search(r"(?<!\\)(\\\\)*\$$", option):
        after, option = "", option[:-1]
    # as in JavaScript, \d and \w are ASCII
    for name, chars in (("d", "[0-9]"), ("w", "[0-9A-Za-z_]")):
        option = re.sub(rf"(?<!\\)((?:\\\\)*)\\{name}", rf"\g<1>{chars}", option)
    inner = regex(option)[1:-1] if option else ""
    return f"/(?s:{before}){inner}(?s:{after})/"
