"""Decoding of JSON to typed values: strict about types, tolerant of broken text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from mlxcache import typed
from mlxcache.errors import BadRequest, Unsupported
from mlxcache.utf8 import BOM, NotUtf8, decode_utf8

T = TypeVar("T")

MAX_DEPTH = 100

MAX_VALUES = 4_000_000
"""Most values of a body, where an object or a list counts as four.

A value of two bytes may take a hundred, several times over while a prompt is made of it.
"""


def decode(type: type[T], body: bytes) -> T:
    """Decode the JSON `body` as a value of `type`.

    Half of a surrogate pair, which JavaScript clients send if they cut a string inside an emoji,
    becomes U+FFFD. Raises BadRequest, whose `param` is the wrong field, such as `messages[0].role`,
    or None if the whole body is wrong, has too many values, or is nested too deeply.
    """
    if len(body) > MAX_VALUES // 4:
        Values("The body").add(body)
    try:
        try:
            value = typed.decode(type, body)
        except msgspec.DecodeError as error:
            if isinstance(error, msgspec.ValidationError) or b"\\u" not in body:
                raise
            value = typed.decode(type, _SURROGATE.sub(_replace_half, body))
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$").removeprefix(".") or None
        where = f" (at `{param}`)" if param else ""
        if message.startswith("Invalid enum value") and (known := _values(type, param or "")):
            where += f": use one of {', '.join(map(repr, known))}"
        raise BadRequest(f"{message}{where}.", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # The position of the latter counts from the start of a string.
        raise BadRequest(_describe_wrong(body, error)) from error
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply.") from error
    if _is_deep(value):
        raise BadRequest(f"The body is nested more than {MAX_DEPTH} levels deep.")
    return value


class Values:
    """Counter of the values in the JSON of `what`. Raises BadRequest for too many.

    They are counted before it is decoded, by its marks, so the marks in a text count too.
    """

    def __init__(self, what: str) -> None:
        self._what, self._left = what, MAX_VALUES

    def add(self, body: bytes) -> None:
        self._left -= body.count(b",") + 3 * (body.count(b"{") + body.count(b"["))
        if self._left < 0:
            raise BadRequest(f"{self._what} has more than {MAX_VALUES:,} values.")


def convert(raw: Any, type: type[T], where: str) -> T:
    """Convert decoded JSON to a value of `type`. Raises BadRequest that names the wrong field.

    `where` is the place of `raw` in the body, such as `messages[0].content`.
    """
    try:
        return typed.convert(type, raw)
    except msgspec.ValidationError as error:
        raise wrong(where, str(error).replace("`$", f"`{where}") + ".") from error


def wrong(where: str, text: str) -> BadRequest:
    """Return an error for the part of a body at `where`; `text` says what is wrong with it."""
    return BadRequest(f"{where}: {text}", param=where)


def unsupported(where: str, text: str) -> Unsupported:
    """Return an error for the part of a body at `where`; `text` says what is not supported."""
    return Unsupported(f"{where}: {text}", param=where)


def _describe_wrong(body: bytes, error: Exception) -> str:
    if body.startswith(BOM):
        return "The body is not valid JSON: it begins with a byte order mark. Send it without."
    try:
        decode_utf8(body)
    except NotUtf8 as wrong:
        return f"The body {wrong}."
    return f"The body is not valid JSON: {error}."


def _values(type: type[Any], path: str) -> list[bool | str | int | None]:
    """Return the literal values allowed for the field of `type` at `path`; empty if it has none."""
    found = list(_options([inspect.type_info(type)]))
    for name, item in re.findall(r"([^.\[\]]+)|(\[[^\]]*\])", path):
        below: list[inspect.Type] = []
        for one in found:
            if name and isinstance(one, inspect.StructType):
                below += [field.type for field in one.fields if field.encode_name == name]
            elif item and isinstance(one, inspect.ListType):
                below.append(one.item_type)
            elif item and isinstance(one, inspect.DictType):
                below.append(one.value_type)
        found = list(_options(below))
    literals = [one for one in found if isinstance(one, inspect.LiteralType)]
    return [value for one in literals for value in one.values]


def _options(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for one in types:
        match one:
            case inspect.UnionType():
                yield from _options(one.types)
            case inspect.Metadata():
                yield from _options([one.type])
            case _:
                yield one


def _is_deep(value: object) -> bool:
    """Return whether `value` is nested so deeply that it could exceed the recursion limit later."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for node in level:
            if isinstance(node, dict):
                below.extend(node.values())
            elif isinstance(node, list):
                below.extend(node)
            elif isinstance(node, msgspec.Struct):
                below.extend(getattr(node, field) for field in node.__struct_fields__)
        if not below:
            return False
        level = below
    return True


_SURROGATE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def _replace_half(match: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if match[1] else match[0]
