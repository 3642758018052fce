"""Rule `tool_order`: render a set of tools in the order of the first request that had it."""

from __future__ import annotations

import hashlib
import json

from mlxcache.lru import LRU
from mlxcache.prompt.canonical.draft import Draft

Orders = LRU[bytes, tuple[bytes, ...]]
"""Orders of sets of tools: digests of the tools in order, by the same digests sorted and joined."""


def apply(draft: Draft, orders: Orders) -> bool:
    """Put the tools into the order that the first request with the same tools had.

    `orders`: the remembered order of each set of tools; that of a new set is added. Returns whether
    the tools of `draft` were put into another order.
    """
    if len(draft.tools) < 2:
        return False
    digests = [hashlib.blake2b(_text(tool), digest_size=16).digest() for tool in draft.tools]
    order = orders.setdefault(b"".join(sorted(digests)), tuple(digests))
    if order == tuple(digests):
        return False
    tools = dict(zip(digests, draft.tools, strict=True))
    draft.tools = tuple(tools[digest] for digest in order)
    return True


def _text(tool: object) -> bytes:
    return json.dumps(tool, default=repr).encode()
