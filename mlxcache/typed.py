"""JSON and plain objects read as types, from any thread.

msgspec learns what a Struct is made of when it first reads one, and other threads find what it has
learnt so far: where two read the first one at once, the process ends by SIGSEGV (msgspec 0.22). So
one thread at a time learns here. https://jcristharif.com/msgspec/api.html
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
    """The JSON `text` as a `type`.

    Raises msgspec.DecodeError, ValidationError among it, UnicodeError and RecursionError.
    """
    found: T = _decoder(cast(Hashable, type)).decode(text)
    return found


def convert(type: type[T], value: Any) -> T:
    """A plain object as a `type`. Raises msgspec.ValidationError."""
    _decoder(cast(Hashable, type))
    return msgspec.convert(value, type)
