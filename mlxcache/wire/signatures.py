"""Signatures of thinking blocks: opaque to a client, the reasoning itself to us.

A client may ask that reasoning be left out of what it is shown (`display: "omitted"`) and sends the
block back with its text empty. The signature then brings the text back, so that the
next turn renders to the same tokens, with no state kept in the server.

A signature is `mlxcache1.DIGEST.TEXT`: TEXT is the reasoning, deflated, in URL-safe base64; DIGEST
is BLAKE2b over the reasoning. It is no secret, and proves nothing but that the text is whole.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

_PREFIX = "mlxcache1"
_LIMIT = 8 * 1024 * 1024


def sign(text: str) -> str:
    """The signature that carries `text`."""
    raw = text.encode()
    packed = base64.urlsafe_b64encode(zlib.compress(raw, 6)).decode()
    return f"{_PREFIX}.{_digest(raw)}.{packed}"


def recover(shown: str, signature: str | None) -> str:
    """The reasoning of a block that a client sent back: as shown, else as the signature holds it.

    Another server's signature, a damaged one, and one that unpacks to more than 8 MiB count as
    none. Raises nothing.
    """
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
