"""Random JSON Schemas: nested, with values, patterns, formats, references, bounds and unions."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
Drawn = st.SearchStrategy[Any]

PATTERNS = (
    "^[a-z]+$",
    "^a|b$",
    "[0-9]{3}",
    "^(?:x|yy)*z",
    "[^a-c]$",
    "\\d+-\\d+",
    "^.{2,5}$",
    "é+",
)
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uuid")
NAMES = ("a", "b", "name", "with space", "é", 'q"t', "n\\l", "$ref", "items")
VALUES: tuple[Any, ...] = (None, True, False, 0, -3, 7, 1.5, "x", "", 'a"b', "日本", "a\nb")
LISTS: tuple[Any, ...] = (*VALUES, [], [1, "a"], {"k": None}, {"a": [{}]})
REFERENCES = ("#/$defs/word", "#/$defs/tree", "#/definitions/a~1pair", "#named")

DEFS: Schema = {
    "$defs": {
        "word": {"type": "string", "maxLength": 6, "$anchor": "named"},
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        },
    },
    "definitions": {"a/pair": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2}},
}

COUNT = st.integers(0, 4)
BOUND = st.one_of(st.integers(-50, 50), st.integers(-200, 200).map(lambda n: n / 4))


def schemas() -> st.SearchStrategy[Schema]:
    return st.recursive(_leaf(), _nested, max_leaves=8).map(lambda schema: {**schema, **DEFS})


def values() -> st.SearchStrategy[Schema]:
    """Schemas of strings, numbers, listed values, and arrays of them, which something satisfies."""
    count = st.integers(0, 3)
    # \d has the digits of all scripts in Python only
    patterns = st.sampled_from([pattern for pattern in PATTERNS if "\\d" not in pattern])
    leaves = st.one_of(
        st.builds(
            lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n}, count, count
        ),
        _object({"type": st.just("string"), "pattern": patterns}),
        st.builds(
            lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n},
            BOUND,
            st.integers(1, 99),
        ),
        _object({"type": st.sampled_from(["boolean", "null", "string", "integer"])}),
        _object({"enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=4)}),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            _object({"type": st.just("array"), "items": inner, "maxItems": count}),
            _object({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        ),
        max_leaves=4,
    )


def _leaf() -> Drawn:
    number = {
        "type": st.sampled_from(["integer", "number"]),
        "?minimum": BOUND,
        "?maximum": BOUND,
        "?exclusiveMinimum": BOUND,
        "?exclusiveMaximum": BOUND,
        "?multipleOf": st.sampled_from([1, 2, 3, 5]),
    }
    kinds = ["null", "boolean", "string", "integer", "number"]
    return st.one_of(
        _object({"type": st.just("string"), "?minLength": COUNT, "?maxLength": COUNT}),
        _object({"type": st.just("string"), "pattern": st.sampled_from(PATTERNS)}),
        _object({"type": st.just("string"), "format": st.sampled_from(FORMATS)}),
        _object(number),
        _object({"type": st.lists(st.sampled_from(kinds), min_size=1, max_size=3, unique=True)}),
        _object({"enum": st.lists(st.sampled_from(LISTS), min_size=1, max_size=4)}),
        _object({"const": st.sampled_from(LISTS)}),
        _object({"$ref": st.sampled_from(REFERENCES)}),
        st.just({}),
    )


def _nested(inner: Drawn) -> Drawn:
    several = st.lists(inner, min_size=1, max_size=3)
    extra = st.one_of(st.just(False), inner)
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    required = st.lists(st.sampled_from(NAMES), max_size=3, unique=True)
    patterned = st.dictionaries(st.sampled_from(["^x_", "[0-9]$"]), inner, max_size=1)
    object_ = {"type": st.just("object"), "?additionalProperties": extra}
    return st.one_of(
        _object({**object_, "properties": named, "?required": required}),
        _object({**object_, "properties": named, "required": required, "?minProperties": COUNT}),
        _object({**object_, "patternProperties": patterned, "?maxProperties": COUNT}),
        _object(
            {"type": st.just("array"), "?items": extra, "?minItems": COUNT, "?maxItems": COUNT}
        ),
        _object({"type": st.just("array"), "prefixItems": several, "?items": extra}),
        _object({"anyOf": several, "?type": st.just("string")}),
        _object({"anyOf": several, "properties": named}),
        _object({"allOf": several}),
        _object({"oneOf": several}),
    )


def _object(parts: dict[str, Drawn]) -> Drawn:
    """Objects with these members; those that begin with `?` may be absent."""
    needed = {name: part for name, part in parts.items() if not name.startswith("?")}
    optional = {name[1:]: part for name, part in parts.items() if name.startswith("?")}
    return st.fixed_dictionaries(needed, optional=optional)
