"""Owners of requests: with several API keys, KV of one owner is never reused for another."""

from __future__ import annotations

from contextvars import ContextVar
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

OWNER: ContextVar[str | None] = ContextVar("owner", default=None)
"""Owner of the current request; None where the server has no or one key.

The API's middleware sets it for every endpoint.
"""

MARKED = 4
"""Number of a prompt's first ids that are changed to ids of its owner."""

_MOST_TOKENS = 1 << 20
"""Above any vocabulary's size; ids of images, 31 random bits each, are almost always larger."""


def owner_of(key: str) -> str:
    """The owner of a key: a digest, the same at every start."""
    return blake2b(key.encode(), digest_size=16, person=b"mlxcache owner").hexdigest()


def own_ids(ids: Ids, owner: str | None) -> Ids:
    """Convert token ids to the cache's ids for an owner, shape (n,); for None, return `ids`.

    The first ones become negative, by a mask of the owner's, so that look-ups by ids, in RAM, on
    disk and in the table of sessions, never confuse owners.
    """
    if owner is None or not len(ids):
        return ids
    known = ids.copy()
    head = known[:MARKED]
    head[:] = ~(np.where(head < 0, ~head, head) ^ _mask(owner)[: len(head)])
    return known


def plain_ids(ids: Ids, owner: str | None) -> Ids:
    """Convert ids back from `own_ids`."""
    if owner is None or not len(ids):
        return ids
    plain = ids.copy()
    head = plain[:MARKED]
    found = ~head ^ _mask(owner)[: len(head)]
    head[:] = np.where(found < _MOST_TOKENS, found, ~found)
    return plain


def _mask(owner: str) -> Ids:
    """A mask of 31 bits for each changed id."""
    drawn = blake2b(owner.encode(), digest_size=4 * MARKED, person=b"mlxcache ids").digest()
    return (np.frombuffer(drawn, "<u4") & 0x7FFFFFFF).astype(np.int32)
