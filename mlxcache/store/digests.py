"""Digests that identify prefixes of token ids, chained over blocks of 64 tokens."""

from __future__ import annotations

from hashlib import blake2b

from mlxcache.common_prefix import common_length
from mlxcache.types import NO_TOKENS, Tokens

BLOCK = 64

DIGEST_BYTES = 16

MOST_CHAINS = 8
"""Prompts whose digests are remembered: those of the conversations that take turns."""


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
    """Factory of digest chains for one namespace, which remembers those of some prompts."""

    def __init__(self, namespace: str):
        self._known: tuple[Chain, ...] = (Chain(namespace, NO_TOKENS, [root_digest(namespace)]),)

    def of(self, ids: Tokens) -> Chain:
        """Return the digest chain of `ids`. Thread-safe.

        The digests of the prefix that they share with a remembered chain are not computed again:
        for 200,000 tokens it takes about 5 ms if they are new, and less than 1 ms if not.
        """
        known = self._known
        shares = [common_length(ids, one.ids) // BLOCK for one in known]
        shared = max(shares)
        last = known[shares.index(shared)]
        whole = last.whole[: shared + 1]
        whole += block_digests(whole[-1], ids[shared * BLOCK :])
        chain = Chain(last.namespace, ids, whole)
        kept = chain if shared < len(whole) - 1 else last
        replaced = (last,) if kept is last or shared == len(last.whole) - 1 else ()
        others = [one for one in known if one not in replaced]
        self._known = (kept, *others[: MOST_CHAINS - 1])
        return chain


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
