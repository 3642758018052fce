"""Whose a request is. Where a server has several keys, what one computes serves nobody else."""

from __future__ import annotations

from contextvars import ContextVar
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

OWNER: ContextVar[str | None] = ContextVar("owner", default=None)
"""The owner of the request that this is done for; None: the server tells none apart.

The API's middleware sets it, so that no endpoint can forget to.
"""

MARKED = 4
"""How many of a prompt's first ids are its owner's own."""

_MOST_TOKENS = 1 << 20
"""More than any vocabulary has; ids of images, 31 random bits each, are hardly ever less."""


def owner_of(key: str) -> str:
    """The owner that a key stands for: the same at every start, and no way back to the key."""
    return blake2b(key.encode(), digest_size=16, person=b"mlxcache owner").hexdigest()


def own_ids(ids: Ids, owner: str | None) -> Ids:
    """Token ids as the cache knows them for an owner, shape (n,); for None, `ids` themselves.

    The first ones are made less than 0, each in a way of the owner's, so that nothing which goes by
    ids, in RAM, on disk or in the table of sessions, ever takes one owner's for another's.
    """
    if owner is None or not len(ids):
        return ids
    known = ids.copy()
    head = known[:MARKED]
    head[:] = ~(np.where(head < 0, ~head, head) ^ _mask(owner)[: len(head)])
    return known


def plain_ids(ids: Ids, owner: str | None) -> Ids:
    """What `own_ids` has made its ids of."""
    if owner is None or not len(ids):
        return ids
    plain = ids.copy()
    head = plain[:MARKED]
    found = ~head ^ _mask(owner)[: len(head)]
    head[:] = np.where(found < _MOST_TOKENS, found, ~found)
    return plain


def _mask(owner: str) -> Ids:
    """31 bits for each marked id."""
    drawn = blake2b(owner.encode(), digest_size=4 * MARKED, person=b"mlxcache ids").digest()
    return (np.frombuffer(drawn, "<u4") & 0x7FFFFFFF).astype(np.int32)
