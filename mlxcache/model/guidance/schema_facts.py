"""Checked JSON Schemas, and what follows from them about the values that they allow.

Functions here find the types of these values, whether one of them has a finite size, and whether
two schemas exclude each other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Node = dict[str, Any] | bool
"""A node of a JSON Schema, as `json_schema.check` has rewritten it."""

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

_DEFS = "#/$defs/"
_DEEPEST = 8
"""Levels of nested comparisons; at deeper levels only types are compared."""


@dataclass(frozen=True, slots=True)
class Schema:
    """A checked schema: its root node, and the definitions to which `#/$defs/NAME` refers.

    `defs`: the definitions by NAME. `closed`: True if each part of the schema that names properties
    forbids all others, by `additionalProperties` false.
    """

    root: Node
    defs: Mapping[str, Node] = field(default_factory=dict)
    closed: bool = True
    """True if no object in it has both named properties and properties of any name."""

    def of(self, node: Node) -> Schema:
        """Return a schema with `node` as its root and the same definitions."""
        return Schema(node, self.defs, self.closed)

    def target(self, ref: str) -> Node:
        """Return the node of the schema to which the reference `ref` leads."""
        return self.defs[ref.removeprefix(_DEFS)]

    def resolve(self, node: Node) -> Node:
        """Return the node to which `node` leads, by one reference after another.

        This is `node` itself if it is more than a reference, or none. If the references lead in a
        circle, a node of the circle is returned.
        """
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

    def text(self) -> str:
        """Return the schema as JSON text, with llguidance's options for white space and escapes."""
        root = self.root if isinstance(self.root, dict) else {"allOf": [self.root]}
        options = {
            "whitespace_pattern": WHITESPACE,
            # an escape could spell the name of a named property in another way
            "json_allowed_escapes": 'nrbtf\\"' + ("u" if self.closed else ""),
        }
        body = {"x-guidance": options, **root}
        if self.defs:
            body["$defs"] = self.defs
        return json.dumps(body)


def type_names(node: Mapping[str, Any]) -> Sequence[str]:
    """Return the names in a node's `type`; empty if it has none."""
    names = node.get("type", ())
    return [names] if isinstance(names, str) else names


def listed_values(node: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values that a node's `const` or `enum` lists, or None if it has neither."""
    return [node["const"]] if "const" in node else node.get("enum")


def kind(value: Any) -> str:
    """Return the type of a JSON value, one of ALL_TYPES."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds = {float: "fraction", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def has_finite_value(schema: Schema, node: Node) -> bool:
    """Return whether a value of finite size can satisfy `node`, a node of `schema`.

    Not so for an object that requires a member that requires such an object again, without end.
    """
    ending: set[str] = set()
    before = -1
    while before < len(ending):  # a reference ends if what it leads to does
        before = len(ending)
        for name in reversed(list(schema.defs)):  # most lead to later ones
            if name not in ending and _ends(schema, schema.defs[name], ending):
                ending.add(name)
    return _ends(schema, node, ending)


def _ends(schema: Schema, node: Node, ending: Collection[str]) -> bool:
    """Return whether `has_finite_value` is already certain for `node`.

    It follows references only to definitions whose names are in `ending`: those known to have a
    value of finite size.
    """
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
    """Return the schemas of the parts that every value of `node` has.

    These are the required properties of objects, or the items that `minItems` demands of arrays.
    Empty if `node` allows values of several types.
    """
    types = schema.types(node)
    if types == {"object"}:
        named, others = node.get("properties", {}), node.get("additionalProperties", True)
        if node.get("patternProperties"):
            others = True
        return [named.get(name, others) for name in node.get("required", ())]
    if types == {"array"}:
        items, prefix = node.get("items", True), node.get("prefixItems", [])
        if isinstance(items, list):
            prefix, items = items, node.get("additionalItems", True)
        least = node.get("minItems", 0)
        return [*prefix[:least], *([items] if least > len(prefix) else [])]
    return ()


class Comparison:
    """Comparison of the nodes of one schema, with a cache of results.

    It must not be used after any of the nodes was changed.
    """

    def __init__(self, schema: Schema):
        self._schema = schema
        self._known: dict[tuple[int, int], bool] = {}

    def are_disjoint(self, first: Node, second: Node, depth: int = 0) -> bool:
        """Return True if it is certain that no value satisfies both nodes, otherwise False.

        `depth`: number of comparisons around this one, which bounds the recursion.
        """
        pair = (id(first), id(second))
        if pair not in self._known:
            self._known[pair] = self._compare(first, second, depth)
        return self._known[pair]

    def _compare(self, first: Node, second: Node, depth: int) -> bool:
        shared = self._schema.types(first) & self._schema.types(second)
        if not shared:
            return True
        first, second = self._schema.resolve(first), self._schema.resolve(second)
        if isinstance(first, bool) or isinstance(second, bool) or depth > _DEEPEST:
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
        """Return whether `other` certainly forbids the property `name`, which `one` requires.

        That is so if `other` allows no property of this name, or none with a value that `one`
        allows. `depth`: number of comparisons around this one.
        """
        mine, its = one.get("properties", {}).get(name), other.get("properties", {}).get(name)
        if its is None:
            return other.get("additionalProperties") is False and not other.get("patternProperties")
        return mine is not None and self.are_disjoint(mine, its, depth + 1)


def _listed(node: Mapping[str, Any]) -> set[str] | None:
    """Return the values of a node's `const` or `enum` as JSON texts, or None if it has neither."""
    listed = listed_values(node)
    if listed is None:
        return None
    return {json.dumps(_plain(value), sort_keys=True) for value in listed}


def _plain(value: Any) -> Any:
    """Convert a JSON value so that equal values have equal texts.

    In JSON Schema 1.0 and 1 are equal.
    """
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
