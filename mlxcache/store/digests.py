"""Digests that identify prefixes of token ids, chained over blocks of 64 tokens."""

from __future__ import annotations

import threading
from hashlib import blake2b

import numpy as np

from mlxcache.types import NO_TOKENS, Tokens

BLOCK = 64
"""Tokens per block."""

DIGEST_BYTES = 16


def root_digest(namespace: str) -> bytes:
    """Return the digest of the empty prefix of a namespace."""
    return _digest(namespace.encode())


def block_digests(digest: bytes, ids: Tokens) -> list[bytes]:
    """Return the digests after each whole block of `ids`.

    `digest`: digest of the prefix that `ids` follow, a whole number of blocks. A last partial block
    is ignored.
    """
    raw = ids.tobytes()
    found = []
    for at in range(0, len(ids) // BLOCK * BLOCK * 4, BLOCK * 4):
        digest = _digest(digest + raw[at : at + BLOCK * 4])
        found.append(digest)
    return found


def partial_digest(digest: bytes, ids: Tokens) -> bytes:
    """Return the digest of a prefix followed by fewer than 64 tokens `ids`.

    `digest`: digest of the prefix; it is returned unchanged if `ids` is empty.
    """
    if not len(ids):
        return digest
    return _digest(digest + ids.tobytes() + bytes((len(ids),)))


class Chain:
    """Digests of the prefixes of the token ids `ids` in one namespace.

    `whole[k]` is the digest of the first k blocks.
    """

    def __init__(self, namespace: str, ids: Tokens, whole: list[bytes]):
        self.namespace = namespace
        self.ids = ids
        self.whole = whole

    def at(self, position: int) -> bytes:
        """Return the digest of the first `position` tokens."""
        block = position // BLOCK
        return partial_digest(self.whole[block], self.ids[block * BLOCK : position])


class Chains:
    """Factory of digest chains for one namespace. Thread-safe.

    It remembers the chain that it made last, and takes from it the digests of the prefix that the
    next token ids share.
    """

    def __init__(self, namespace: str):
        self._last = Chain(namespace, NO_TOKENS, [root_digest(namespace)])
        self._lock = threading.Lock()

    def of(self, ids: Tokens) -> Chain:
        """Return the digest chain of `ids`.

        For 200,000 tokens it takes about 5 ms if they are new, and 0.1 ms if they are a prefix of
        the remembered chain.
        """
        with self._lock:
            last = self._last
        blocks = min(len(ids), len(last.ids)) // BLOCK
        differ = np.flatnonzero(ids[: blocks * BLOCK] != last.ids[: blocks * BLOCK])
        shared = int(differ[0]) // BLOCK if len(differ) else blocks
        whole = last.whole[: shared + 1]
        whole += block_digests(whole[-1], ids[shared * BLOCK :])
        chain = Chain(last.namespace, ids, whole)
        if shared < len(ids) // BLOCK:  # a prefix of the last chain would lose digests
            with self._lock:
                self._last = chain
        return chain


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
