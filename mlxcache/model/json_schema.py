"""JSON Schemas that replies must follow: checked, in a form that llguidance enforces exactly.

llguidance compiles most of JSON Schema, and refuses most of what it cannot enforce. This module
covers the rest: it refuses keywords that cannot be enforced, with their place in the schema. It
rewrites references (any local pointer or anchor becomes a name below `$defs`), `oneOf` with
alternatives that exclude each other, and bounds that a 64-bit float would widen.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

from mlxcache.errors import BadRequest
from mlxcache.model.lark import MOST_DIVISORS, compile_error

Node = dict[str, Any] | bool
"""A node of a JSON Schema, as `check` has rewritten it."""

WHITESPACE = r" |\n[ \t]{0,32}"
"""White space between two tokens of JSON, as a regular expression.

One blank, or a line break with its indentation: what models write, and no more, because a model
that is not sure what to write next would else write blanks until it has no tokens left.
"""

ALL_TYPES = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
"""Types of JSON values; JSON Schema's `number` is `integer` and `fraction`."""

TYPES = {
    **{name: frozenset((name,)) for name in ALL_TYPES - {"fraction"}},
    "number": frozenset(("integer", "fraction")),
}
"""Types of values by the names that JSON Schema's `type` has for them."""

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)

CODE = "invalid_schema"

_REFUSED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "then": (),
    "else": (),
    "uniqueItems": (False,),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Keywords that cannot be enforced, with values that have no effect."""
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DEFS = "#/$defs/"
_EXACT = 2**53  # integers up to this one are exact as 64-bit floats
_TINY = 1e-30  # this bound, or its negative, replaces an exclusive bound of 0
_SHARED = ("properties", "required", "additionalProperties")  # seldom the cause
_DEEPEST = 200
_DEEPEST_COMPARED = 8  # at deeper levels only types are compared
_TOO_DEEP = "schemas are nested too deeply"
_LONGEST_S = 5.0  # after this a slow check is given up, in seconds


@dataclass(frozen=True, slots=True)
class Schema:
    """A checked schema: its root node, and the definitions to which `#/$defs/NAME` refers."""

    root: Node
    defs: Mapping[str, Node] = field(default_factory=dict)
    closed: bool = True
    """True if no object in it has both named properties and properties of any name."""

    def target(self, ref: str) -> Node:
        return self.defs[ref.removeprefix(_DEFS)]

    def resolve(self, node: Node) -> Node:
        """Follow references until a node is more than a reference, or they lead in a circle."""
        seen = 0
        while isinstance(node, dict) and set(node) == {"$ref"} and seen <= len(self.defs):
            node, seen = self.target(node["$ref"]), seen + 1
        return node

    def types(
        self,
        node: Node,
        within: frozenset[str] = frozenset(),
        known: dict[str, frozenset[str]] | None = None,
    ) -> frozenset[str]:
        """Return the types of values that `node` allows, and possibly some that it does not.

        The types are those of ALL_TYPES. `within` and `known` are for the recursion: references
        that are being followed, and the types by reference, which are added here.
        """
        if isinstance(node, bool):
            return ALL_TYPES if node else frozenset()
        known = {} if known is None else known
        found = ALL_TYPES
        if "type" in node:
            found = frozenset().union(*(TYPES[name] for name in type_names(node)))
        if (listed := listed_values(node)) is not None:
            found &= {kind(value) for value in listed}
        if (ref := node.get("$ref")) is not None and ref not in within:
            if ref not in known:
                known[ref] = self.types(self.target(ref), within | {ref}, known)
            found &= known[ref]
        if "anyOf" in node:
            found &= frozenset().union(*(self.types(one, within, known) for one in node["anyOf"]))
        for one in node.get("allOf", ()):
            found &= self.types(one, within, known)
        return found

    def text(self, node: Node) -> str:
        """Return `node`, as the root of a schema with these definitions, as llguidance reads it."""
        options = {
            "whitespace_pattern": WHITESPACE,
            # an escape could spell the name of a named property in another way
            "json_allowed_escapes": 'nrbtf\\"' + ("u" if self.closed else ""),
        }
        body = {"x-guidance": options, **(node if isinstance(node, dict) else {"allOf": [node]})}
        if self.defs:
            body["$defs"] = self.defs
        return json.dumps(body)

    def problem(self, node: Node) -> str | None:
        return compile_error(LLMatcher.grammar_from_json_schema(self.text(node)))

    def is_satisfiable(self, node: Node) -> bool:
        return "nsatisfiable" not in (self.problem(node) or "")


def type_names(node: Mapping[str, Any]) -> Sequence[str]:
    names = node.get("type", ())
    return [names] if isinstance(names, str) else names


def listed_values(node: Mapping[str, Any]) -> Sequence[Any] | None:
    return [node["const"]] if "const" in node else node.get("enum")


def kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds = {float: "fraction", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def steps(pointer: str) -> list[str]:
    """Return the names and indices of which a JSON Pointer, such as "/a/0", consists."""
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def check(schema: Any, *, param: str, at: str = "schema") -> Schema:
    """Check a JSON Schema, and return it rewritten for llguidance.

    `param`: the field of the request that has the schema, and `at`: the name of the schema; errors
    name both. Raises BadRequest if `schema` is no JSON Schema, if no value satisfies it, or if it
    cannot be enforced.
    """
    if not isinstance(schema, dict | bool):
        reason = f"{at} must be a JSON object, got {_short(schema)}"
        raise BadRequest(reason, param=param, code=CODE)
    try:
        return _Check(schema, param, at).run()
    except RecursionError:
        raise BadRequest(f"{at}: {_TOO_DEEP}", param=param, code=CODE) from None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond 1.8e308
        return False


def _escape(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


class _Check:
    def __init__(self, root: Any, param: str, at: str):
        self._source = root
        self._param = param
        self._at = at
        self._names: dict[str, str] = {}
        self._defs: dict[str, Node] = {}
        self._pending: list[tuple[str, Any, str]] = []
        self._one_of: list[tuple[dict[str, Any], str]] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._closed = True
        self._until = time.perf_counter() + _LONGEST_S

    def run(self) -> Schema:
        root = self._node(self._source, "")
        while self._pending:
            name, target, pointer = self._pending.pop()
            self._defs[name] = self._node(target, pointer)
        schema = Schema(root, self._defs, self._closed)
        for node, pointer in self._one_of:
            self._exclude_each_other(schema, node, pointer)
        if not _has_finite_value(schema):
            raise self._refuse("", "no finite value satisfies the schema")
        self._compile(schema)
        return schema

    def _refuse(self, pointer: str, reason: str) -> BadRequest:
        message = f"{self._at}: {reason} at {pointer or '/'}"
        return BadRequest(message, param=self._param, code=CODE)

    def _expect(self, holds: bool, what: str, value: Any, pointer: str) -> None:
        if not holds:
            raise self._refuse(pointer, f"expected {what}, got {_short(value)}")

    def _node(self, node: Any, pointer: str) -> Node:
        """Check a node of the schema, and those in it; return a copy that llguidance can enforce.

        In the copy, keywords that restrict nothing are left out, references are `#/$defs/NAME`, and
        numeric bounds are narrowed to values that a 64-bit float can hold; `run` replaces `oneOf`
        later.
        """
        if isinstance(node, bool):
            return node
        self._expect(isinstance(node, dict), "a schema", node, pointer)
        if pointer.count("/") > _DEEPEST:
            raise self._refuse(pointer, _TOO_DEEP)
        node = {key: value for key, value in node.items() if not _is_void(key, value, node)}
        if node.get("not", False) in ({}, True):
            return False
        for keyword in _REFUSED:
            if keyword in node:
                place = f"{pointer}/{_escape(keyword)}"
                raise self._refuse(place, f"the keyword `{keyword}` cannot be enforced")
        out: dict[str, Any] = {}
        for keyword, value in node.items():
            if (read := _READ.get(keyword)) is not None:
                out[keyword] = read(self, value, f"{pointer}/{_escape(keyword)}")
        self._strings(out, pointer)
        _narrow(out)
        self._object(out, pointer)
        self._places.append((out, pointer))
        return out

    # the values of keywords

    def _type(self, value: Any, pointer: str) -> Any:
        names = value if isinstance(value, list) and value else [value]
        for name in names:
            if not isinstance(name, str) or name not in TYPES:
                expected = ", ".join(sorted(TYPES))
                raise self._refuse(pointer, f"unknown type {_short(name)} (one of {expected})")
        return value

    def _schemas(self, value: Any, pointer: str) -> list[Node]:
        if not isinstance(value, list) or not value:
            raise self._refuse(pointer, "expected a list of schemas")
        return [self._node(one, f"{pointer}/{i}") for i, one in enumerate(value)]

    def _items(self, value: Any, pointer: str) -> Any:
        read = self._schemas if isinstance(value, list) else self._node
        return read(value, pointer)

    def _map(self, value: Any, pointer: str) -> dict[str, Node]:
        self._expect(isinstance(value, dict), "an object of schemas", value, pointer)
        return {name: self._node(one, f"{pointer}/{_escape(name)}") for name, one in value.items()}

    def _count(self, value: Any, pointer: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        counts = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        self._expect(counts, "a count", value, pointer)
        return int(value)

    def _bound(self, value: Any, pointer: str) -> Any:
        self._expect(isinstance(value, int | float), "a number", value, pointer)
        self._expect(_is_finite(value), "a finite number", value, pointer)
        return value

    def _divisor(self, value: Any, pointer: str) -> Any:
        if self._bound(value, pointer) > MOST_DIVISORS:
            raise self._refuse(pointer, f"expected at most {MOST_DIVISORS}, got {value}")
        return value

    def _required(self, value: Any, pointer: str) -> Any:
        listed = isinstance(value, list) and all(isinstance(name, str) for name in value)
        self._expect(listed, "a list of names", value, pointer)
        return value

    def _string(self, value: Any, pointer: str) -> Any:
        self._expect(isinstance(value, str), "a string", value, pointer)
        return value

    def _const(self, value: Any, pointer: str) -> Any:
        for number in _numbers(value):
            self._expect(_is_finite(number), "a finite number", number, pointer)
            if isinstance(number, int) and abs(number) > _EXACT and float(number) != number:
                raise self._refuse(pointer, f"the number {number} has no exact 64-bit float")
        return value

    def _enum(self, value: Any, pointer: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._refuse(pointer, "expected a list of values")
        return [self._const(one, f"{pointer}/{i}") for i, one in enumerate(value)]

    def _ref(self, value: Any, pointer: str) -> str:
        """Return the reference that replaces `value`, whose target is queued to be checked."""
        self._string(value, pointer)
        if not value.startswith("#"):
            raise self._refuse(pointer, f"`$ref` to {_short(value)} is not local (`#/...`)")
        if value not in self._names:
            target = self._target(value)
            if target is None:
                raise self._refuse(pointer, f"`$ref` cannot be resolved: {_short(value)}")
            self._names[value] = f"d{len(self._names)}"
            self._pending.append((self._names[value], *target))
        return f"{_DEFS}{self._names[value]}"

    def _target(self, ref: str) -> tuple[Any, str] | None:
        fragment = unquote(ref[1:])
        if fragment and not fragment.startswith("/"):
            return _anchored(self._source, fragment, "")
        target = self._source
        for part in steps(fragment):
            if isinstance(target, dict) and part in target:
                target = target[part]
            elif isinstance(target, list) and part.isdecimal() and int(part) < len(target):
                target = target[int(part)]
            else:
                return None
        return target, fragment

    # keywords that depend on others

    def _strings(self, node: dict[str, Any], pointer: str) -> None:
        if (found := node.get("format")) is None:
            return
        if "string" not in (type_names(node) or ["string"]):
            del node["format"]
        elif found not in FORMATS:
            known = ", ".join(sorted(FORMATS))
            reason = f"the `format` {_short(found)} cannot be enforced (known: {known})"
            raise self._refuse(f"{pointer}/format", reason)

    def _object(self, node: dict[str, Any], pointer: str) -> None:
        named = any(node.get(key) for key in ("properties", "patternProperties", "required"))
        fixed = node.get("additionalProperties") is False
        if named and not fixed:
            self._closed = False
        least = node.get("minProperties", 0)
        if least > len(set(node.get("required", ()))) + 1 and not (
            fixed and not node.get("patternProperties")
        ):
            # nothing keeps a name from being written twice
            reason = "`minProperties` cannot be enforced where names are free"
            raise self._refuse(f"{pointer}/minProperties", reason)
        if node.get("oneOf") is not None:
            self._one_of.append((node, pointer))

    def _exclude_each_other(self, schema: Schema, node: dict[str, Any], pointer: str) -> None:
        options, comparison = node["oneOf"], _Comparison(schema)
        for i, first in enumerate(options):
            if time.perf_counter() > self._until:
                reason = "the alternatives of `oneOf` take too long to compare; use `anyOf`,"
                raise self._refuse(f"{pointer}/oneOf", reason)
            for k, second in enumerate(options[:i]):
                if not comparison.are_disjoint(first, second):
                    reason = f"`oneOf` cannot be enforced: alternatives {k} and {i} may both hold"
                    raise self._refuse(f"{pointer}/oneOf", reason + "; use `anyOf`")
        del node["oneOf"]
        if "anyOf" in node:
            node["allOf"] = [*node.get("allOf", ()), {"anyOf": options}]
        else:
            node["anyOf"] = options

    def _compile(self, schema: Schema) -> None:
        """Refuse the schema if llguidance does, with the place that is the reason."""
        problem = schema.problem(schema.root)
        if problem is None:
            return
        for node, pointer in self._places:
            if time.perf_counter() > self._until:
                break
            if (found := schema.problem(node)) is None:
                continue
            for keyword in sorted(node, key=_SHARED.__contains__):
                less: Node = {key: value for key, value in node.items() if key != keyword}
                if keyword != "type" and schema.problem(less) is None:
                    place = f"{pointer}/{_escape(keyword)}"
                    raise self._refuse(place, f"the keyword `{keyword}`: {found},")
            raise self._refuse(pointer, found)
        raise self._refuse("", problem)


_READ: dict[str, Callable[[_Check, Any, str], Any]] = {
    "type": _Check._type,
    "$ref": _Check._ref,
    "const": _Check._const,
    "enum": _Check._enum,
    "required": _Check._required,
    "pattern": _Check._string,
    "format": _Check._string,
    "items": _Check._items,
    "additionalItems": _Check._node,
    "additionalProperties": _Check._node,
    "multipleOf": _Check._divisor,
    **dict.fromkeys(_LISTS, _Check._schemas),
    **dict.fromkeys(_MAPS, _Check._map),
    **dict.fromkeys(_COUNTS, _Check._count),
    **dict.fromkeys(_BOUNDS, _Check._bound),
}
"""Of the keywords that are enforced; other keywords do not restrict values."""


def _narrow(node: dict[str, Any]) -> None:
    """Narrow the numeric bounds of `node` in place to values that a 64-bit float can hold.

    If its type is "number", exclusive bounds become inclusive ones. No 64-bit float outside of
    the original bounds satisfies the new ones.
    """
    for keyword in _BOUNDS:
        value = node.get(keyword)
        if value is None or isinstance(value, bool):
            continue
        inward = math.inf if "inimum" in keyword else -math.inf
        bound = float(value)
        if (inward > 0 and bound < value) or (inward < 0 and bound > value):
            bound = math.nextafter(bound, inward)
        node[keyword] = int(bound) if bound.is_integer() else bound
    if node.get("type") != "number":
        return
    for inclusive, inward, pick in (("minimum", math.inf, max), ("maximum", -math.inf, min)):
        keyword = "exclusive" + inclusive.capitalize()
        value = node.get(keyword)
        if value is None or isinstance(value, bool):
            continue
        # the text 4.99999999999999999999 is below 5, and the number that it reads to is not
        bound = math.nextafter(value, inward) if value else math.copysign(_TINY, inward)
        node[inclusive] = pick(bound, node.get(inclusive, bound))
        del node[keyword]


def _is_void(keyword: str, value: Any, node: Mapping[str, Any]) -> bool:
    if value in _REFUSED.get(keyword, ()):
        return True
    if keyword in ("minContains", "maxContains"):
        return "contains" not in node
    if keyword == "if":
        return "then" not in node and "else" not in node
    return keyword in ("then", "else") and "if" not in node


def _anchored(node: Any, name: str, pointer: str) -> tuple[Any, str] | None:
    if isinstance(node, dict):
        if node.get("$anchor") == name:
            return node, pointer
        parts = [(_escape(key), value) for key, value in node.items()]
    elif isinstance(node, list):
        parts = [(str(i), value) for i, value in enumerate(node)]
    else:
        return None
    for key, value in parts:
        if (found := _anchored(value, name, f"{pointer}/{key}")) is not None:
            return found
    return None


def _numbers(value: Any) -> list[int | float]:
    if isinstance(value, list):
        return [number for one in value for number in _numbers(one)]
    if isinstance(value, dict):
        return [number for one in value.values() for number in _numbers(one)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _has_finite_value(schema: Schema) -> bool:
    """Return whether a value of finite size can satisfy a schema.

    Not so for an object that requires a member that requires such an object again, without end.
    """
    ending: set[str] = set()
    before = -1
    while before < len(ending):  # a reference ends if what it leads to does
        before = len(ending)
        for name in reversed(list(schema.defs)):  # most lead to later ones
            if name not in ending and _ends(schema, schema.defs[name], ending):
                ending.add(name)
    return _ends(schema, schema.root, ending)


def _ends(schema: Schema, node: Node, ending: Collection[str]) -> bool:
    if isinstance(node, bool):
        return node
    if listed_values(node) is not None:
        return True
    if (ref := node.get("$ref")) is not None and ref.removeprefix(_DEFS) not in ending:
        return False

    def follow(one: Node) -> bool:
        return _ends(schema, one, ending)

    return (
        all(follow(one) for one in node.get("allOf", ()))
        and ("anyOf" not in node or any(follow(one) for one in node["anyOf"]))
        and all(follow(one) for one in _least_parts(schema, node))
    )


def _least_parts(schema: Schema, node: dict[str, Any]) -> Sequence[Node]:
    """Return the schemas of the parts that every value of `node` has, if it is of one type."""
    types = schema.types(node)
    if types == {"object"}:
        named, others = node.get("properties", {}), node.get("additionalProperties", True)
        if node.get("patternProperties"):
            others = True
        return [named.get(name, others) for name in node.get("required", ())]
    if types == {"array"}:
        prefix, items = item_schemas(node)
        least = node.get("minItems", 0)
        return [*prefix[:least], *([items] if least > len(prefix) else [])]
    return ()


def item_schemas(node: Mapping[str, Any]) -> tuple[list[Node], Node]:
    items, prefix = node.get("items", True), node.get("prefixItems", [])
    if isinstance(items, list):
        return items, node.get("additionalItems", True)
    return prefix, items


class _Comparison:
    def __init__(self, schema: Schema):
        self._schema = schema
        self._known: dict[tuple[int, int], bool] = {}

    def are_disjoint(self, first: Node, second: Node, depth: int = 0) -> bool:
        pair = (id(first), id(second))
        if pair not in self._known:
            self._known[pair] = self._compare(first, second, depth)
        return self._known[pair]

    def _compare(self, first: Node, second: Node, depth: int) -> bool:
        shared = self._schema.types(first) & self._schema.types(second)
        if not shared:
            return True
        first, second = self._schema.resolve(first), self._schema.resolve(second)
        if isinstance(first, bool) or isinstance(second, bool) or depth > _DEEPEST_COMPARED:
            return False
        sides = ((first, second), (second, first))
        if any(
            "anyOf" in one
            and all(self.are_disjoint(option, other, depth + 1) for option in one["anyOf"])
            for one, other in sides
        ):
            return True
        values = [_listed(first), _listed(second)]
        if values[0] is not None and values[1] is not None:
            return not values[0] & values[1]
        return shared == {"object"} and any(
            self._excludes(one, other, name, depth)
            for one, other in sides
            for name in one.get("required", ())
        )

    def _excludes(
        self, one: Mapping[str, Any], other: Mapping[str, Any], name: str, depth: int
    ) -> bool:
        mine, its = one.get("properties", {}).get(name), other.get("properties", {}).get(name)
        if its is None:
            return other.get("additionalProperties") is False and not other.get("patternProperties")
        return mine is not None and self.are_disjoint(mine, its, depth + 1)


def _listed(node: Mapping[str, Any]) -> set[str] | None:
    listed = listed_values(node)
    if listed is None:
        return None
    return {json.dumps(_plain(value), sort_keys=True) for value in listed}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
