"""A conversation as a chain of digests, one for each of its beginnings."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mlxcache.image import Image
from mlxcache.prompt.canonical.draft import Message


class History:
    """The digest of the messages so far. `seed` tells one use of it from another."""

    def __init__(self, seed: str):
        self._hash = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=16)

    @property
    def digest(self) -> bytes:
        """Of all that was added, 16 bytes."""
        return self._hash.digest()

    def add(self, message: Message) -> None:
        """Add a message: roles, texts, calls, images."""
        self._hash.update(_ENCODER.encode(message).encode())


def _plain(value: Any) -> Any:
    return value.digest.hex() if isinstance(value, Image) else repr(value)


_ENCODER = json.JSONEncoder(default=_plain)
