"""When MLX finds no memory, whatever the budget says: others' programs took it. MLX thread only."""

from __future__ import annotations

import logging

import mlx.core as mx

from mlxcache.cache.kv_cache import Memory
from mlxcache.engine.task import Task

log = logging.getLogger("mlxcache.engine")

SIGNS = ("allocate", "out of memory", "insufficient memory", "malloc", "resource limit")
"""What MLX's errors of each device say then."""

SHARE = 4
"""What is held idle is cut by one in so many parts of it."""


def out_of_memory(error: Exception) -> bool:
    """Whether MLX raised `error` because it could not allocate."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS)


def again(memory: Memory, task: Task, error: Exception) -> bool:
    """Make room and go back to before the pass that raised `error`; False where it was no lack of
    memory, where it came twice at one place, or where a state has been stepped and is gone."""
    if memory.layout.opaque or task.lease is None or not out_of_memory(error):
        return False
    lineage = task.lease.lineage
    if task.scarce_at == lineage.length or task.restoring:
        return False
    task.scarce_at = lineage.length
    idle = sum(each.nbytes for each in memory.idle.values())
    log.warning("no memory at token %d of a request, it is tried again: %s", lineage.length, error)
    memory.room.give_up(max(1, idle // SHARE))
    mx.clear_cache()
    lineage.truncate(lineage.length)
    return lineage.sound()
