"""Giving up on purpose what the RAM tier holds. MLX thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcache.cache.tree import Node
from mlxcache.engine.memory import Memory
from mlxcache.store.digests import Chains
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.engine.core import Core


def forget(memory: Memory, ids: Tokens, keep: int) -> int:
    """Cut what the tree holds of `ids` beyond its first `keep`, and all that goes on from there.

    What a request uses, or what is still being written, stays. Returns the tokens cut.
    """
    match = memory.tree.match(ids, touch=False)
    top = next((node for node in match.nodes if node.end > keep), None)
    return 0 if top is None else _cut_below(memory, top, keep)


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


def forget_all(core: Core) -> None:
    """Drop all that no request uses, and what is known to be on disk."""
    core.memory.room.clear()
    if core.disk is not None:
        core.disk.persist.known.clear()


def unlearn(core: Core, ids: Tokens) -> None:
    """Take note that `ids` are not on disk any more, so that they are written when used again."""
    if core.disk is not None:
        chain = Chains(core.disk.store.namespace).of(ids)
        core.disk.persist.known.difference_update(chain.whole[1:])
