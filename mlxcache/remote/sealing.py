"""Forms of objects: plain, or names and contents sealed with the key of `--remote-key-file`.

- From the file's key are derived, by HKDF-SHA256 (RFC 5869) with different values of its parameter
  `info`: one key for names, one key per object for its content, and a public id to compare keys by.
- Contents: AES-256-GCM (NIST SP 800-38D). The object's name and the header are associated data, so
  decryption fails if an object was renamed or its header changed. A nonce must never repeat with
  one key. It is 96 random bits, of which section 8.3 of SP 800-38D allows 2**32 with one key; here
  that is the number of times that one name may be written.
- Names: AES-SIV (RFC 5297), separately for each part between slashes, with the parts before it as
  associated data. AES-SIV is deterministic, so that all servers encrypt a name to the same text,
  and needs no nonce. Names are derived from prompts: if they were not encrypted, whoever lists the
  bucket could test guesses of a prompt.
"""

from __future__ import annotations

import base64
import binascii
import os
from typing import Protocol

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mlxcache.config.keys import KEY_BYTES
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


_NONCE_BYTES, _TAG_BYTES = 12, 16


class Sealed:
    """Encrypts the names and contents of objects in a remote, and decrypts them. Thread-safe.

    `key`: `KEY_BYTES` (32) random bytes; raises ValueError for another length. The first part of a
    name, up to its first slash, is the version of the format and is not encrypted.
    """

    overhead = HEAD_BYTES + _NONCE_BYTES + _TAG_BYTES

    def __init__(self, key: bytes):
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._names = AESSIV(_derive(key, b"names", 64))
        self.key_id: str | None = _derive(key, b"id", 16).hex()

    def stored_name(self, name: str) -> str:
        """Return the name under which the object `name` is stored."""
        parts = name.encode().split(b"/")
        return "/".join(
            _encode(self._names.encrypt(part, parts[:place])) if place else part.decode()
            for place, part in enumerate(parts)
        )

    def plain_name(self, stored: str) -> str | None:
        """Return the name that `stored_name` encrypts as `stored`; None if there is none."""
        first, *rest = stored.split("/")
        parts = [first.encode()]
        try:
            for part in rest:
                parts.append(self._names.decrypt(_decode(part), list(parts)))
        except (InvalidTag, ValueError, binascii.Error):
            return None
        return b"/".join(parts).decode()

    def wrap(self, name: str, content: bytes | memoryview) -> bytes:
        """Return the bytes to store as object `name`: header, nonce, encrypted content, tag."""
        head, nonce = make_head(SEALED), os.urandom(_NONCE_BYTES)
        return b"".join((head, nonce, self._cipher(name).encrypt(nonce, content, _bound(name))))

    def unwrap(self, name: str, stored: bytes | bytearray) -> bytes:
        """Return the content from which `wrap` made `stored`.

        Raises Corrupt if a byte of `stored` was changed, or `wrap` used another key or name.
        """
        check_head(stored, SEALED)
        after = memoryview(stored)[HEAD_BYTES:]
        nonce, sealed = bytes(after[:_NONCE_BYTES]), after[_NONCE_BYTES:]
        try:
            return self._cipher(name).decrypt(nonce, sealed, _bound(name))
        except (InvalidTag, ValueError) as error:
            raise Corrupt("it was changed, or sealed with another key") from error

    def _cipher(self, name: str) -> AESGCM:
        return AESGCM(_derive(self._key, b"object\0" + name.encode(), 32))


def _derive(key: bytes, purpose: bytes, length: int) -> bytes:
    return HKDF(SHA256(), length, salt=None, info=b"mlxcache remote 1 " + purpose).derive(key)


def _bound(name: str) -> bytes:
    return make_head(SEALED) + name.encode()


def _encode(raw: bytes) -> str:
    """Return `raw` in lower-case base 32, because file systems may ignore case."""
    return base64.b32encode(raw).decode().rstrip("=").lower()


def _decode(text: str) -> bytes:
    return base64.b32decode(text.upper() + "=" * (-len(text) % 8))
