"""The simulated cache of one server: how many tokens each request of a trace reuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mlxcache.cache.capacity import pending_bytes, pool_bytes, transient_bytes
from mlxcache.cache.checkpoints import stops
from mlxcache.cache.kv_cache import KVCache, Lease
from mlxcache.cache.main_conversation import CacheHints
from mlxcache.cache.restore import MIN_UNKNOWN
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Lineage
from mlxcache.plan.disk import UNLIMITED, CountedDisk
from mlxcache.plan.trace import Request
from mlxcache.tree.budget import Budget
from mlxcache.tree.eviction import EvictionOrder, Worth
from mlxcache.types import Tokens

GENERATION_TOKENS = 4
"""Tokens assumed for the generation prompt, before which a prefill takes a checkpoint."""


class CountedLineage(Lineage):
    """A lineage without arrays, which has the length and the bytes that a real one would have."""

    __slots__ = ("_begin", "_window")

    def __init__(self, layout: Layout, copy_bytes: int = 0):
        bare = replace(layout, make=list, linear=(), specs=(), opaque_at=(), checkpointed=())
        super().__init__(replace(bare, stateful=False), copy_bytes)
        self.caches = [None]  # a lineage without caches has been released
        self._begin = 0
        self._window = layout.checkpoint_bytes // max(1, layout.window_bytes)

    @property
    def state_bytes(self) -> int:
        return self.layout.checkpoint_bytes

    # the rows of its windows are those from `_begin` on, or only the last ones

    def lacking_rows(self, end: int) -> int:
        begin = self._begin if self.rows else self._last_window
        return max(0, end - begin - self.rows)

    @property
    def _last_window(self) -> int:
        return max(0, self.length - self._window)

    def keep_rows(self, end: int) -> None:
        if not self.rows:
            self._begin = self._last_window
        self.rows += self.lacking_rows(end)

    def rest(self) -> None:
        self.rows = 0

    slide = rest

    def covers(self, position: int) -> bool:
        return self.rows > 0 and (not self._begin or self._begin + self._window <= position)

    def state_at(self, position: int) -> State:
        return ()


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one simulated server, in bytes.

    `ram`: the budget of `--ram` without weights. `disk`: the limit of `--disk`, 0 for none.
    `reserved`: what a running server has set aside of `ram`, by kind; None for an estimate.
    `remote`: there is also a shared remote, without a limit.
    """

    ram: int
    disk: int = 0
    reserved: Mapping[str, int] | None = None
    remote: bool = False

    def set_aside(self, layout: Layout) -> Mapping[str, int]:
        """Return the bytes of `ram` that conversations cannot have, by kind.

        "pool" is what MLX keeps for new arrays, "transient" temporary arrays of a pass, and
        "pending" copies that wait to be written to disk.
        """
        if self.reserved is not None:
            return self.reserved
        if self.ram >= UNLIMITED:
            return {}
        return {
            "pool": pool_bytes(self.ram),
            "transient": transient_bytes(self.ram),
            "pending": pending_bytes(self.ram, layout) if self.disk else 0,
        }


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of one prompt: reused ones, and those of them read from disk and the remote."""

    prompt: int
    cached: int
    disk: int = 0
    remote: int = 0

    @property
    def restored(self) -> int:
        return self.disk + self.remote

    @property
    def fed(self) -> int:
        return self.prompt - self.cached


@dataclass(slots=True)
class Running:
    """A request between its start and its end. `ids`: tokens of prompt and reply, shape (n,)."""

    request: Request
    ids: Tokens
    lease: Lease
    reuse: Reuse


class PlannedCache:
    """The simulated cache of one server: a `KVCache` without arrays, and a disk without files.

    `now()` returns the simulated time in seconds. `growth`: a token after k cached ones takes 1 +
    `growth` * k times as long as the first; eviction weighs that. `disk` and `remote` stay empty if
    `memory` has none.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        now: Callable[[], float],
        growth: float = 0.0,
        order: type[EvictionOrder] = EvictionOrder,
    ):
        budget = Budget(memory.ram)
        reserved = memory.set_aside(layout)
        for kind, size in reserved.items():
            budget.reserve(kind, size)
        worth = Worth(layout.bytes_per_token, layout.checkpoint_bytes, growth)
        self.kv = KVCache.open(layout, budget, worth=worth, lineage=CountedLineage, order=order)
        self.disk = CountedDisk(layout, memory.disk, now)
        shared = UNLIMITED if memory.remote else 0
        self.remote = CountedDisk(layout, shared, now)
        self._layout = layout

    def close(self) -> None:
        self.disk.close()
        self.remote.close()

    def start(self, request: Request) -> Running | None:
        """Begin a request: reserve memory, restore what disk and remote have, commit the prompt.

        Returns None, with no memory reserved, if the prompt does not fit beside the requests in
        progress. If there are none, it can never fit.
        """
        ids = request.tokens()
        prompt = ids[: request.prompt_tokens]
        target, on_disk, shared = self._look_up(prompt)
        lease = self._acquire(request, prompt, target)
        if lease is None:
            return None
        in_ram = lease.cached
        if lease.awaiting_state or lease.cached < target:
            lease.lineage.append((), target - lease.length)
            self.kv.commit(lease, prompt, checkpoint=self._layout.opaque)
            lease.note_restored()
        disk = max(0, min(on_disk, lease.cached) - in_ram)
        remote = lease.cached - in_ram - disk
        running = Running(request, ids, lease, Reuse(len(prompt), lease.cached, disk, remote))
        self._prefill(running, prompt, max(lease.matched, shared))
        return running

    def _look_up(self, prompt: Tokens) -> tuple[int, int, int]:
        """Look a prompt up on disk and in the remote.

        Returns three numbers of leading tokens: those that a server would restore from disk and
        remote together, those that it would restore from disk alone, and those whose KV is on disk.
        The third is larger if a checkpoint is missing, or if too few tokens would be gained. All
        are 0 if the prompt has too few tokens that are not in RAM.
        """
        known = self.kv.reusable(prompt)
        if len(prompt) - 1 - known < MIN_UNKNOWN:
            return 0, 0, 0
        on_disk, shared = self.disk.look_up(prompt, known)
        there, _ = self.remote.look_up(prompt, max(known, on_disk))
        return max(on_disk, there), on_disk, shared

    def _acquire(self, request: Request, prompt: Tokens, target: int) -> Lease | None:
        hints = CacheHints(
            conversation_key=request.key, head=request.head, label=request.session, asked=True
        )
        reply = max(1, request.reply_tokens)
        lease = self.kv.acquire(prompt, reply, planned=target, hints=hints)
        if lease is None and not self.kv.ram.busy:
            self.kv.clear()
            lease = self.kv.acquire(prompt, reply, planned=target, hints=hints)
            lease = lease or self.kv.acquire(prompt, 1, planned=target, hints=hints)
        return lease

    def _prefill(self, running: Running, prompt: Tokens, parted: int) -> None:
        lease = running.lease
        at: tuple[int, ...] = ()
        if self._layout.opaque:
            request = running.request
            marks = sorted({request.head, request.key or 0, len(prompt) - GENERATION_TOKENS} - {0})
            most = self.kv.ram.max_checkpoints(len(prompt))
            at = stops(marks, lease.cached, len(prompt), parted=parted, most=most)
        for end in (*at, len(prompt)):
            lease.lineage.append((), end - lease.length)
            self.kv.commit(lease, prompt, checkpoint=end != len(prompt))

    def end(self, running: Running) -> None:
        """End a request: commit its reply, write its KV to disk and remote, release its memory."""
        lease = running.lease
        length = max(lease.length, len(running.ids) - 1)  # a reply's last token is never fed
        if not self.kv.extend(lease, length):
            length = min(length, lease.lineage.capacity)
        lease.lineage.append((), length - lease.length)
        self.kv.commit(lease, running.ids, checkpoint=True)
        if lease.node is not None:
            ids = running.ids[: lease.length]
            held = [node.end for node in lease.node.path() if node.checkpoint is not None]
            for tier in (self.disk, self.remote):
                tier.write(ids, running.reuse.cached, held)
        self.kv.release(lease)
