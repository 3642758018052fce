"""How much of what the tree knows of a prompt can be gone on from."""

from __future__ import annotations

from mlxcache.model.kv import Layout, State
from mlxcache.tree.prefix_tree import Match


def usable(layout: Layout, match: Match, prompt_tokens: int) -> tuple[int, State | None]:
    """The tokens of a match that can be reused, and the state there: one token is left to feed."""
    if not layout.cacheable:
        return 0, None
    limit = intact(layout, match, prompt_tokens - 1)
    if not layout.opaque:
        return limit, None
    found = [(at, node) for at, node in match.checkpoints if at <= limit]
    return (found[-1][0], found[-1][1].checkpoint) if found else (0, None)


def intact(layout: Layout, match: Match, upto: int) -> int:
    """How many tokens of a match, up to `upto`, have KV that is there."""
    limit = min(match.length, upto)
    lost = next((start for value, start, _ in match.segments if value.lost), limit)
    limit = min(limit, lost)
    hollow = [(start, value.hollow) for value, start, _ in match.segments if value.hollow > start]
    if hollow and hollow[0][0] < limit < hollow[-1][1] + layout.longest_window:
        return hollow[0][0]
    return limit
