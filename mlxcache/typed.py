"""Decoding of JSON and plain objects into typed values. Any thread.

msgspec 0.22 inspects a Struct at its first use, without a lock: two threads that do so at the same
time end the process by SIGSEGV. Here one thread at a time does it.
https://jcristharif.com/msgspec/api.html
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
    """Decode the JSON `text` into a `type`.

    Raises msgspec.DecodeError (also its subclass ValidationError), UnicodeError, RecursionError.
    """
    found: T = _decoder(cast(Hashable, type)).decode(text)
    return found


def convert(type: type[T], value: Any) -> T:
    """Convert a plain object to a `type`. Raises msgspec.ValidationError."""
    _decoder(cast(Hashable, type))
    return msgspec.convert(value, type)
