"""What stays of a request that is over: all it computed, or, of what is no numbers, nothing."""

from __future__ import annotations

import logging

from mlxcache.engine.decoder import NoNumbers
from mlxcache.engine.disk import Disk
from mlxcache.engine.memory import Memory
from mlxcache.engine.ram import forget, held_beyond
from mlxcache.engine.task import Task
from mlxcache.errors import MlxcacheError
from mlxcache.model.finite import ends_finite, finite_upto, state_is_finite

log = logging.getLogger("mlxcache.engine")


def keep(memory: Memory, disk: Disk | None, task: Task) -> None:
    """Commit all that a task computed, and have it written to disk. The lease stays."""
    if task.restoring:
        return
    if not ends_finite(task.held.lineage):
        purge(memory, disk, task)
        return
    tokens = task.tokens()
    memory.commit(task.held, tokens, checkpoint=True)
    if disk is not None:
        disk.ended(task.held, tokens)


def give_up(
    memory: Memory, disk: Disk | None, task: Task, error: MlxcacheError, *, sound: bool
) -> None:
    """End the lease of a task that failed. All it computed is kept if that is `sound`.

    Else what was committed is, but of what is no numbers (NoNumbers) nothing.
    """
    if isinstance(error, NoNumbers):
        purge(memory, disk, task)
    elif sound:
        keep(memory, disk, task)
    (memory.release if sound else memory.abandon)(task.held)


def purge(memory: Memory, disk: Disk | None, task: Task) -> None:
    """Keep nothing of what a task computed, in neither tier. The lease stays, without its node.

    What it began with is kept as far as that is numbers: an earlier request may have left NaN too.
    """
    lease, ids = task.held, task.tokens()
    sound = min(lease.cached, finite_upto(lease.lineage))
    match = memory.tree.match(ids, touch=False)
    for node in match.nodes:
        if node.end <= sound and node.checkpoint is not None:
            sound = sound if state_is_finite(node.checkpoint) else node.start
    log.warning("a model computed no numbers: %d of %d tokens are kept", sound, len(ids))
    if lease.node is not None:
        memory.tree.unlock(lease.node)
        lease.node = None
    if disk is not None:
        disk.forget(ids, sound, held_beyond(memory, ids, sound))
    forget(memory, ids, sound)
