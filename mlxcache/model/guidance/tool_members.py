"""A tool that may be called, and its arguments as members of an object in a grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxcache.model.guidance.json_schema import is_satisfiable
from mlxcache.model.guidance.lark import Lark, literal, one_of
from mlxcache.model.guidance.schema_facts import Node, Schema, listed_values
from mlxcache.model.guidance.schema_merge import Plain, alternatives, names_of
from mlxcache.model.guidance.text_values import Unwritable

EMPTY = '""'
"""Grammar expression that matches only the empty text."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called, by its name.

    `schema` is that of its arguments, or None for any object.
    """

    name: str
    schema: Schema | None


def of_kinds(node: Node, kinds: frozenset[str]) -> Node:
    """Return the schema of the values of `node` that are of one of the `kinds`.

    The kinds are named as `Schema.types` returns them.
    """
    types = {"type": names_of(kinds)}
    return types if isinstance(node, bool) else {"allOf": [node, types]}


Written = list[tuple[str, bool]]
"""Grammar expressions of an object's members in order, and whether each is required."""


def is_free(schema: Schema) -> bool:
    """Return whether a schema allows arguments of any names and values."""
    return schema.resolve(schema.root) in (True, {}, {"type": "object"})


def object_shapes(schema: Schema) -> list[Plain]:
    """Return schemas without combinators for the objects that a tool's arguments may be.

    Combinators are `$ref`, `anyOf` and `allOf`. `schema`: that of the arguments. Raises Unwritable
    if a keyword cannot be expressed in a tool-call syntax, or if no object is allowed.
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


def members_of(schema: Schema, shape: Plain, write: Callable[[str, Node], str]) -> Written:
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


def separated(lark: Lark, members: Written, comma: str) -> str:
    """Return a grammar expression for an object's members, with `comma` between those present.

    `members`: the result of `members_of`. Those that are not required may be absent.
    """
    rest, first = EMPTY, EMPTY  # what may follow a member, and what may come where none is yet
    for member, needed in reversed(members):
        after = f"{literal(comma)} {member} {rest}"
        begun = f"{member} {rest}"
        first = lark.rule(begun if needed else one_of((begun, first)))
        rest = lark.rule(after if needed else one_of((after, rest)))
    return first
