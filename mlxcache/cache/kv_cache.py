"""KVCache, the owner of all KV bytes of one model in RAM and on disk. MLX thread only.

The half-open token ranges of one request, from its prompt to its end:

    0            cached             len(prompt)          length
    |--------------|--------------------|-------------------|
    | reused       | fed by prefill     | fed by decoding   |
    |--------------|--------------------|-------------------|
    [0, cached)    in the tree before; `restore` moves `cached` up
    [0, length)    in the lineage; `commit` puts all of it into the tree
    [0, written)   handed to the disk tier by `persist`, in whole blocks until the request is over

One `KVCache` has one prefix tree, that of one namespace. Several caches may share a budget,
as members of one `SharedRam`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from mlxcache.cache.disk import DiskTier
from mlxcache.cache.kv_io import KVFiles
from mlxcache.cache.main_conversation import NO_HINTS, CacheHints, MainConversations
from mlxcache.cache.placement import Placement, finite_prefix, intact, owner_at, reusable
from mlxcache.cache.ram import STEP, Evict, NoWrites, RamTier, rounded
from mlxcache.cache.restore import MIN_UNKNOWN, DiskLookup
from mlxcache.cache.shared_ram import MemoryWaits, SharedRam
from mlxcache.errors import Inconsistent
from mlxcache.model import device, kv
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Lineage, NewLineage, ends_finite, finite_upto
from mlxcache.store.digests import BLOCK
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held
from mlxcache.store.store import Store
from mlxcache.tree.budget import Budget
from mlxcache.tree.eviction import EvictionOrder, Worth
from mlxcache.tree.node import Node
from mlxcache.tree.prefix_tree import PathEnds, PrefixTree
from mlxcache.types import NO_TOKENS, Tokens

if TYPE_CHECKING:
    from mlxcache.remote.tier import RemoteTier

log = logging.getLogger("mlxcache.engine")

PERSIST_TOKENS = 1024
"""New tokens of a running request after which `persist` writes them."""

MEASURE_S = 0.002
"""Seconds after which `measure` ends."""

OOM_SHARE = 4
"""Divisor: after a failed allocation, 1/OOM_SHARE of the idle KV is evicted."""


@dataclass(slots=True)
class Lease:
    """The use of a lineage by one request, with the memory reserved for it.

    `cached`: prompt tokens that are reused, of which `restored` were read from disk. `matched`:
    prompt tokens shared with earlier prompts in RAM, reusable or not. `node`: the node that the
    lease has locked. `awaiting_state`: KV is present, but the state of layers that cannot be sliced
    must still be restored from disk. `written`: tokens handed to the disk tier.
    """

    lineage: Lineage
    cached: int
    node: Node | None = None
    prompt: Tokens = field(default_factory=lambda: NO_TOKENS, compare=False)
    hints: CacheHints = NO_HINTS
    evict: Evict = "wait"
    state_bytes: int = 0
    awaiting_state: bool = False
    restored: int = 0
    written: int = 0
    matched: int = 0

    @property
    def length(self) -> int:
        return self.lineage.length

    def note_restored(self) -> None:
        self.cached = self.written = self.length
        self.awaiting_state = False

    @property
    def evict_now(self) -> Literal["no", "idle"]:
        """How to make room without waiting for writes to disk."""
        return "no" if self.evict == "no" else "idle"


class KVCache:
    """KV of one model, in RAM and on disk, and the operations by which requests use it.

    Each operation reserves bytes before it allocates them. Nodes that a lease locks are not evicted
    until it is released.
    """

    def __init__(self, ram: RamTier, disk: DiskTier | None = None):
        self.ram = ram
        self.disk = disk
        self.label = ram.label
        self.layout: Layout = ram.layout
        self.budget: Budget = ram.budget
        self.tree: PrefixTree = ram.tree
        self.waits = MemoryWaits(ram)
        self._leases: dict[int, Lease] = {}
        self._ends = PathEnds(ram.tree)
        self._mains = MainConversations()
        self._placement = Placement(ram)

    @classmethod
    def open(
        cls,
        layout: Layout,
        budget: Budget,
        store: Store | None = None,
        *,
        pending_limit: int = 0,
        wake: Callable[[], None] = lambda: None,
        worth: Worth | None = None,
        device_buffers: int | None = None,
        copy_bytes: int = 0,
        shared: SharedRam | None = None,
        remote: RemoteTier | None = None,
        lineage: NewLineage = Lineage,
        order: type[EvictionOrder] = EvictionOrder,
        files: Callable[[Layout], KVFiles] = KVFiles,
        label: str = "unnamed",
    ) -> KVCache:
        """Open a cache, with a disk tier if `store` is given, which the cache then owns.

        `wake()` is called from other threads when there is work for the MLX thread. `copy_bytes`:
        bytes of KV copied in one evaluation, 0 for one array at a time. `shared`: the RAM of
        several models, which the cache joins until it is closed; `budget` must then be a member of
        its budget.
        """
        worth = worth or Worth(layout.bytes_per_token, layout.checkpoint_bytes)
        shared = shared or SharedRam(budget)
        tree = PrefixTree(layout.bytes_per_token, worth, clock=shared.clock, order=order)
        disk = None
        if store is not None:
            disk = DiskTier(
                store, files(layout), tree, pending_limit, wake, remote=remote, label=label
            )
        write_behind = disk.write_behind if disk is not None else NoWrites()
        ram = RamTier(
            layout,
            budget,
            tree,
            shared,
            write_behind,
            device_buffers=device_buffers,
            copy_bytes=copy_bytes,
            lineage=lineage,
            label=label,
        )
        return cls(ram, disk)

    # -- matching ----------------------------------------------------------------------------------

    def match(self, ids: Tokens) -> int:
        """Return how many leading tokens of `ids` are in RAM, reusable or not. Changes nothing."""
        return self.tree.match(ids, touch=False).length

    def reusable(self, ids: Tokens) -> int:
        """Return how many leading tokens the next `acquire` could reuse from RAM."""
        return reusable(self.layout, self.tree.match(ids, touch=False), len(ids))[0]

    def measure(
        self, groups: Iterable[Sequence[LeafRow]], ids: Mapping[LeafRow, Tokens]
    ) -> list[Held | None]:
        """Return, for each group, how many tokens of its leaves are reusable in RAM, and the bytes.

        What leaves of a group share is counted once. The result has None for a group of which `ids`
        lack a leaf whose tokens must be compared. After `MEASURE_S` seconds, the other groups are
        left out, so that decoding goes on.
        """
        found: list[Held | None] = []
        deadline = time.perf_counter() + MEASURE_S
        for leaves in groups:
            found.append(self._measure(leaves, ids))
            if time.perf_counter() > deadline:
                break
        return found

    def _measure(self, leaves: Sequence[LeafRow], ids: Mapping[LeafRow, Tokens]) -> Held | None:
        tokens, nbytes = [], 0
        ends: dict[int, int] = {}
        for leaf in leaves:
            match = self._ends.match(leaf, ids.get(leaf))
            if match is None:
                return None
            tokens.append(reusable(self.layout, match, leaf.tokens + 1)[0])
            for node in match.nodes:
                end = min(node.end, match.length)
                before = ends.get(id(node), node.start)
                if end == node.end and before < end:
                    nbytes += node.checkpoint_bytes
                nbytes += max(0, end - before) * self.layout.bytes_per_token
                ends[id(node)] = max(end, before)
        return Held(tuple(tokens), nbytes)

    # -- acquiring ---------------------------------------------------------------------------------

    def acquire(
        self,
        ids: Tokens,
        reply: int,
        *,
        planned: int = 0,
        hints: CacheHints = NO_HINTS,
        evict: Evict = "wait",
    ) -> Lease | None:
        """Lease a lineage that holds the longest reusable prefix of `ids`, or None without room.

        Reserves room for all of `ids` and for the first tokens of a reply of `reply` tokens.
        `planned`: position up to which KV and state will be restored from disk; all KV in RAM below
        it is then used, even without a state to continue from. Blocks for writes to disk only with
        `evict` "wait". Raises MLX's error if a copy fails, after releasing what was reserved.
        """
        match = self.tree.match(ids if hints.kept else NO_TOKENS)
        main = self._mains.main_beside(ids, hints)
        self.tree.renew(main)
        cached, state = reusable(self.layout, match, len(ids))
        awaiting_state = planned > cached
        if awaiting_state:
            cached, state = intact(match, planned), None
        elif cached and state is None and self.layout.opaque:
            state = owner_at(match, cached).state_at(cached)
        least = rounded(len(ids) + min(reply, STEP))
        last = match.nodes[-1] if match.nodes else None
        if last is not None:
            self.tree.lock(last)
        try:
            placed = self._placement.place(match, cached, least, evict)
        finally:
            if last is not None:
                self.tree.unlock(last)
        if placed is None:
            return None
        lease = Lease(
            placed.lineage,
            cached,
            placed.node,
            prompt=ids,
            hints=hints,
            evict="no" if evict == "no" else "wait",
            awaiting_state=awaiting_state,
            written=cached,
            matched=match.length,
        )
        self._leases[id(lease)] = lease
        try:
            if not self.ram.reserve("states", self.layout.running_bytes, evict=evict):
                self.release(lease)
                return None
            lease.state_bytes = self.layout.running_bytes
            self._continue_from(lease, state)
            state = None  # views of windows, whose buffers larger ones may replace now
            if not awaiting_state:
                self.ram.keep_rows(lease.lineage, len(ids) + STEP)
            if hints.asked:
                key = hints.conversation_key
                uses = self.tree.count_use(self.tree.match(ids), len(ids), key)
                self.tree.renew(main, uses)
        except BaseException:
            self.release(lease)
            raise
        return lease

    def _continue_from(self, lease: Lease, state: State | None) -> None:
        """Set the lease's lineage to `state`, the one after its `cached` tokens."""
        lineage = lease.lineage
        if lease.awaiting_state or not lineage.covers(lease.cached):
            self.ram.drop_rows(lineage)
            lineage.restore(state)

    # -- restoring ---------------------------------------------------------------------------------

    def look_up(self, ids: Tokens, known: int) -> DiskLookup | None:
        """Start a lookup of `ids` on disk; None without a disk. `wake` is called as it proceeds."""
        return self.disk.restorer.look_up(ids, known) if self.disk is not None else None

    @property
    def is_shared(self) -> bool:
        """True if KV that is on disk is also uploaded to a remote, for other servers."""
        return self.disk is not None and self.disk.remote is not None

    @property
    def min_unknown(self) -> int:
        """Least number of prompt tokens missing in RAM for which `look_up` is worthwhile."""
        return self.disk.restorer.min_unknown if self.disk is not None else MIN_UNKNOWN

    def can_restore(self, lease: Lease, lookup: DiskLookup) -> bool:
        return self.disk is not None and self.disk.restorer.ready(lookup, lease.length)

    def restore(self, lease: Lease, lookup: DiskLookup) -> bool:
        """Load verified files of KV from disk into the lease; return whether all are loaded.

        Commits them, in a model with opaque slots all together after the last one. Blocks. Raises
        StoreError, OSError, RuntimeError or ValueError if a file cannot be used; call `abandon`
        then.
        """
        assert self.disk is not None
        before = lease.length
        complete = self.disk.restorer.load(lookup, lease.lineage)
        if not self.layout.opaque:
            lease.restored += lease.length - before
            self.commit(lease, lookup.ids, checkpoint=False)
        elif complete:
            lease.restored = lease.length - lease.cached
            self.commit(lease, lookup.ids, checkpoint=True)
        if complete:
            lease.note_restored()
            self.ram.keep_rows(lease.lineage, len(lease.prompt) + STEP)
        return complete

    # -- growing and committing --------------------------------------------------------------------

    def extend(self, lease: Lease, length: int) -> bool:
        """Make room for `length` positions in the lease; return whether there is. May block."""
        lineage = lease.lineage
        if length > lineage.capacity and self.layout.specs:
            capacity = self.ram.reserve_buffer(lineage.capacity, rounded(length), lease.evict)
            if capacity is None:
                return False
            with self._placement.charged(lineage, capacity, leased=True):
                lineage.grow(capacity)
            self.ram.keep_rows(lineage, length)
        elif lineage.rows:
            self.ram.keep_rows(lineage, length)
        return True

    @property
    def may_grow_ahead(self) -> bool:
        return len(self._placement.continued) > 0

    def grow_ahead(self) -> bool:
        """Make room for the next turn of a conversation by a copy; False if there is none."""
        return self._placement.grow_ahead()

    def commit(
        self,
        lease: Lease,
        ids: Tokens,
        *,
        checkpoint: bool,
        upto: int | None = None,
        final: bool = False,
    ) -> None:
        """Add the first `upto` tokens of `ids`, prompt and reply, to the tree.

        They are all of the lease's, unless sliding windows are the only states; these must still
        have the rows before `upto`.

        `checkpoint`: also store the state at their end, if there is room; may evict for it.
        `final`: the lease is released next, so the checkpoint may take bytes that are withheld
        while the machine is short of memory: as many are released with the lease. Waits for the
        device and raises its error; nothing is committed then.
        """
        lineage = lease.lineage
        if not (self.layout.cacheable and lease.hints.kept and lineage.length):
            return
        device.confirm()
        lineage.mark_confirmed()
        key = lease.hints.conversation_key
        upto = lineage.length if upto is None else upto
        node = self.tree.insert(ids[:upto], lineage, key)
        self.tree.lock(node)
        before, lease.node = lease.node, node
        if before is not None:
            self.tree.unlock(before)
        self._take_over_path(lease, node)
        if checkpoint and self.layout.opaque and node.checkpoint is None:
            self._set_checkpoint(lease, node, len(ids), final=final)

    def _set_checkpoint(self, lease: Lease, node: Node, end: int, *, final: bool) -> None:
        lineage, evict = lease.lineage, lease.evict_now
        early = node.end < lineage.length
        size = kv.nbytes(lineage.state_at(node.end)) if early else lineage.state_bytes
        reserved = self.ram.reserve_checkpoint(node, size, end, evict=evict)
        shared = self.ram.shared
        if not reserved and final and shared.withheld:
            shared.withhold(max(0, shared.withheld - size))
            reserved = self.ram.reserve_checkpoint(node, size, end, evict=evict)
        if not reserved:
            return
        try:
            state = kv.copied(lineage.state_at(node.end)) if early else lineage.capture()
            device.confirm()
            self.tree.set_checkpoint(node, state, size)
        except BaseException:
            self.budget.release("checkpoints", size)
            raise

    def _take_over_path(self, lease: Lease, node: Node) -> None:
        """Make the lease's lineage hold segments of its path that other lineages held.

        These are segments whose KV was lost, and segments that were fed again because there was no
        state to continue from. The lineage has their KV anyway, so other copies can be released.
        """
        lineage = lease.lineage
        path = node.path()[1:]
        holds = any(n.value is lineage and n.end <= lease.cached for n in path)
        fed = lease.cached if holds else node.end
        again = [n for n in path if n.value is not lineage and (n.value.lost or n.start >= fed)]
        others = {id(n.value): n.value for n in again}
        self.tree.retarget(again, lineage)
        for other in others.values():
            if id(other) in self.ram.idle and self.tree.live_range(other) is None:
                self.ram.shrink(other, force=True)

    def persist(self, lease: Lease, ids: Tokens, *, whole: bool = False) -> None:
        """Queue committed tokens for writing to disk. Does not block.

        Queues those up to the last whole block, if at least `PERSIST_TOKENS` are not queued yet;
        with `whole`, all. The path stays locked in RAM until it is on disk.
        """
        if self.disk is None or lease.node is None:
            return
        write_behind = self.disk.write_behind
        if whole:
            end, parting = lease.node.end, lease.hints.parting
            write_behind.add(lease.node, ids[:end], lease.cached, whole=True, parting=parting)
        elif lease.length - lease.written >= PERSIST_TOKENS:
            lease.written = lease.length // BLOCK * BLOCK
            write_behind.add(lease.node, ids[: lease.written])

    # -- ends --------------------------------------------------------------------------------------

    def finish(self, lease: Lease, ids: Tokens) -> None:
        """Commit what a request computed, and queue it for writing to disk; the lease stays.

        If the model produced NaN, removes it instead. Nothing is committed if a restore is
        incomplete. Waits for the device, and raises its error before doing anything else.
        """
        if lease.awaiting_state:
            return
        device.confirm()  # a failed pass may leave NaN too
        if not ends_finite(lease.lineage):
            self.purge(lease, ids)
            return
        self.commit(lease, ids, checkpoint=True, final=True)
        self.persist(lease, ids, whole=True)

    def holds(self, lease: Lease) -> bool:
        return id(lease) in self._leases

    def release(self, lease: Lease) -> None:
        """End a lease: the lineage becomes idle, or is released if the tree does not refer to it.

        If it raises while it still `holds` the lease, call it again; does nothing for a released
        lease.
        """
        if not self.holds(lease):
            return
        lineage = lease.lineage
        if lease.node is not None:
            self.tree.keep(lease.node, lease.hints.keeps)
            self._mains.note_end(lease.prompt, lease.hints, lease.node)
            self.tree.unlock(lease.node)
            lease.node = None
        if not lineage.lost:
            self.ram.set_idle(lineage)
        self.budget.release("states", lease.state_bytes)
        del self._leases[id(lease)]
        if lease.cached and not lineage.lost:
            lineage.note_turn(lease.length - lease.cached)
            self._placement.continued.append(lineage)
        if not lineage.lost:
            self.ram.shrink(lineage, force=False)
        self.ram.compact_idle(evict=lease.evict_now)

    def abandon(self, lease: Lease) -> None:
        """End a lease whose last pass or restore failed; only its committed KV stays in RAM.

        A file may fail as late as when its arrays are evaluated. The buffers of the lineage are
        then unusable, and are released.
        """
        lineage = lease.lineage
        held = self.tree.live_range(lineage)
        self.ram.drop_rows(lineage)
        lineage.truncate(held[1] if held else 0)
        try:
            if not lineage.sound():
                self.ram.discard(lineage)
        except RuntimeError:
            self.ram.discard(lineage)
            raise
        finally:
            self.release(lease)

    def drop_damaged(self) -> None:
        """Release the buffers of every lineage that a device error may have damaged.

        Of the other lineages, only committed positions are intact: call `abandon` for each of their
        leases.
        """
        for lineage in [*self.ram.idle.values(), *self.ram.busy.values()]:
            if lineage.survives_failure():
                lineage.mark_confirmed()
                self.ram.drop_rows(lineage)
            else:
                self.ram.discard(lineage)

    def purge(self, lease: Lease, ids: Tokens) -> None:
        """Remove from both tiers what a request computed, because the model produced NaN.

        The prefix that it reused and the tokens that other requests share stay as far as their KV
        is finite. The lease stays, but its lock on the tree is released.
        """
        self.ram.drop_rows(lease.lineage)
        reused = min(lease.cached, finite_upto(lease.lineage))
        kept = finite_prefix(self.tree.match(ids, touch=False), reused)
        log.warning(
            "model %s: model produced NaN; kept the KV of %d of a request's %d tokens",
            *(self.label, kept, len(ids)),
        )
        if lease.node is not None:
            self.tree.unlock(lease.node)
            lease.node = None
        if self.disk is not None:
            self.disk.write_behind.forget(self._nodes_beyond(ids, kept))
            self.disk.write_behind.delete_beyond(ids, kept)
        self.forget(ids, kept)

    # -- removing ----------------------------------------------------------------------------------

    def forget(self, ids: Tokens, keep: int) -> int:
        """Remove from RAM `ids` beyond `keep`, and what continues them; return how many tokens.

        KV that a request uses or that is not on disk yet stays.
        """
        beyond = self._nodes_beyond(ids, keep)
        if not beyond:
            return 0
        below = [beyond[0]]
        for node in below:
            below += node.children.values()
        return sum(self.ram.remove(node, keep) for node in reversed(below))

    def forget_unshared(self, ids: Tokens, keep: int) -> bool:
        nodes = [n for n in self.tree.match(ids, touch=False).nodes if n.end > keep]
        if not nodes or any(len(n.children) > (n is not nodes[-1]) for n in nodes):
            return False
        return self.forget(ids, keep) > 0

    def _nodes_beyond(self, ids: Tokens, keep: int) -> list[Node]:
        match = self.tree.match(ids, touch=False)
        return [node for node in match.nodes if min(node.end, match.length) > keep]

    def clear(self) -> None:
        self.ram.clear()

    def free_after_oom(self, lease: Lease) -> bool:
        """Evict some idle KV, and undo the failed pass; return whether it may be tried again."""
        idle = sum(each.nbytes for each in self.ram.idle.values())
        self.ram.evict(max(1, idle // OOM_SHARE))
        mx.clear_cache()
        lineage = lease.lineage
        lineage.truncate(lineage.length)
        return lineage.sound() and kv.are_sound(kv.states(lineage.slots))

    def end_pressure(self) -> None:
        self.ram.shared.withhold(0)

    def check_integrity(self, *, batch: int) -> None:
        """Raise Inconsistent unless the bytes and locks that are charged are those in use."""
        leases, ram = list(self._leases.values()), self.ram
        lineages = [*ram.idle.values(), *ram.busy.values()]
        held = {
            "kv": sum(lineage.nbytes for lineage in lineages),
            "checkpoints": self.tree.checkpoint_bytes,
            "states": sum(lease.state_bytes for lease in leases),
            "batch": batch,
        }
        charged = self.budget.by_kind()
        wrong = [
            f"{charged.get(kind, 0)} bytes of {kind} are charged, {size} are held"
            for kind, size in held.items()
            if charged.get(kind, 0) != size
        ]
        locks = sum(lease.node is not None for lease in leases) + ram.writing
        if self.tree.root.locks != locks:
            wrong.append(f"{self.tree.root.locks} paths are locked, {locks} should be")
        leased = {id(lease.lineage) for lease in leases if not lease.lineage.lost}
        if leased != set(ram.busy):
            wrong.append(f"{len(ram.busy)} lineages are busy, {len(leased)} are leased")
        if wrong:
            raise Inconsistent(f"model {self.label}: {'; '.join(wrong)}")

    # -- the disk tier's part in the loop ----------------------------------------------------------

    @property
    def writing(self) -> bool:
        return self.disk is not None and self.disk.write_behind.busy

    @property
    def can_pump(self) -> bool:
        return self.disk is not None and self.disk.write_behind.ready

    def pump(self, *, decoding: bool) -> None:
        """Let the disk tier go on. Must be called in each `Scheduler.step`."""
        if self.disk is not None:
            if self.waits.short or self.waits.others_wait:
                self.disk.write_behind.hurry()
            self.disk.pump(decoding=decoding)

    def close(self, seconds: float) -> int:
        """Write what is not on disk yet; return at most how many tokens were not written."""
        left = self.disk.close(seconds) if self.disk is not None else 0
        self.clear()
        self.ram.shared.leave(self.ram)
        return left
