"""What stays of a request that is over: all it computed, or, of what is no numbers, nothing."""

from __future__ import annotations

import logging

from mlxcache.cache.disk import Disk
from mlxcache.cache.kv_cache import Memory, forget, held_beyond
from mlxcache.engine.decoder import NoNumbers
from mlxcache.engine.task import Task
from mlxcache.errors import MlxcacheError
from mlxcache.model.finite import ends_finite, finite_upto, state_is_finite
from mlxcache.model.lineage import Lineage
from mlxcache.types import Tokens

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

    What it began with, and what others share, is kept as far as that is numbers: an earlier request
    may have left NaN too.
    """
    lease, ids = task.held, task.tokens()
    sound = _sound(memory, ids, min(lease.cached, finite_upto(lease.lineage)))
    log.warning("a model computed no numbers: %d of %d tokens are kept", sound, len(ids))
    if lease.node is not None:
        memory.tree.unlock(lease.node)
        lease.node = None
    if disk is not None:
        disk.forget(ids, sound, held_beyond(memory, ids, sound))
    forget(memory, ids, sound)


def _sound(memory: Memory, ids: Tokens, begun: int) -> int:
    """How far the tree's KV and states of `ids` are to be kept, of which `begun` tokens were there.

    Where others went another way behind that, they had computed it too.
    """
    match = memory.tree.match(ids, touch=False)
    parted = [node.end for node in match.nodes if len(node.children) > 1]
    if match.nodes and (match.nodes[-1].children or match.nodes[-1].end > match.length):
        parted.append(match.length)
    wanted = max([begun, *parted])
    finite: dict[Lineage, int] = {}  # each is looked at once: there may be gigabytes of it
    for node in match.nodes:
        end = min(node.end, wanted)
        if node.start >= wanted:
            break
        if end > begun and node.value not in finite:
            finite[node.value] = 0 if node.value.lost else finite_upto(node.value)
        if end > finite.get(node.value, end):
            return begun
        if end == node.end and node.checkpoint is not None and not state_is_finite(node.checkpoint):
            return node.start if end <= begun else begun
    return wanted
