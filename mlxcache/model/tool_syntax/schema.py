"""Parameters of tools by their JSON Schemas: their types, and a check of values.

The check covers what decides between two readings of a tool call: types, required and known
properties, enum and const, through $ref, anyOf, oneOf, allOf and nullable. It accepts every keyword
that it does not support, because no call is refused here: clients validate arguments themselves.
Source: https://json-schema.org/draft/2020-12/json-schema-validation
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.model.tool_syntax.literals import LiteralReader
from mlxcache.model.tool_syntax.values import Number, loads

Kinds = frozenset[str]
"""Types of JSON values, by their names in JSON Schema."""

ANY: Kinds = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_SYNONYMS = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "long", "short", "uint"), "integer"),
    **dict.fromkeys(("float", "double", "num"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "arr", "tuple"), "array"),
    "none": "null",
}
_DEEPEST = 30  # of references and compositions; a schema may refer to itself
_MOST_NODES = 20_000
"""Maximum number of pairs of a value and a schema that one check visits; branching references are
exponential.
"""
_WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True, slots=True)
class Parsed:
    """The `value` of an argument; `valid` is true if it fits its schema."""

    value: Any
    valid: bool


class Tool:
    """Parameters of one tool. `function` is the tool's definition as chat templates take it."""

    def __init__(self, function: Mapping[str, Any]):
        parameters = function.get("parameters")
        self._root: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        self._schema = _resolve(self._root, self._root)
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        extra = self._schema.get("additionalProperties", self._schema.get("patternProperties"))
        self.open = bool(extra) or isinstance(extra, Mapping) or not self._properties
        """True if the schema allows parameters of any name, or names none."""

    def has(self, name: str) -> bool:
        """Return whether the tool's schema has a parameter `name`."""
        return name in self._properties

    def parse(self, name: str, raw: str, hint: str = "") -> Parsed:
        """Convert `raw`, the text of the parameter `name`, to the type that its schema has.

        `hint`: the type that the model wrote with the value, such as "string", or "". Text that
        fits no type of the schema stays a string. For a parameter without a schema, any type fits.
        """
        schema = self._properties.get(name, {})
        kinds = kinds_of(schema, self._root)
        if hint == "string":
            return Parsed(raw, self._fits(raw, schema))
        if "string" in kinds and (len(kinds) == 1 or self._listed(raw, schema)):
            return Parsed(raw, self._fits(raw, schema))
        value, found = _literal(raw, kinds)
        if found and (hint or "string" not in kinds or not isinstance(value, str)):
            if self._fits(value, schema):
                return Parsed(value, True)
            if "string" not in kinds:
                return Parsed(value, False)
        return Parsed(raw, "string" in kinds and self._fits(raw, schema))

    def check(self, name: str, value: Any) -> Parsed:
        """Return `value`, unchanged, and whether it fits the schema of the parameter `name`."""
        return Parsed(value, self._fits(value, self._properties.get(name, {})))

    def valid(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether `arguments` has all required names and no forbidden ones.

        Unknown names are forbidden if the schema has `additionalProperties: false`. Values are not
        checked.
        """
        required = self._schema.get("required")
        if isinstance(required, Sequence) and not set(map(str, required)) <= set(arguments):
            return False
        closed = self._schema.get("additionalProperties") is False
        return not closed or all(name in self._properties for name in arguments)

    def _fits(self, value: Any, schema: Any) -> bool:
        return fits(value, schema, self._root)

    def _listed(self, raw: str, schema: Any) -> bool:
        """Return whether the text `raw` is one of the values in the schema's `enum`."""
        found = _resolve(schema, self._root).get("enum")
        return isinstance(found, Sequence) and raw in found


class Tools:
    """The tools of a request by name, each with the parameters of its JSON Schema."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()):
        self.definitions = [_complete(tool) for tool in tools]
        """The tools as they were given, each with the key `parameters`."""
        functions = [tool["function"] for tool in self.definitions]
        self._tools = {str(function.get("name")): Tool(function) for function in functions}
        self._unknown = Tool({})

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def __getitem__(self, name: str) -> Tool:
        """Return the tool with this name, or one that accepts any arguments if there is none."""
        return self._tools.get(name, self._unknown)


def _complete(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tool's definition, with empty `parameters` if it has none.

    Some parsers need the key.
    """
    return {**tool, "function": {"parameters": {}, **(tool.get("function") or {})}}


class _Walk:
    """Limits of one traversal of a value or a schema, against very deep or branching ones.

    `root`: the schema in which references are resolved. At most `_MOST_NODES` nodes are visited.
    """

    def __init__(self, root: Mapping[str, Any]):
        self.root = root
        self._left = _MOST_NODES

    def ends(self, schema: Any, depth: int) -> bool:
        """Count a visited node; return True if nothing below it may be visited.

        `schema`: the node. `depth`: number of nodes that enclose it.
        """
        self._left -= 1
        return not isinstance(schema, Mapping) or depth > _DEEPEST or self._left < 0


def kinds_of(schema: Any, root: Mapping[str, Any]) -> Kinds:
    """Return the JSON types that a schema allows.

    They are names of JSON Schema, such as "string"; all of them if the schema does not limit the
    type. "number" stands for all numbers, also whole ones; "integer" without "number" for whole
    ones only. `root`: the schema in which references are resolved.
    """
    return _kinds(schema, _Walk(root), 0)


def _kinds(schema: Any, walk: _Walk, depth: int) -> Kinds:
    if walk.ends(schema, depth):
        return ANY
    schema = _resolve(schema, walk.root)
    kinds = _named(schema)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), Sequence) and schema[key]:
            found = [_kinds(branch, walk, depth + 1) for branch in schema[key]]
            kinds &= frozenset().union(*found)
    if isinstance(schema.get("allOf"), Sequence):
        for branch in schema["allOf"]:
            kinds &= _kinds(branch, walk, depth + 1)
    if schema.get("nullable") is True:
        kinds |= {"null"}
    return kinds or ANY


def _named(schema: Mapping[str, Any]) -> Kinds:
    kinds = ANY
    if (given := schema.get("type")) is not None:
        names = [given] if isinstance(given, str) else given
        if isinstance(names, Sequence):
            lowered = [str(n).strip().lower() for n in names]
            kinds = frozenset(_SYNONYMS.get(n, n) for n in lowered) & ANY or ANY
    elif "properties" in schema:
        kinds = frozenset({"object"})
    elif "items" in schema:
        kinds = frozenset({"array"})
    listed = schema.get("enum")
    if "const" in schema:
        listed = [schema["const"]]
    if isinstance(listed, Sequence) and listed and kinds is ANY:
        kinds = frozenset(kind for value in listed for kind in _kinds_of_value(value))
    return kinds


def _resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow the local `$ref` of a JSON Schema, if it has one, and return its target.

    Returns an empty schema for a reference that cannot be resolved in `root`.
    """
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#"):
            return {}
        found: Any = root
        for escaped in reference[1:].split("/")[1:]:
            part = escaped.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, Mapping) else None
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**found, **rest} if isinstance(found, Mapping) else {}
    return {}


def fits(value: Any, schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether a value fits a schema, by the keywords that this module supports.

    Parts of the value beyond the first `_MOST_NODES` visited nodes are not checked. `root`: the
    schema in which references are resolved.
    """
    return _fits(value, schema, _Walk(root), 0)


def _fits(value: Any, schema: Any, walk: _Walk, depth: int) -> bool:
    if walk.ends(schema, depth):
        return schema is not False
    schema = _resolve(schema, walk.root)
    if value is None and schema.get("nullable") is True:
        return True
    if not _kinds_of_value(value) & _named(schema):
        return False
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, Sequence) and not any(_equal(value, item) for item in listed):
        return False
    return _composed(value, schema, walk, depth) and _parts_fit(value, schema, walk, depth)


def _composed(value: Any, schema: Mapping[str, Any], walk: _Walk, depth: int) -> bool:
    def branch_fits(branch: Any) -> bool:
        return _fits(value, branch, walk, depth + 1)

    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        branches = schema.get(key)
        if isinstance(branches, Sequence) and branches and not enough(map(branch_fits, branches)):
            return False
    return True


def _parts_fit(value: Any, schema: Mapping[str, Any], walk: _Walk, depth: int) -> bool:
    if isinstance(value, dict):
        required = schema.get("required")
        if isinstance(required, Sequence) and not all(name in value for name in required):
            return False
        properties = schema.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        extra = schema.get("additionalProperties", True)
        return all(
            _fits(item, known.get(name, extra), walk, depth + 1) for name, item in value.items()
        )
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"], walk, depth + 1) for item in value)
    return True


def _kinds_of_value(value: Any) -> Kinds:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int | float | Number):
        whole = value.integral if isinstance(value, Number) else value == value // 1
        return frozenset({"integer", "number"} if whole else {"number"})
    names = ((str, "string"), (dict, "object"), (list, "array"))
    return frozenset({next((name for kind, name in names if isinstance(value, kind)), "null")})


def _equal(value: Any, item: Any) -> bool:
    if isinstance(value, Number):
        return isinstance(item, int | float) and float(value.text) == item
    return isinstance(value, bool) == isinstance(item, bool) and bool(value == item)


def _literal(raw: str, kinds: Kinds) -> tuple[Any, bool]:
    """Parse `raw` as JSON or, if `kinds` has no "string", as a Python literal.

    `kinds`: the types that the schema allows. Returns the value and True. If `raw` is neither, the
    second member is False and the first one is not to be used.
    """
    text = raw.strip()
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        return (None, False) if "string" in kinds else _python_literal(text)
    integer = "integer" in kinds and "number" not in kinds
    if integer and isinstance(value, float) and value.is_integer():
        return int(value), True
    return value, True


def _python_literal(text: str) -> tuple[Any, bool]:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()], True
    if not text.startswith(("{", "[", "(")):
        return None, False
    reader = LiteralReader(text)
    try:
        value = reader.value()
    except ValueError:
        return None, False
    return value, reader.at == len(text)
