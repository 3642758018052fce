"""Arguments of tool calls: values read without loss, and converted to the types of their schemas.

JSON keeps the digits of its numbers, and a duplicate key is an error. Literals are those of Python
or JSON; reading them executes nothing.

The check of values by JSON Schemas covers what decides between two readings of a tool call: types,
required and known properties, enum and const, through $ref, anyOf, oneOf, allOf and nullable. It
accepts every keyword that it does not support, because no call is refused here: clients validate
arguments themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.model.json_schema import kind, listed_values, steps

_LONGEST_INT = 4000  # Python refuses to convert more than 4,300 digits
DEEPEST_LITERAL = 200
_DEEPEST = 30  # of references and compositions; a schema may refer to itself
_MOST_NODES = 20_000  # that one check visits; branching references are exponential

# JSON


@dataclass(frozen=True, slots=True)
class Number:
    """A number kept as text, because Python's int or float would write it differently."""

    text: str

    @property
    def integral(self) -> bool:
        return self.text.lstrip("-").isdigit()


def loads(text: str) -> Any:
    """Parse JSON; strings may contain control characters.

    A number that Python could not write back unchanged becomes a `Number`. NaN, Infinity and a key
    that occurs twice in an object are a ValueError.
    """
    return _DECODER.decode(text)


def raw_decode(text: str, at: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at `at`, as `loads` does; return it and its end."""
    return _DECODER.raw_decode(text, at)


def dumps(value: Any) -> str:
    """Write JSON, escaping characters outside ASCII only if half a surrogate pair is among them."""
    text = _write(value, ascii_only=False)
    if any("\ud800" <= c <= "\udfff" for c in text):
        return _write(value, ascii_only=True)
    return text


def _write(value: Any, *, ascii_only: bool) -> str:
    try:
        return json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)
    except TypeError:  # a Number is in it
        return "".join(_parts(value, ascii_only))


def _parts(value: Any, ascii_only: bool) -> Iterator[str]:
    if isinstance(value, Number):
        yield value.text
    elif isinstance(value, dict):
        opening = "{"
        for key, item in value.items():
            yield f"{opening}{json.dumps(key, ensure_ascii=ascii_only)}: "
            yield from _parts(item, ascii_only)
            opening = ", "
        yield "}" if value else "{}"
    elif isinstance(value, list):
        opening = "["
        for item in value:
            yield opening
            yield from _parts(item, ascii_only)
            opening = ", "
        yield "]" if value else "[]"
    else:
        yield json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)


def _int(text: str) -> int | Number:
    return int(text) if len(text) <= _LONGEST_INT and text != "-0" else Number(text)


def _float(text: str) -> float | Number:
    value = float(text)
    return value if repr(value) == text else Number(text)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in an object")
    return found


_DECODER = json.JSONDecoder(
    strict=False,
    parse_int=_int,
    parse_float=_float,
    parse_constant=_constant,
    object_pairs_hook=_object,
)

# literals

_BARE = re.compile(r"[\w.+-]+")
_BLANK = re.compile(r"\s*")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ENDS = {q: re.compile(rf"[^\\{q}]*+(?:\\.[^\\{q}]*+)*+{q}", re.DOTALL) for q in "'\""}
_TRIPLE = {q: re.compile(rf"(?:[^\\{q}]++|\\.|{q}(?!{q}{q}))*+{q * 3}", re.DOTALL) for q in "'\""}
_ESCAPE = re.compile(
    r"\\(?:[nrtabfv\\'\"\n]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
)
_SIMPLE = dict(zip("nrtabfv\\'\"\n", "\n\r\t\a\b\f\v\\'\"", strict=False)) | {"\n": ""}


class LiteralReader:
    """Reader of Python or JSON literals, from left to right; raises ValueError for other text.

    Line ends in strings need no escape, and numbers are those of JSON. White space is skipped.
    """

    def __init__(self, text: str):
        self._text = text
        self.at = 0

    def has(self, symbol: str) -> bool:
        self._blank()
        if not self._text.startswith(symbol, self.at):
            return False
        self.at += len(symbol)
        return True

    def take(self, symbol: str) -> None:
        if not self.has(symbol):
            raise ValueError(f"{symbol!r} expected at {self._text[self.at : self.at + 40]!r}")

    def name(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self.at)
        if found is None:
            raise ValueError(f"no name at {self._text[self.at : self.at + 40]!r}")
        self.at = found.end()
        return str(found[1])

    def value(self, depth: int = 0) -> Any:
        """Read any literal inside `depth` containers; a tuple becomes a list."""
        self._blank()
        first = self._text[self.at : self.at + 1]
        if depth > DEEPEST_LITERAL:
            raise ValueError("nested too deeply")
        if first in ("'", '"') and first:
            return self._string(first)
        if first == "{":
            return self._object(depth)
        if first in ("[", "(") and first:
            closer = "]" if first == "[" else ")"
            return [self.value(depth + 1) for _ in self._until(closer)]
        found = _BARE.match(self._text, self.at)
        if found is None:
            raise ValueError(f"no value at {self._text[self.at : self.at + 40]!r}")
        self.at = found.end()
        return _WORDS[found[0]] if found[0] in _WORDS else loads(found[0])

    def _until(self, closer: str) -> Iterator[None]:
        self.at += 1
        begun = False
        while not self.has(closer):
            if begun:
                self.take(",")
                if self.has(closer):
                    break
            yield
            begun = True

    def _object(self, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in self._until("}"):
            key = self.value(depth + 1)
            self.take(":")
            if not isinstance(key, str) or key in value:
                raise ValueError("a key is no string, or occurs twice")
            value[key] = self.value(depth + 1)
        return value

    def _string(self, quote: str) -> str:
        marks = 3 if self._text.startswith(quote * 3, self.at) else 1
        start = self.at + marks
        found = (_TRIPLE if marks == 3 else _ENDS)[quote].match(self._text, start)
        if found is None:
            raise ValueError("a string has no end")
        self.at = found.end()
        return _ESCAPE.sub(_unescape, self._text[start : self.at - marks])

    def _blank(self) -> None:
        self.at = skip(self._text, self.at)


def skip(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is not white space."""
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _unescape(found: re.Match[str]) -> str:
    body = found[0][1:]
    if body in _SIMPLE:
        return _SIMPLE[body]
    return chr(int(body, 8) if body.isdigit() else int(body[1:], 16))


# types

Kinds = frozenset[str]
"""Types of JSON values, by their names in JSON Schema.

"number" stands for all numbers, also whole ones; "integer" without "number" for whole ones only.
"""

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


class Tool:
    def __init__(self, function: Mapping[str, Any]):
        parameters = function.get("parameters")
        self._root: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        self._schema = _resolve(self._root, self._root)
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        extra = self._schema.get("additionalProperties", self._schema.get("patternProperties"))
        self._open = bool(extra) or isinstance(extra, Mapping) or not self._properties

    def has(self, name: str) -> bool:
        return self._open or name in self._properties

    def parse(self, name: str, raw: str, hint: str = "") -> tuple[Any, bool]:
        """Convert `raw`, the text of the parameter `name`, to the type that its schema has.

        Returns the value, and whether it fits the schema. Text that fits no type of the schema
        stays a string. `hint`: the type that the model wrote, such as "string", or "".
        """
        schema = self._properties.get(name, {})
        kinds = _Walk(self._root).kinds(schema)
        if hint == "string":
            return raw, self.fits(name, raw)
        listed = _resolve(schema, self._root).get("enum")
        is_listed = isinstance(listed, Sequence) and raw in listed
        if "string" in kinds and (len(kinds) == 1 or is_listed):
            return raw, self.fits(name, raw)
        value, found = _literal(raw, kinds)
        if found and (hint or "string" not in kinds or not isinstance(value, str)):
            if self.fits(name, value):
                return value, True
            if "string" not in kinds:
                return value, False
        return raw, "string" in kinds and self.fits(name, raw)

    def fits(self, name: str, value: Any) -> bool:
        return _Walk(self._root).fits(value, self._properties.get(name, {}))

    def accepts(self, arguments: Mapping[str, Any]) -> bool:
        required = self._schema.get("required")
        if isinstance(required, Sequence) and not set(map(str, required)) <= set(arguments):
            return False
        closed = self._schema.get("additionalProperties") is False
        return not closed or all(name in self._properties for name in arguments)


class Tools:
    """The tools of a request by name; one with an unknown name accepts any arguments."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()):
        # some of mlx-lm's parsers need the key `parameters`
        self.definitions = [
            {**tool, "function": {"parameters": {}, **(tool.get("function") or {})}}
            for tool in tools
        ]
        functions = [tool["function"] for tool in self.definitions]
        self._tools = {str(function.get("name")): Tool(function) for function in functions}
        self._unknown = Tool({})

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def __getitem__(self, name: str) -> Tool:
        return self._tools.get(name, self._unknown)


class _Walk:
    """One traversal of a value and a schema, which visits at most `_MOST_NODES` nodes."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._left = _MOST_NODES

    def _ends(self, schema: Any, depth: int) -> bool:
        self._left -= 1
        return not isinstance(schema, Mapping) or depth > _DEEPEST or self._left < 0

    def kinds(self, schema: Any, depth: int = 0) -> Kinds:
        if self._ends(schema, depth):
            return ANY
        schema = _resolve(schema, self._root)
        kinds = _named(schema)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), Sequence) and schema[key]:
                found = [self.kinds(branch, depth + 1) for branch in schema[key]]
                kinds &= frozenset().union(*found)
        if isinstance(schema.get("allOf"), Sequence):
            for branch in schema["allOf"]:
                kinds &= self.kinds(branch, depth + 1)
        if schema.get("nullable") is True:
            kinds |= {"null"}
        return kinds or ANY

    def fits(self, value: Any, schema: Any, depth: int = 0) -> bool:
        if self._ends(schema, depth):
            return schema is not False
        schema = _resolve(schema, self._root)
        if value is None and schema.get("nullable") is True:
            return True
        if not _kinds_of_value(value) & _named(schema):
            return False
        listed = listed_values(schema)
        if isinstance(listed, Sequence) and not any(_equal(value, item) for item in listed):
            return False
        for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            branches = schema.get(key)
            if isinstance(branches, Sequence) and branches:
                fitting = (self.fits(value, branch, depth + 1) for branch in branches)
                if not enough(fitting):
                    return False
        return self._parts_fit(value, schema, depth)

    def _parts_fit(self, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
        if isinstance(value, dict):
            required = schema.get("required")
            if isinstance(required, Sequence) and not all(name in value for name in required):
                return False
            properties = schema.get("properties")
            known = properties if isinstance(properties, Mapping) else {}
            extra = schema.get("additionalProperties", True)
            return all(
                self.fits(item, known.get(name, extra), depth + 1) for name, item in value.items()
            )
        if isinstance(value, list) and "items" in schema:
            return all(self.fits(item, schema["items"], depth + 1) for item in value)
        return True


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
    listed = listed_values(schema)
    if isinstance(listed, Sequence) and listed and kinds is ANY:
        kinds = frozenset().union(*map(_kinds_of_value, listed))
    return kinds


def _resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow the local `$ref` of a schema, if it has one; an unknown target is an empty schema."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#"):
            return {}
        found: Any = root
        for part in steps(reference[1:]):
            found = found.get(part) if isinstance(found, Mapping) else None
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**found, **rest} if isinstance(found, Mapping) else {}
    return {}


def _kinds_of_value(value: Any) -> Kinds:
    if isinstance(value, Number):
        found = "integer" if value.integral else "fraction"
    else:
        found = kind(value)
    number = {"integer": {"integer", "number"}, "fraction": {"number"}}
    return frozenset(number.get(found, {found}))


def _equal(value: Any, item: Any) -> bool:
    if isinstance(value, Number):
        return isinstance(item, int | float) and float(value.text) == item
    return isinstance(value, bool) == isinstance(item, bool) and bool(value == item)


def _literal(raw: str, kinds: Kinds) -> tuple[Any, bool]:
    """Parse JSON or, if `kinds` has no "string", a Python literal; tell if `raw` is one."""
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
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()], True
    if not text.startswith(("{", "[", "(")):
        return None, False
    reader = LiteralReader(text)
    try:
        value = reader.value()
    except ValueError:
        return None, False
    return value, reader.at == len(text)
