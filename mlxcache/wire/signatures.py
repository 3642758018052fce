"""Signatures of thinking blocks: strings that are opaque to clients and contain the reasoning.

A client may ask not to be shown the reasoning (`display: "omitted"`), and then sends the block back
with an empty text. The signature restores the text, so that the next turn renders to the same
tokens without state in the server.

A signature is `mlxcache1.DIGEST.TEXT`: TEXT is the reasoning, deflated, in URL-safe base64. DIGEST
is BLAKE2b over the reasoning; it is not secret and proves only that the text is complete.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

from mlxcache.errors import ContextLengthExceeded

_PREFIX = "mlxcache1"
_MOST = 8 * 1024 * 1024


def sign_thinking(text: str) -> str:
    """Return a signature from which a `SignatureReader` restores `text`."""
    raw = text.encode()
    packed = base64.urlsafe_b64encode(zlib.compress(raw, 6)).decode()
    return f"{_PREFIX}.{_digest(raw)}.{packed}"


class SignatureReader:
    """Reader of the signatures of one conversation.

    Anybody can make a signature, and 11 kB of it may inflate to 8 MB: all of a conversation restore
    no more than a prompt's characters. Further ones raise ContextLengthExceeded.
    """

    def __init__(self) -> None:
        self._left = _MOST

    def recover(self, shown: str, signature: str | None) -> str:
        """Return the reasoning of a block that a client sent back: `shown`, or else signed."""
        if shown or not signature:
            return shown
        return self._read(signature) or ""

    def _read(self, signature: str) -> str | None:
        prefix, _, rest = signature.partition(".")
        digest, _, packed = rest.partition(".")
        if prefix != _PREFIX:
            return None
        inflate = zlib.decompressobj()
        try:
            raw = inflate.decompress(base64.urlsafe_b64decode(packed), self._left + 1)
        except (binascii.Error, zlib.error, ValueError):
            return None
        if len(raw) > self._left:
            raise ContextLengthExceeded(
                f"prompt is too long: more than {_MOST:,} bytes of signed reasoning"
            )
        self._left -= len(raw)
        if not inflate.eof or _digest(raw) != digest:
            return None
        return raw.decode(errors="replace")


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
