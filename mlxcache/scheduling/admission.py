"""Admission: choice of the waiting task that starts next, and of its lease.

If more of the task's prefix is on disk than in RAM, the rest is restored from disk. MLX thread
only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from mlxcache.cache.checkpoints import stops
from mlxcache.cache.kv_cache import KVCache, Lease
from mlxcache.cache.main_conversation import CacheHints
from mlxcache.cache.ram import Evict
from mlxcache.errors import ContextLengthExceeded
from mlxcache.lru import LRU
from mlxcache.scheduling.cost import Cost
from mlxcache.scheduling.prefill import Limits
from mlxcache.scheduling.task import Output, Task
from mlxcache.types import Job

Asker = tuple[str | None, str, str | None]
"""Unit of fair scheduling: (owner, "session", label), or (owner, "client", program) without one."""

MAX_ASKERS = 1024
"""Sessions or client programs whose last start is remembered, the most recent ones."""

MIN_SHARED = 256  # tokens to share with a running prefill for a new request to wait for it

MIN_UNKNOWN_BESIDE = 512
"""Like `MIN_UNKNOWN`, but while other prompts are being computed.

A lookup for fewer tokens would cost a short prompt the time of one chunk of another prompt, or of
two on a busy machine.
"""


def asker_of(job: Job) -> Asker:
    if job.session is None:
        return job.owner, "client", job.client
    return job.owner, "session", job.session


class FairQueue:
    """Fair order of waiting tasks: the session that started a task longest ago comes first.

    At most `places` tasks are in progress at once, with one exception: if some session has two or
    more of them, one task of a session that has none may start too. There is no exception if
    `places` is 1. Of the turns of one owner, its requests of the highest priority take the first.
    """

    def __init__(self, places: int):
        self.places = places
        self.most = places + 1 if places > 1 else places
        self._started: LRU[Asker, int] = LRU(MAX_ASKERS)
        self._count = 0

    def order(self, waiting: Iterable[Task]) -> list[Task]:
        rounds: Counter[Asker] = Counter()
        keyed = []
        for place, task in enumerate(waiting):
            asker = asker_of(task.job)
            keyed.append(((rounds[asker], self._started.peek(asker) or 0, place), task))
            rounds[asker] += 1
        fair = [task for _, task in sorted(keyed, key=lambda pair: pair[0])]
        own: defaultdict[str | None, list[Task]] = defaultdict(list)
        for task in sorted(fair, key=lambda one: -one.job.priority):
            own[task.job.owner].append(task)
        turns = {owner: iter(tasks) for owner, tasks in own.items()}
        return [next(turns[task.job.owner]) for task in fair]

    def note_start(self, task: Task) -> None:
        self._count += 1
        self._started.put(asker_of(task.job), self._count)

    def has_place(self, task: Task, active: list[Task]) -> bool:
        if len(active) < self.places:
            return True
        askers = {asker_of(each.job) for each in active}
        crowded = len(askers) < len(active) < self.most
        return crowded and asker_of(task.job) not in askers


class Admission:
    """Admits tasks: acquires a lease for each task and plans its checkpoints.

    `prepare(task)` returns the parser and sampler for the reply of an admitted task.
    `on_admitted(task)` is called just before the client is told of the admission.
    """

    def __init__(
        self,
        kv: KVCache,
        limits: Limits,
        cost: Cost,
        prepare: Callable[[Task], Output],
        on_admitted: Callable[[Task], None],
    ):
        self._kv = kv
        self._limits = limits
        self._cost = cost
        self._prepare = prepare
        self._on_admitted = on_admitted

    def should_wait(self, task: Task, prefilling: list[Task]) -> bool:
        """Return whether `task` should start later, so that it can reuse more of its prefix.

        That is while another request computes the prefix, or while it is looked up on disk. Starts
        that lookup if much of the prompt is not in RAM.
        """
        if task.lookup is not None and not task.lookup.found:
            return True
        known = self._kv.reusable(task.ids)
        for other in prefilling:
            shared = other.shared_with(task)
            whole = shared == task.reusable
            if self._kv.layout.opaque:
                shared = self._stop_near(other, shared)
            enough = 1 if task.deferred or whole else MIN_SHARED
            if shared - known >= enough and other.held.length < shared:
                return task.defer(self._kv.layout.cacheable)
        least = MIN_UNKNOWN_BESIDE if prefilling else self._kv.min_unknown
        if task.lookup is not None or task.reusable - known < least:
            return False
        task.await_lookup(self._kv.look_up(task.ids, known))
        return task.lookup is not None

    def _stop_near(self, other: Task, shared: int) -> int:
        """Return the last position, up to `shared`, where the prefill `other` takes a checkpoint.

        If that is far before `shared`, a checkpoint there is added to its plan.
        """
        before = max((at for at in other.stops if at <= shared), default=0)
        if shared - max(before, other.held.length) < MIN_SHARED or other.restoring:
            return before
        other.plan_stops([*other.stops, shared])
        return shared

    def start(self, task: Task, began: float, *, alone: bool) -> bool:
        """Acquire a lease for `task`; return False if `task` must wait.

        It waits while other requests hold the memory that it needs, and also if KV of its prefix
        was evicted from RAM since the lookup on disk, which then has to be repeated. `alone`: no
        other request for this model is being computed, so memory can become free only by writing KV
        to disk, or when other models give it up. In the latter case `MemoryWaits.short` is true
        afterwards. Raises ContextLengthExceeded if the prompt can never fit.
        """
        kv, planned = self._kv, task.lookup.target if task.lookup else 0
        hints = CacheHints.of(task.job)
        task.limit_reply(self._limits.context - task.prompt_tokens)
        # while others compute it is tried again soon, so nothing waits for the disk
        evict: Evict = "wait" if alone else "unload"
        lease = kv.acquire(task.ids, task.limit, planned=planned, hints=hints, evict=evict)
        if lease is None and alone and not kv.writing:
            kv.end_pressure()
            # first without evicting everything, which would evict the task's own prefix too
            lease = kv.acquire(task.ids, task.limit, planned=planned, hints=hints)
            lease = lease or self._acquire_last(task, planned, hints)
        if lease is None:
            return False
        try:
            if lease.awaiting_state and task.lookup and lease.cached < task.lookup.known:
                kv.release(lease)  # some of what was in RAM was evicted meanwhile: look again
                task.await_lookup(None)
                return False
            task.start(lease, began)
        except BaseException:
            kv.release(lease)
            raise
        return True

    def _acquire_last(self, task: Task, planned: int, hints: CacheHints) -> Lease | None:
        """Acquire a lease for `task` after evicting all KV of this model that no request uses.

        Not if the prompt needs memory of other models, which they may give up later.
        """
        kv, lease = self._kv, None
        if kv.waits.in_reach(len(task.ids)):
            kv.clear()
            lease = kv.acquire(task.ids, task.limit, planned=planned, hints=hints)
            lease = lease or kv.acquire(task.ids, 1, planned=planned, hints=hints)
        tokens = len(task.ids)
        if lease is None and not (kv.waits.fits_alone(tokens) and kv.waits.begin(tokens)):
            raise ContextLengthExceeded(
                f"The prompt of {task.prompt_tokens} tokens does not fit the memory budget: "
                "shorten it, or start the server with a larger --ram.",
                param=task.job.prompt.param,
            )
        return lease

    def admit(self, task: Task) -> None:
        """Complete the admission of a started task: plan its checkpoints and notify its client."""
        matched = task.held.cached
        task.note_reuse()
        self._on_admitted(task)
        if self._kv.layout.opaque:
            task.plan_stops(self._stops(task))
            matched = self._kv.match(task.ids)
        task.admit(self._prepare(task), matched)

    def _stops(self, task: Task) -> tuple[int, ...]:
        lease, length = task.held, len(task.ids)
        parted = max(lease.matched, task.lookup.shared if task.lookup else 0)
        most = min(self._kv.ram.max_checkpoints(length), self._cost.stops(task.remaining))
        return stops(task.job.prompt.marks, lease.cached, length, parted=parted, most=most)

    def can_restore(self, task: Task) -> bool:
        return task.lookup is not None and self._kv.can_restore(task.held, task.lookup)

    def restore(self, task: Task) -> None:
        """Load one part of the task's prefix from disk; admit the task after the last part."""
        assert task.lookup is not None
        lease, before = task.held, task.held.restored
        complete = self._kv.restore(lease, task.lookup)
        task.note_restored(lease.restored - before)
        if complete:
            task.note_phase("restore_s")
            self.admit(task)

    def cancel_restore(self, task: Task) -> None:
        """Release the lease of a task whose restore failed: it computes what is not in RAM."""
        self._kv.abandon(task.stop_restore())
