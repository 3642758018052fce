"""What sessions ask of the RAM tier: how much it holds, and to give it up. MLX thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxcache.cache.kv_cache import Memory
from mlxcache.cache.reuse import usable
from mlxcache.store.listing import Held
from mlxcache.tree.prefix_tree import Node
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.engine.runtime import Core


def in_ram(memory: Memory, paths: Sequence[Tokens]) -> Held:
    """What the RAM tier holds of these token ids; asking is no use of it."""
    tokens, nbytes = [], 0
    ends: dict[int, int] = {}
    for ids in paths:
        match = memory.tree.match(ids, touch=False)
        tokens.append(usable(memory.layout, match, len(ids) + 1)[0])
        for node in match.nodes:
            end = min(node.end, match.length)
            before = ends.get(id(node), node.start)
            if end == node.end and before < end:
                nbytes += node.checkpoint_bytes
            nbytes += max(0, end - before) * memory.layout.bytes_per_token
            ends[id(node)] = max(end, before)
    return Held(tuple(tokens), nbytes)


def forget(memory: Memory, ids: Tokens, keep: int) -> int:
    """Cut what the tree holds of `ids` beyond its first `keep`, and all that goes on from there.

    What a request uses, or what is still being written, stays. Returns the tokens cut.
    """
    beyond = held_beyond(memory, ids, keep)
    return _cut_below(memory, beyond[0], keep) if beyond else 0


def held_beyond(memory: Memory, ids: Tokens, keep: int) -> list[Node]:
    """The nodes with any token of `ids` beyond `keep`, top down.

    None where the tree holds no such token: the last node may be of others, who went another way.
    """
    match = memory.tree.match(ids, touch=False)
    return [node for node in match.nodes if min(node.end, match.length) > keep]


def _cut_below(memory: Memory, top: Node, keep: int) -> int:
    """Cut `top` and all below it from position `keep` on, the ends first."""
    found = [top]
    for node in found:
        found += node.children.values()
    return sum(_cut(memory, node, keep) for node in reversed(found))


def _cut(memory: Memory, node: Node, keep: int) -> int:
    if node.locks or node.children or node.detached:
        return 0
    room = memory.room
    gone = memory.tree.cut(node, max(node.start, keep))
    memory.budget.release("checkpoints", gone.checkpoint_bytes)
    if id(gone.value) in room.idle:
        room.shrink(gone.value, force=True)
    return gone.tokens


def forget_session(core: Core, ids: Tokens, keep: int) -> None:
    """Cut what the tree holds of a session's `ids` beyond `keep`, and anticipate nothing of it."""
    core.scheduler.ahead.clear()
    forget(core.memory, ids, keep)


def forget_all(core: Core) -> None:
    """Drop all that no request uses."""
    core.scheduler.ahead.clear()
    core.memory.room.clear()
