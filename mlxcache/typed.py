"""Thread-safe decoding of JSON and plain objects into typed values.

msgspec 0.22 inspects a Struct at its first use without a lock: if two threads do so at the same
time, the process ends with SIGSEGV. A lock here prevents that.
Source: https://jcristharif.com/msgspec/api.html
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

_learning = threading.Lock()


@functools.cache
def _decoder(type: Hashable) -> msgspec.json.Decoder[Any]:
    with _learning:
        return msgspec.json.Decoder(type)


def decode(type: type[T], text: str | bytes) -> T:
    """Decode the JSON `text` into a value of `type`.

    Raises msgspec.ValidationError if the JSON does not match `type`, its base class
    msgspec.DecodeError if `text` is not JSON, UnicodeError if it is not valid Unicode, and
    RecursionError if the JSON is nested too deeply.
    """
    found: T = _decoder(cast(Hashable, type)).decode(text)
    return found


def convert(type: type[T], value: Any) -> T:
    """Convert a plain object to a value of `type`. Raises msgspec.ValidationError."""
    _decoder(cast(Hashable, type))
    return msgspec.convert(value, type)
