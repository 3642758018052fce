"""JSON without loss: numbers keep their digits, and a duplicate key is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_LONGEST_INT = 4000  # Python refuses to convert more than 4,300 digits


@dataclass(frozen=True, slots=True)
class Number:
    """A number kept as text, because Python's int or float would write it differently."""

    text: str

    @property
    def integral(self) -> bool:
        """True if the text has only digits after its sign, and so is certainly an integer."""
        return self.text.lstrip("-").isdigit()


def loads(text: str) -> Any:
    """Parse JSON, in which strings may contain control characters.

    Returns what `json.loads` does, but a `Number` for each number that Python could not write back
    unchanged. Raises ValueError for anything else, for NaN and Infinity, and for a key that occurs
    twice in an object.
    """
    return _DECODER.decode(text)


def raw_decode(text: str, at: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at `at`; return it and the position of its end.

    A number that Python could not write back unchanged becomes a `Number`. Raises ValueError if no
    value begins there, for NaN and Infinity, and for a key that occurs twice in an object.
    """
    value, end = _DECODER.raw_decode(text, at)
    return value, end


def dumps(value: Any) -> str:
    """Write JSON, with characters outside ASCII unescaped.

    If half of a surrogate pair is among them, all of them are escaped. A `Number` is written as its
    text. Raises ValueError for NaN and Infinity.
    """
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
