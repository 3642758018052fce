"""The RAM tier: lineages and checkpoints under one budget, and their eviction.

MLX thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Any, Literal

import mlx.core as mx

from mlxcache.cache.checkpoints import Trail, most_checkpoints
from mlxcache.cache.shared_ram import SharedRam
from mlxcache.cache.write_behind import WriteBehind
from mlxcache.model import device
from mlxcache.model.arrays import ArraySpec
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Lineage, NewLineage
from mlxcache.tree.budget import Budget
from mlxcache.tree.node import Node
from mlxcache.tree.prefix_tree import PrefixTree
from mlxcache.tree.thinning import BUDGET_SHARE

log = logging.getLogger("mlxcache.engine")

Evict = Literal["no", "idle", "unload", "wait"]
"""Mode of making room. `no`: use free bytes only; `idle`: evict what no request uses; `unload`:
also unload idle models that share the budget; `wait`: also wait for writes to disk, after which
more can be evicted.
"""

STEP = 256
"""Positions of a reply that are reserved with its prompt, and the least that is evicted at once."""

WHOLE_LINEAGES = 4
"""Number of idle lineages that may keep buffers from position 0 on although the tree uses only a
part of them.
"""

CHECKPOINT_WORTH = 0.5
"""Share of the tokens from a gap between checkpoints to the end of their path.

Eviction drops those checkpoints of a path that leave a smaller gap before any of its tokens. So
about one stays for each halving of the distance to the end.
"""

SPARE = 4
"""Divisor: with 1/SPARE of the budget free there is memory to spare, also for unused positions."""

ROOM = 5
"""Divisor: with memory to spare, a buffer of n positions is replaced by one of n + n/ROOM.

So growth copies about ROOM times as much as a conversation adds.
"""

UNLOADING: tuple[Evict, ...] = ("unload", "wait")

BUFFER_SHARE = 0.75
"""Share of the device's buffers for lineages and checkpoints; the rest is for weights and passes.
"""


def with_slack(tokens: int) -> int:
    return rounded(tokens + max(64, tokens // 24))


def rounded(tokens: int) -> int:
    """Return `tokens` rounded up to a multiple of 64, as capacities of buffers are."""
    return (tokens + 63) // 64 * 64


class BufferCount:
    """Number of device buffers that a lineage and a checkpoint take, and a limit of their sum.

    Metal limits how many buffers there are, not only how many bytes they take.
    """

    def __init__(self, layout: Layout, device_limit: int | None):
        states = _count_specs(layout.states)
        self.per_lineage = sum(map(len, layout.specs)) + states
        self.per_checkpoint = states
        self.limit = None if device_limit is None else int(BUFFER_SHARE * device_limit)

    def count(self, lineages: int, checkpoints: int) -> int:
        return lineages * self.per_lineage + checkpoints * self.per_checkpoint

    def allows(self, count: int) -> bool:
        return self.limit is None or count <= self.limit


def _count_specs(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_count_specs, value))
    return int(isinstance(value, ArraySpec))


class NoWrites:
    """In place of `WriteBehind` without a disk tier: nothing is written, and nothing waits."""

    works = False
    pending_paths = 0

    def count_locks(self, node: Node) -> int:
        return 0

    def drop_checkpoint(self, node: Node) -> None: ...

    def wait_for_one(self) -> bool:
        return False


class RamTier:
    """All lineages of a model, idle or in use, with their bytes charged to one budget.

    The nodes of the prefix tree have lineages as values. `device_buffers`: number of buffers that
    the device can hold. `copy_bytes`: most bytes that new lineages copy in one evaluation, unless
    one array has more. `dropped` counts evictions of KV that is then lost, `spilled` those of KV
    that is on disk too.
    """

    def __init__(
        self,
        layout: Layout,
        budget: Budget,
        tree: PrefixTree,
        shared: SharedRam,
        write_behind: WriteBehind | NoWrites,
        *,
        device_buffers: int | None = None,
        copy_bytes: int = 0,
        lineage: NewLineage = Lineage,
        label: str = "unnamed",
    ):
        self.label = label
        self.layout = layout
        self.budget: Budget = budget
        self.tree = tree
        self.buffers = BufferCount(layout, device_buffers)
        self.copy_bytes = copy_bytes
        self.shared = shared
        self.make_lineage = lineage
        self.idle: dict[int, Lineage] = {}
        self.busy: dict[int, Lineage] = {}
        self.dropped = self.spilled = 0
        self._write_behind = write_behind
        shared.join(self)

    # -- lineages ----------------------------------------------------------------------------------

    def set_busy(self, lineage: Lineage) -> None:
        self.idle.pop(id(lineage), None)
        self.busy[id(lineage)] = lineage

    def set_idle(self, lineage: Lineage) -> None:
        """Mark `lineage` as idle, and as the most recently used of the idle ones."""
        if not lineage.rows:
            lineage.rest()
        self.busy.pop(id(lineage), None)
        self.idle[id(lineage)] = lineage

    def discard(self, lineage: Lineage) -> None:
        """Release the buffers of a lineage whose content may be wrong, and their bytes."""
        self.idle.pop(id(lineage), None)
        self.busy.pop(id(lineage), None)
        self.budget.release("kv", lineage.nbytes)
        lineage.release()

    # -- reserving ---------------------------------------------------------------------------------

    def least_bytes(self, tokens: int) -> int:
        return rounded(tokens + 1) * self.layout.bytes_per_token + self.layout.running_bytes

    def reserve_buffer(self, held: int, least: int, evict: Evict) -> int | None:
        """Reserve a buffer of at least `least` positions, which replaces one of `held` positions.

        Adds room for growth if that fits. Returns the capacity in positions of the new buffer, or
        None, with nothing reserved, if not even `least` positions fit.
        """
        # no model is unloaded for room to grow
        for_growth: Evict = evict if self.shared.lone or evict == "no" else "idle"
        sizes: list[tuple[int, Evict]] = [(with_slack(least), for_growth), (least, evict)]
        roomy = rounded(least + least // ROOM)
        if self.spares((roomy - held) * self.layout.bytes_per_token):
            sizes.insert(0, (roomy, "no"))
        for capacity, mode in sizes:
            if self.reserve_kv(capacity - held, held, evict=mode):
                return capacity
        return None

    def spares(self, size: int = 0) -> bool:
        return self.budget.free - size >= self.budget.limit // SPARE

    def reserve_kv(self, tokens: int, held: int = 0, *, evict: Evict) -> bool:
        """Charge the KV bytes of `tokens` more positions; return False if there is no room.

        `held`: positions of the buffers that are then copied to larger ones, array by array: the
        bytes of the largest old array must be available too, but are not charged.
        """
        size = tokens * self.layout.bytes_per_token
        return self.reserve("kv", size, held * self.layout.widest, evict=evict)

    def reserve(self, kind: str, size: int, passing: int = 0, *, evict: Evict = "idle") -> bool:
        """Charge `size` bytes to `kind` of the budget, after making room; False without room.

        A negative `size` releases bytes. `passing`: further bytes that must be available for a
        short time, such as during a copy; they may be among those set aside for forward passes.
        Blocks only with `evict` "wait".
        """
        needed = max(0, size) + max(0, passing - self._transient)
        # a commit that takes several checkpoints needs the rows until the last one
        if not self.make_room(needed, evict=evict, in_use=kind != "checkpoints"):
            return False
        self.budget.charge(kind, size)
        return True

    def has_passing(self, size: int) -> bool:
        """Return whether `size` bytes for temporary use are available without any eviction."""
        return size <= self.budget.free + self._transient

    @property
    def _transient(self) -> int:
        return self.budget.by_kind().get("transient", 0)

    def make_room(self, size: int, *, evict: Evict = "idle", in_use: bool = True) -> bool:
        """Free budget until `size` bytes fit, and return whether they do.

        First drops the rows of windows, also of lineages `in_use`, and compacts idle lineages with
        many unused positions, then evicts the entries with the lowest worth. Evicts nothing if
        evicting all idle entries would not suffice: those of all models if the shared budget is
        short, those of this model if its own limit is.
        """
        if evict == "no" or self.budget.free >= size:
            return self.budget.free >= size
        kept = 0 if in_use else self._rows_in_use
        if self.budget.own_free + self.idle_bytes - kept < size:
            return False
        if not self.shared.reach(size, unload=evict in UNLOADING):
            return False
        self.compact_spare(lambda: self.budget.free >= size, in_use=in_use)
        if self.budget.own_free >= size:
            self.shared.compact(size, in_use=in_use)
        while self.budget.free < size:
            own, short = size - self.budget.own_free, size - self.budget.free
            if self.evict_once(own) if own > 0 else self.shared.evict_least(short):
                continue
            if evict == "wait" and self._write_behind.wait_for_one():
                continue
            if self._thin_in_use(short):
                continue
            if evict not in UNLOADING or own > 0 or not self.shared.unload(size):
                return False
        return True

    # -- evicting ----------------------------------------------------------------------------------

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle lineages, of rows of windows, and of all checkpoints.

        That is the most that evicting could free.
        """
        idle = sum(lineage.nbytes for lineage in self.idle.values())
        return idle + self._rows_in_use + self.tree.checkpoint_bytes

    @property
    def _rows_in_use(self) -> int:
        return sum(lineage.rows for lineage in self.busy.values()) * self.layout.window_bytes

    @property
    def writing(self) -> int:
        return self._write_behind.pending_paths

    def evict_once(self, needed: int, worth: float = CHECKPOINT_WORTH) -> bool:
        """Evict checkpoints on the path to the leaf node with the lowest worth, or its last tokens.

        `needed`: bytes to free; fewer may be freed. Returns False if a request or a pending write
        uses every leaf node.

        With opaque slots, checkpoints on the path to the node are dropped first (see `Trail`), up
        to `needed` bytes, unless the conversation has continued on another branch, which uses them.
        If none was dropped, tokens at the end of the node are evicted; with opaque slots, all of
        them.
        """
        leaf = self.tree.least_leaf()
        if leaf is None:
            return False
        if self.layout.opaque and not leaf.usage.replaced and self._thin(leaf, needed, worth):
            return True
        length = leaf.end - leaf.start
        per_token = self.layout.bytes_per_token
        cut = length
        self.budget.release("checkpoints", leaf.checkpoint_bytes)
        if per_token and not self.layout.opaque:
            cut = min(
                leaf.end - self.tree.wished(leaf),
                max(-(-needed // per_token), length // 4, STEP),
            )
        self.tree.note_eviction(leaf, leaf.end - cut)
        self._cut(leaf, leaf.end - cut)
        return True

    def _thin(self, leaf: Node, needed: int, worth: float) -> int:
        freed = 0
        for node in Trail.to(leaf).checkpoints_to_drop(leaf.end, 0, worth=worth):
            if not node.locks and freed < needed:
                freed += self._drop_checkpoint(node)
        return freed

    def _thin_in_use(self, needed: int) -> int:
        """Drop checkpoints of all paths but the newest of each, until `needed` bytes are free."""
        freed = 0
        for leaf in self.tree.leaves() if self.layout.opaque else ():
            trail = Trail.to(leaf)
            less = trail.checkpoints_to_drop(leaf.end, 0)
            for node in dict.fromkeys([*less, *trail.nodes[:-1]]):
                if freed >= needed:
                    return freed
                if len(node.children) < 2:
                    freed += self._drop_checkpoint(node)
        return freed

    def _drop_checkpoint(self, node: Node) -> int:
        size = node.checkpoint_bytes
        if node.locks:
            self._write_behind.drop_checkpoint(node)
        self.budget.release("checkpoints", size)
        self.tree.drop_checkpoint(node)
        return size

    def _cut(self, leaf: Node, position: int) -> None:
        if self._write_behind.works:
            self.spilled += 1
        else:
            self.dropped += 1
        above = leaf.parent
        cut = self.tree.cut(leaf, position)
        if id(cut.value) in self.idle:
            self.shrink(cut.value, force=True)
        if self.layout.opaque and above is not None and self.tree.useless(above):
            self._cut(above, above.start)

    def evict(self, size: int) -> None:
        goal = self.budget.used - size
        self._drop_spare_rows(lambda: self.budget.used <= goal)
        while self.budget.used > goal and self.evict_once(self.budget.used - goal):
            pass

    def clear(self) -> None:
        self.evict(self.budget.limit)

    def remove(self, node: Node, keep: int) -> int:
        """Remove the tokens of an unused `node` from position `keep` on; return their number."""
        if node.locks or node.children or node.detached:
            return 0
        cut = self.tree.cut(node, max(node.start, keep))
        self.budget.release("checkpoints", cut.checkpoint_bytes)
        if id(cut.value) in self.idle:
            self.shrink(cut.value, force=True)
        return cut.tokens

    # -- compacting --------------------------------------------------------------------------------

    def keep_rows(self, lineage: Lineage, least: int) -> None:
        """Let a lineage keep the rows of its windows up to position `least` or a little more.

        They are dropped if there is no memory to spare.
        """
        least = min(least, lineage.capacity)
        rows = lineage.rows + lineage.lacking_rows(least)
        if not self.layout.keeps_rows or rows == lineage.rows:
            return
        end = min(rounded(least + rows // ROOM), lineage.capacity)
        lacking = lineage.lacking_rows(end) * self.layout.window_bytes
        if self.spares(lacking) and self.reserve("kv", lacking, evict="no"):
            held = lineage.nbytes
            try:
                lineage.keep_rows(end)
            finally:
                self.budget.release("kv", held + lacking - lineage.nbytes)
        else:
            self.slide(lineage)

    def widen_rows(self, lineage: Lineage, least: int) -> None:
        """Make room in the windows of an idle lineage that has grown, or drop their rows."""
        if lineage.rows:
            self.keep_rows(lineage, least)
            if not lineage.rows:
                lineage.rest()

    def slide(self, lineage: Lineage) -> None:
        """Drop the rows of a lineage's windows but those that its next step needs."""
        if lineage.rows:
            held = lineage.nbytes
            lineage.slide()
            self.budget.release("kv", held - lineage.nbytes)

    def drop_rows(self, lineage: Lineage) -> None:
        """Drop the rows of an idle lineage's windows; checkpoints stay."""
        if lineage.rows:
            held = lineage.nbytes
            lineage.rest()
            self.budget.release("kv", held - lineage.nbytes)

    def compact_idle(self, *, evict: Evict = "idle") -> None:
        """Compact idle lineages with many unused positions to the range that the tree uses.

        The latest `WHOLE_LINEAGES` that start at position 0 stay, so that requests can continue
        them. All do with memory to spare.
        """
        if len(self.idle) + len(self.busy) > self.tree.value_count:  # an error came between
            for lineage in [x for x in self.idle.values() if self.tree.live_range(x) is None]:
                self.shrink(lineage, force=False)
        self._bound_buffers(evict=evict)
        self._drop_spare_rows(self.spares)
        if self.spares():
            return
        spare = [x for x in self.idle.values() if self._has_spare(x)]
        for i, lineage in enumerate(reversed(spare)):
            if i >= WHOLE_LINEAGES or not lineage.whole:
                self.shrink(lineage, force=True)

    def compact_spare(self, enough: Callable[[], bool], *, in_use: bool = True) -> None:
        """Compact idle lineages with many unused positions, until `enough()` or none is left.

        The rows of sliding windows go first, also those of lineages `in_use`.
        """
        self._drop_spare_rows(enough)
        for lineage in list(self.busy.values()) if in_use else ():
            if enough():
                return
            self.slide(lineage)
        for lineage in list(self.idle.values()):
            if enough():
                return
            if self._has_spare(lineage):
                self.shrink(lineage, force=True)

    def _drop_spare_rows(self, enough: Callable[[], bool]) -> None:
        if not enough():
            for lineage in [lineage for lineage in self.idle.values() if lineage.rows]:
                self.drop_rows(lineage)
                if enough():
                    return

    def _has_spare(self, lineage: Lineage) -> bool:
        start, end = self.tree.live_range(lineage) or (0, 0)
        return lineage.capacity - (end - start) > max(STEP, lineage.capacity // 8)

    def shrink(self, lineage: Lineage, *, force: bool) -> int:
        """Release an idle lineage that the tree does not use; return the number of bytes freed.

        With `force`, a range that the tree uses is copied to buffers of its size, if there is room
        for the copy. If that fails, the lineage is discarded; raises RuntimeError if the failure is
        one of the device.
        """
        held = self.tree.live_range(lineage)
        before = lineage.nbytes
        if held is None:
            lineage.release()
            self.idle.pop(id(lineage), None)
        elif force and self.layout.specs and held[1] - held[0] < lineage.capacity:
            if not self.has_passing((held[1] - held[0]) * self.layout.widest):
                return 0
            try:
                lineage.compact(*held)
            except RuntimeError as error:
                self.budget.release("kv", before - lineage.nbytes)  # gone with the failed copy
                self.discard(lineage)
                if device.is_device_error(error):
                    raise
                log.exception(
                    "model %s: copying KV to a smaller buffer failed; this KV is no longer in RAM: "
                    "%s",
                    *(self.label, error),
                )
                return before
        freed = before - lineage.nbytes
        self.budget.release("kv", freed)
        mx.clear_cache()
        return freed

    # -- buffers -----------------------------------------------------------------------------------

    def count_buffers(self) -> int:
        lineages = len(self.idle) + len(self.busy)
        return self.buffers.count(lineages, self.tree.checkpoints)

    def _bound_buffers(self, more: int = 0, *, evict: Evict = "idle") -> bool:
        """Evict until `more` new checkpoints are within the limit; return whether they are."""
        added = more * self.buffers.per_checkpoint
        while not self.buffers.allows(self.count_buffers() + added):
            if evict == "no" or not self.evict_once(self.budget.limit):
                return False
        return True

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def checkpoint_limit(self) -> int:
        limit = self.budget.limit
        return int(limit * BUDGET_SHARE) if self.layout.specs else limit

    def max_checkpoints(self, tokens: int) -> int:
        return most_checkpoints(self.layout, tokens, self.budget.limit)

    def reserve_checkpoint(self, node: Node, size: int, end: int, *, evict: Evict = "idle") -> bool:
        """Reserve `size` bytes for a checkpoint at `node`, on a path of `end` tokens.

        To stay within the limits for one path and for all checkpoints, drops other checkpoints of
        this path, then those of other paths, without waiting for the disk. The caller must hold one
        lock on the path; checkpoints that other requests lock are not dropped. Returns False
        without room.
        """
        for each in self._superseded(node, end, self.max_checkpoints(end)):
            if self._locked_once(each):
                self._drop_checkpoint(each)
        most = self.checkpoint_limit - size
        while evict != "no" and self.tree.checkpoint_bytes > most and self.evict_once(1, inf):
            pass
        if self.tree.checkpoint_bytes > most and evict != "no":
            held = Trail.to(node).nodes
            for each in [*self._superseded(node, end, 0), *held[1:], *held[:1]]:
                over = self.tree.checkpoint_bytes > most
                if over and each.checkpoint_bytes and self._locked_once(each):
                    self._drop_checkpoint(each)
        if self.tree.checkpoint_bytes > most or not self._bound_buffers(1, evict=evict):
            return False
        return self.reserve("checkpoints", size, evict=evict)

    def _locked_once(self, node: Node) -> bool:
        """Return whether at most one request, apart from pending writes, locks `node`."""
        return node.locks <= 1 or node.locks - self._write_behind.count_locks(node) <= 1

    def _superseded(self, node: Node, end: int, most: int) -> list[Node]:
        return Trail.to(node).checkpoints_to_drop(end, most, coming=[node.end])
