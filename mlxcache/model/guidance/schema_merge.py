"""Removal of combinators from schemas: `anyOf`, `allOf` and references become alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlxcache.model.guidance.schema_facts import TYPES, Node, Schema, type_names
from mlxcache.model.guidance.text_values import Unwritable

_MOST = 64
"""Most alternatives of one schema."""
_MOST_READ = 5000
"""Most nodes that are visited for one schema, in which references may branch."""
_COMBINE = ("$ref", "anyOf", "allOf")
_HIGHER = ("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum")
_LOWER = ("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum")
_OBJECT = ("properties", "additionalProperties")

Plain = dict[str, Any]
"""A schema node without references and combinators at its top level."""


def alternatives(schema: Schema, node: Node) -> list[Plain]:
    """Return nodes without combinators; `node` allows the values that any of them allows.

    Combinators are `$ref`, `anyOf` and `allOf`; nodes below the top level keep theirs. Empty if
    it is found that `node` allows no value. Raises Unwritable if keywords cannot be merged, if
    there are too many alternatives, or if combinators lead from `node` back to itself.
    """
    return _expand(schema, node, frozenset(), iter(range(_MOST_READ)))


def _expand(schema: Schema, node: Node, within: frozenset[str], left: Iterator[int]) -> list[Plain]:
    """Return the result of `alternatives` for `node`, by recursion over its parts.

    `within`: references that are being followed. `left`: an iterator with one item for each node
    that may still be visited. Raises Unwritable as `alternatives` does.
    """
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
        merged = [merge(first, second) for first in found for second in expanded]
        found = [one for one in merged if one is not None]
    return found


def merge(first: Plain, second: Plain) -> Plain | None:
    """Merge two nodes without combinators into one for the values that satisfy both.

    Combinators are `$ref`, `anyOf` and `allOf`. Returns None if the nodes have no type of values in
    common. Raises Unwritable if the keywords cannot be merged.
    """
    out = {**first, **{key: value for key, value in second.items() if key not in first}}
    for key in first.keys() & second.keys() - set(_OBJECT):
        mine, its = first[key], second[key]
        if mine == its:
            continue
        if key == "type":
            out[key] = _common_types(first, second)
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


def _common_types(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    mine, its = (
        frozenset().union(*(TYPES[name] for name in type_names(side))) for side in (first, second)
    )
    return names_of(mine & its)


def names_of(kinds: frozenset[str]) -> list[str]:
    """Return the names that JSON Schema's `type` has for `kinds`, types of ALL_TYPES.

    If "fraction" is among them, "number" takes the place of both "fraction" and "integer".
    """
    if "fraction" in kinds:
        kinds = kinds - {"fraction", "integer"} | {"number"}
    return sorted(kinds)


def _merged_objects(first: Plain, second: Plain) -> Plain:
    named: dict[str, Node] = {}
    mine, its = (
        (side.get("properties", {}), side.get("additionalProperties", True))
        for side in (first, second)
    )
    for name in (*mine[0], *its[0]):
        named[name] = both(mine[0].get(name, mine[1]), its[0].get(name, its[1]))
    return {"properties": named, "additionalProperties": both(mine[1], its[1])}


def both(first: Node, second: Node) -> Node:
    """Return a node for values that satisfy both nodes, which may have combinators.

    This is `allOf` of both, if there is no simpler one.
    """
    if first is False or second is False:
        return False
    if first in (True, {}) or first == second:
        return second
    return first if second in (True, {}) else {"allOf": [first, second]}
