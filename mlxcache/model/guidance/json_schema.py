"""Check of JSON Schemas, and their conversion to a form that llguidance enforces exactly.

llguidance compiles most of JSON Schema, and refuses most of what it cannot enforce. This module
covers the rest: it refuses keywords that cannot be enforced, with their place in the schema. It
rewrites references (any local pointer or anchor becomes a name below `$defs`), `oneOf` with
alternatives that exclude each other, and bounds that a 64-bit float would widen.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

from mlxcache.errors import BadRequest
from mlxcache.model.guidance.lark import MOST_DIVISORS, compile_error
from mlxcache.model.guidance.schema_facts import (
    TYPES,
    Comparison,
    Node,
    Schema,
    has_finite_value,
    type_names,
)

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Values of `format` that can be enforced."""

CODE = "invalid_schema"
"""Code of errors in schemas, in the API's error body."""

_REFUSED = (
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
_VOID: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Values with which a keyword has no effect, by keyword."""
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_EXACT = 2**53
"""Integers up to this one are exact as 64-bit floats."""
_TINY = 1e-30
"""Bound, or its negative, that replaces an exclusive bound of 0."""
_SHARED = ("properties", "required", "additionalProperties")  # seldom the cause
_DEEPEST = 200
_TOO_DEEP = "schemas are nested too deeply"
_LONGEST_S = 5.0  # after this a slow check is given up, in seconds


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


def is_satisfiable(schema: Schema, node: Node) -> bool:
    """Return False if llguidance finds that no value satisfies `node`, otherwise True.

    `schema`: a result of `check`, for the definitions to which `node` refers.
    """
    reason = _problem(schema.of(node))
    return reason is None or "nsatisfiable" not in reason


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_finite(number: float) -> bool:
    """Return whether a number fits a 64-bit float: no infinity, NaN or integer beyond 1.8e308."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _escape(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


class _Check:
    """One check of the JSON Schema `root`; `run` returns the schema as llguidance can enforce it.

    `param` and `at` are those of `check`: the request's field and the schema's name in errors.
    `run` raises BadRequest if the schema cannot be enforced.
    """

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
        if not has_finite_value(schema, root):
            raise self._refuse("", "no finite value satisfies the schema")
        self._compile(schema)
        return schema

    def _refuse(self, pointer: str, reason: str) -> BadRequest:
        message = f"{self._at}: {reason} at {pointer or '/'}"
        return BadRequest(message, param=self._param, code=CODE)

    def _node(self, node: Any, pointer: str) -> Node:
        """Check a node of the schema, and those in it; return a copy that llguidance can enforce.

        In the copy, keywords that restrict nothing are left out, references are `#/$defs/NAME`, and
        numeric bounds are narrowed to values that a 64-bit float can hold; `run` replaces `oneOf`
        later. `pointer`: the JSON Pointer of `node`, for errors. Raises BadRequest if `node` is no
        schema, is nested more than `_DEEPEST` levels deep, or has a keyword or a value that cannot
        be enforced.
        """
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise self._refuse(pointer, f"expected a schema, got {_short(node)}")
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
        self._numbers(out, pointer)
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
        if not isinstance(value, dict):
            raise self._refuse(pointer, f"expected an object of schemas, got {_short(value)}")
        return {name: self._node(one, f"{pointer}/{_escape(name)}") for name, one in value.items()}

    def _count(self, value: Any, pointer: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._refuse(pointer, f"expected a count, got {_short(value)}")
        return value

    def _bound(self, value: Any, pointer: str) -> Any:
        if not isinstance(value, int | float):
            raise self._refuse(pointer, f"expected a number, got {_short(value)}")
        if not _is_finite(value):
            raise self._refuse(pointer, f"expected a finite number, got {_short(value)}")
        return value

    def _divisor(self, value: Any, pointer: str) -> Any:
        if self._bound(value, pointer) > MOST_DIVISORS:
            raise self._refuse(pointer, f"expected at most {MOST_DIVISORS}, got {value}")
        return value

    def _required(self, value: Any, pointer: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._refuse(pointer, f"expected a list of names, got {_short(value)}")
        return value

    def _string(self, value: Any, pointer: str) -> str:
        if not isinstance(value, str):
            raise self._refuse(pointer, f"expected a string, got {_short(value)}")
        return value

    def _const(self, value: Any, pointer: str) -> Any:
        for number in _numbers(value):
            if not _is_finite(number):
                raise self._refuse(pointer, f"expected a finite number, got {_short(number)}")
            if isinstance(number, int) and abs(number) > _EXACT and float(number) != number:
                raise self._refuse(pointer, f"the number {number} has no exact 64-bit float")
        return value

    def _enum(self, value: Any, pointer: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._refuse(pointer, "expected a list of values")
        return [self._const(one, f"{pointer}/{i}") for i, one in enumerate(value)]

    def _ref(self, value: Any, pointer: str) -> str:
        """Return the reference `#/$defs/NAME` that replaces the reference `value`.

        The part of the schema to which `value` leads is queued to be checked. `pointer`: the
        JSON Pointer of the reference, for errors. Raises BadRequest for a reference that is not
        local or leads nowhere.
        """
        if not isinstance(value, str):
            raise self._refuse(pointer, f"expected a string, got {_short(value)}")
        if not value.startswith("#"):
            raise self._refuse(pointer, f"`$ref` to {_short(value)} is not local (`#/...`)")
        if value not in self._names:
            target, place = self._target(value, pointer)
            self._names[value] = f"d{len(self._names)}"
            self._pending.append((self._names[value], target, place))
        return f"#/$defs/{self._names[value]}"

    def _target(self, ref: str, pointer: str) -> tuple[Any, str]:
        """Return the part of the schema to which `ref` leads, and that part's JSON Pointer.

        `pointer`: the JSON Pointer of the reference, for errors. Raises BadRequest if `ref` leads
        nowhere.
        """
        fragment = unquote(ref[1:])
        if fragment and not fragment.startswith("/"):
            found = _anchored(self._source, fragment, "")
            if found is None:
                raise self._refuse(pointer, f"`$ref` cannot be resolved: {_short(ref)}")
            return found
        target = self._source
        for step in fragment.split("/")[1:]:
            part = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and part in target:
                target = target[part]
            elif isinstance(target, list) and part.isdecimal() and int(part) < len(target):
                target = target[int(part)]
            else:
                raise self._refuse(pointer, f"`$ref` cannot be resolved: {_short(ref)}")
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

    def _numbers(self, node: dict[str, Any], pointer: str) -> None:
        """Narrow the numeric bounds of `node` in place to values that a 64-bit float can hold.

        If its type is "number", exclusive bounds become inclusive ones. No 64-bit float outside of
        the original bounds satisfies the new ones. `pointer` is not used.
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
        for inclusive in ("minimum", "maximum"):
            keyword = "exclusive" + inclusive.capitalize()
            value = node.get(keyword)
            if value is None or isinstance(value, bool):
                continue
            # the text 4.99999999999999999999 is below 5, and the number that it reads to is not
            inward = math.inf if inclusive == "minimum" else -math.inf
            bound = math.nextafter(value, inward) if value else math.copysign(_TINY, inward)
            other = node.get(inclusive)
            pick = max if inclusive == "minimum" else min
            node[inclusive] = bound if other is None else pick(bound, other)
            del node[keyword]

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
        options, comparison = node["oneOf"], Comparison(schema)
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
        """Check that llguidance can compile the schema.

        Raises BadRequest with the place and the reason if llguidance refuses a part of it.
        """
        problem = _problem(schema)
        if problem is None:
            return
        for node, pointer in self._places:
            if time.perf_counter() > self._until:
                break
            if (found := _problem(schema.of(node))) is None:
                continue
            for keyword in sorted(node, key=_SHARED.__contains__):
                less = {key: value for key, value in node.items() if key != keyword}
                if keyword != "type" and _problem(schema.of(less)) is None:
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
"""Parsers of the values of keywords that are enforced; other keywords do not restrict values."""


def _is_void(keyword: str, value: Any, node: Mapping[str, Any]) -> bool:
    """Return whether `keyword` is one that cannot be enforced, but has no effect in `node`.

    `value`: the keyword's value, such as false for `uniqueItems`. `node`: the node that has it.
    """
    if keyword in _VOID:
        return value in _VOID[keyword]
    if keyword in ("minContains", "maxContains"):
        return "contains" not in node
    if keyword == "if":
        return "then" not in node and "else" not in node
    return keyword in ("then", "else") and "if" not in node


def _anchored(node: Any, name: str, pointer: str) -> tuple[Any, str] | None:
    """Find the schema in `node` whose `$anchor` is `name`; return it and its JSON Pointer.

    `pointer`: the JSON Pointer of `node`. Returns None if there is no such schema.
    """
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


def _problem(schema: Schema) -> str | None:
    """Return the reason why llguidance refuses a schema, or None if it compiles."""
    return compile_error(LLMatcher.grammar_from_json_schema(schema.text()))
