"""Form of objects in the remote: names and contents, plain or sealed with a key."""

from __future__ import annotations

from typing import Protocol

import xxhash

from mlxcache.errors import Corrupt

MAGIC = b"mlxcache"
VERSION = 1
HEAD_BYTES = 16
"""Bytes before the content: magic (8), version (1), form (1), zeros (6)."""

PLAIN, SEALED = 0, 1


class Form(Protocol):
    """Interface of the form in which names and contents are stored. Thread-safe.

    `overhead`: bytes by which a stored object is longer than its content. `key_id`: a public digest
    of the key; None without one.
    """

    overhead: int
    key_id: str | None

    def stored_name(self, name: str) -> str:
        """Return the name under which an object is stored."""

    def plain_name(self, stored: str) -> str | None:
        """Return the name of the object stored as `stored`; None if it has another form or key."""

    def wrap(self, name: str, content: bytes | memoryview) -> bytes:
        """Return the bytes to store for an object with this name and content."""

    def unwrap(self, name: str, stored: bytes | bytearray) -> bytes:
        """Return the content of the stored bytes of object `name`.

        Raises Corrupt if `wrap` did not make these bytes under this name.
        """


class Plain:
    """Form without a key: names as they are, contents with a checksum over name and content."""

    overhead = HEAD_BYTES + 16
    key_id: str | None = None

    def stored_name(self, name: str) -> str:
        """Return `name`: without a key, names are stored as they are."""
        return name

    def plain_name(self, stored: str) -> str | None:
        """Return `stored`: without a key, names are stored as they are."""
        return stored

    def wrap(self, name: str, content: bytes | memoryview) -> bytes:
        """Return a header, a checksum (XXH3, 128 bits) and the content."""
        return b"".join((make_head(PLAIN), _checksum(name, content), content))

    def unwrap(self, name: str, stored: bytes | bytearray) -> bytes:
        """Return the content. Raises Corrupt if the header or the checksum is wrong."""
        check_head(stored, PLAIN)
        content = memoryview(stored)[self.overhead :]
        if stored[HEAD_BYTES : self.overhead] != _checksum(name, content):
            raise Corrupt("its checksum is wrong")
        return bytes(content)


def make_head(form: int) -> bytes:
    """Return the first bytes of every stored object of the form `PLAIN` or `SEALED`."""
    return MAGIC + bytes((VERSION, form)) + bytes(6)


def check_head(stored: bytes | bytearray, form: int) -> None:
    """Check the first bytes of a stored object. Raises Corrupt if they are not those of `form`."""
    if stored[: len(MAGIC)] != MAGIC:
        raise Corrupt("it is not an object of mlxcache")
    if stored[:HEAD_BYTES] != make_head(form):
        raise Corrupt("it has another version, or is sealed and this server has no key")


def _checksum(name: str, content: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(name.encode() + b"\0")
    digest.update(content)
    return digest.digest()
