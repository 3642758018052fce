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

    Raises msgspec.DecodeError (ValidationError if it does not match `type`), UnicodeError if it is
    not valid Unicode, and RecursionError if it is nested too deeply.
    """
    found: T = _decoder(cast(Hashable, type)).decode(text)
    return found


def convert(type: type[T], value: Any) -> T:
    _decoder(cast(Hashable, type))
    return msgspec.convert(value, type)
