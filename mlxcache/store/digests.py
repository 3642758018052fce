"""Digests that identify prefixes of token ids, chained over blocks of 64 tokens."""

from __future__ import annotations

import threading
from hashlib import blake2b

from mlxcache.common_prefix import common_length
from mlxcache.types import NO_TOKENS, Tokens

BLOCK = 64

DIGEST_BYTES = 16


def root_digest(namespace: str) -> bytes:
    return _digest(namespace.encode())


def block_digests(digest: bytes, ids: Tokens) -> list[bytes]:
    raw = ids.tobytes()
    found = []
    for at in range(0, len(ids) // BLOCK * BLOCK * 4, BLOCK * 4):
        digest = _digest(digest + raw[at : at + BLOCK * 4])
        found.append(digest)
    return found


def partial_digest(digest: bytes, ids: Tokens) -> bytes:
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
        block = position // BLOCK
        return partial_digest(self.whole[block], self.ids[block * BLOCK : position])


class Chains:
    """Factory of digest chains for one namespace. Thread-safe."""

    def __init__(self, namespace: str):
        self._last = Chain(namespace, NO_TOKENS, [root_digest(namespace)])
        self._lock = threading.Lock()

    def of(self, ids: Tokens) -> Chain:
        """Return the digest chain of `ids`.

        The digests of the prefix that they share with the last ids are not computed again: for
        200,000 tokens it takes about 5 ms if they are new, and 0.1 ms if not.
        """
        with self._lock:
            last = self._last
        shared = common_length(ids, last.ids) // BLOCK
        whole = last.whole[: shared + 1]
        whole += block_digests(whole[-1], ids[shared * BLOCK :])
        chain = Chain(last.namespace, ids, whole)
        if shared < len(ids) // BLOCK:  # a prefix of the last chain would lose digests
            with self._lock:
                self._last = chain
        return chain


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
