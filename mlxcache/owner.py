"""Owners of requests. With several API keys, one owner's KV is never reused for another."""

from __future__ import annotations

from contextvars import ContextVar
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from mlxcache.types import Tokens, token_ids

OWNER: ContextVar[str | None] = ContextVar("owner", default=None)
"""Owner of the current request; None if the server has at most one key.

The API's middleware sets it for every endpoint.
"""

MARKED = 4
"""Number of ids at the start of a prompt that are changed according to its owner."""

_MOST_TOKENS = 1 << 20
"""Number above the size of any vocabulary.

Ids of images are 31 random bits, and so almost always larger."""


def owner_of(key: str) -> str:
    return blake2b(key.encode(), digest_size=16, person=b"mlxcache owner").hexdigest()


def own_ids(ids: Tokens, owner: str | None) -> Tokens:
    """Return the ids under which an owner's tokens are cached, shape (n,).

    The first `MARKED` (4) ids are changed to negative ones by a mask of the owner, so that
    look-ups in RAM, on disk and in the table of sessions never match another owner. If `owner`
    is None, returns `ids` itself.
    """
    if owner is None or not len(ids):
        return ids
    known = np.array(ids)
    head = known[:MARKED]
    head[:] = ~(np.where(head < 0, ~head, head) ^ _mask(owner)[: len(head)])
    return token_ids(known)


def plain_ids(ids: Tokens, owner: str | None) -> Tokens:
    if owner is None or not len(ids):
        return ids
    plain = np.array(ids)
    head = plain[:MARKED]
    found = ~head ^ _mask(owner)[: len(head)]
    head[:] = np.where(found < _MOST_TOKENS, found, ~found)
    return token_ids(plain)


def _mask(owner: str) -> npt.NDArray[np.int32]:
    drawn = blake2b(owner.encode(), digest_size=4 * MARKED, person=b"mlxcache ids").digest()
    return (np.frombuffer(drawn, "<u4") & 0x7FFFFFFF).astype(np.int32)
