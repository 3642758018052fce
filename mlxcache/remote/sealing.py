"""Form of objects whose names and contents are sealed with the key of `--remote-key-file`.

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

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mlxcache.config.keys import KEY_BYTES
from mlxcache.errors import Corrupt
from mlxcache.remote.storage import HEAD_BYTES, SEALED, Plain, check_head, make_head

_NONCE_BYTES, _TAG_BYTES = 12, 16


class Sealed(Plain):
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
        self.key_id = _derive(key, b"id", 16).hex()

    def stored_name(self, name: str) -> str:
        parts = name.encode().split(b"/")
        return "/".join(
            _encode(self._names.encrypt(part, parts[:place])) if place else part.decode()
            for place, part in enumerate(parts)
        )

    def plain_name(self, stored: str) -> str | None:
        first, *rest = stored.split("/")
        parts = [first.encode()]
        try:
            for part in rest:
                parts.append(self._names.decrypt(_decode(part), list(parts)))
        except (InvalidTag, ValueError, binascii.Error):
            return None
        return b"/".join(parts).decode()

    def wrap(self, name: str, content: bytes | memoryview) -> bytes:
        head, nonce = make_head(SEALED), os.urandom(_NONCE_BYTES)
        return b"".join((head, nonce, self._cipher(name).encrypt(nonce, content, _bound(name))))

    def unwrap(self, name: str, stored: bytes | bytearray) -> bytes:
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
