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

_PREFIX = "mlxcache1"
_LIMIT = 8 * 1024 * 1024


def sign_thinking(text: str) -> str:
    """Return a signature from which `recover_thinking` restores `text`."""
    raw = text.encode()
    packed = base64.urlsafe_b64encode(zlib.compress(raw, 6)).decode()
    return f"{_PREFIX}.{_digest(raw)}.{packed}"


def recover_thinking(shown: str, signature: str | None) -> str:
    """Return the reasoning of a thinking block that a client sent back: `shown`, or else signed."""
    if shown or not signature:
        return shown
    return _read(signature) or ""


def _read(signature: str) -> str | None:
    prefix, _, rest = signature.partition(".")
    digest, _, packed = rest.partition(".")
    if prefix != _PREFIX:
        return None
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(base64.urlsafe_b64decode(packed), _LIMIT)
        text = raw.decode()
    except (binascii.Error, zlib.error, ValueError):
        return None
    return text if inflate.eof and _digest(raw) == digest else None


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
