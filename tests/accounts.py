"""The budget beside what is really held: while requests run, and when none does."""

from __future__ import annotations

from typing import Any

from mlxcache.cache.kv_cache import KVCache
from mlxcache.model import kv
from mlxcache.model.arrays import tree_arrays
from mlxcache.scheduling.lanes import Lane, Lanes
from tests.tree.check import check_tree

LASTING = {"kv", "checkpoints", "transient", "pool", "pending", "images"}
"""Kinds of the budget that may have bytes while nothing runs."""


def check_accounts(memory: KVCache, lanes: Lanes) -> None:
    """The budget is what the lineages and the tree really hold, and is kept."""
    memory.check_integrity(batch=sum(lane.bytes for lane in lanes.all))
    check_tree(memory.tree)
    assert memory.budget.used <= memory.budget.limit
    for lineage in [*memory.ram.idle.values(), *memory.ram.busy.values()]:
        sizes = {a.shape[2] for slot in lineage.linear for a in kv.arrays_of(slot)}
        assert sizes <= {lineage.capacity}
        assert lineage.length - lineage.base <= lineage.capacity or not memory.layout.specs
    for lane in lanes.all:
        _check_lane(lane)
    for value in memory.tree.values():
        if value.lost:
            continue
        start, end = memory.tree.live_range(value)  # type: ignore[misc]
        assert id(value) in memory.ram.idle or id(value) in memory.ram.busy
        assert value.base <= start
        assert end <= value.length or id(value) in memory.ram.busy


def _check_lane(lane: Lane) -> None:
    caches = lane.decoder.caches
    if lane.batched:
        arrays = [a for c in caches for a in tree_arrays(c.state) if a.ndim > 1]
        assert sum(a.nbytes for a in arrays) <= lane.bytes
        assert len(lane.tasks) == len(lane.decoder.rows) > 1
    else:
        assert caches is lane.tasks[0].held.lineage.caches
    assert all(task.behind >= 0 for task in lane.tasks)
    rows = [task.output.row for task in lane.tasks if task.output is not None]
    assert all(a is b for a, b in zip(rows, lane.decoder.rows, strict=True))


def check_at_rest(memory: KVCache) -> None:
    """Nothing is in use, and every byte is the tree's.

    Only paths whose new checkpoints wait for a further turn are locked.
    """
    assert not memory.ram.busy
    assert {k for k, n in memory.budget.by_kind().items() if n} <= LASTING
    assert {id(v) for v in memory.tree.values()} == set(memory.ram.idle)
    nodes: list[Any] = [memory.tree.root]
    disk = memory.disk
    for node in nodes:
        assert node.locks == (disk.write_behind.count_locks(node) if disk is not None else 0)
        nodes += node.children.values()
