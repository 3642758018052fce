"""Decode JSON into a typed value, strictly in shape and leniently in text."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from mlxcache import typed
from mlxcache.errors import BadRequest

T = TypeVar("T")

MAX_DEPTH = 100
"""Levels of nesting that a body may have."""


def decode(type: type[T], body: bytes) -> T:
    """Decode the JSON `body` as a `type`.

    Half of a surrogate pair, which JavaScript clients send when they cut a string inside an
    emoji, becomes U+FFFD. Raises BadRequest, with the field's path as `param` if there is one.
    """
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
        raise BadRequest(f"{message}{where}.", param=param) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not valid UTF-8: {error}.") from error
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply.") from error
    if _is_deep(value):
        raise BadRequest(f"The body is nested more than {MAX_DEPTH} levels deep.")
    return value


def _is_deep(value: object) -> bool:
    """Return True if `value` is too deep for later recursion, for example in a template."""
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
