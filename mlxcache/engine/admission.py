"""Admission: which waiting task starts next, and its lease, restored from disk where that helps.

MLX thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from mlxcache.cache.checkpoints import stops
from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.main_conversation import CacheHints
from mlxcache.cache.ram import Evict
from mlxcache.cache.restore import MIN_UNKNOWN
from mlxcache.common_prefix import common_length
from mlxcache.engine.cost import Cost
from mlxcache.engine.prefill import Limits
from mlxcache.engine.task import Output, Task
from mlxcache.errors import ContextLengthExceeded
from mlxcache.lru import LRU
from mlxcache.types import Job

Asker = tuple[str | None, str, str | None]
"""Unit of fair scheduling: owner, and session label, or client program if there is no label."""

MAX_ASKERS = 1024
"""Askers whose last start is remembered, the most recent."""

MIN_SHARED = 256
"""Tokens that a running prefill must be about to share for a new request to wait for them.

For its whole prompt a request waits however short that is, as the choices of one request do."""

MIN_UNKNOWN_BESIDE = 512
"""As `MIN_UNKNOWN`, while other prompts are computed.

Looking for fewer costs a short prompt one of their chunks, or two on a busy machine.
"""


def asker_of(job: Job) -> Asker:
    """Return the asker of a job: its session, or its client program without one."""
    if job.session is None:
        return job.owner, "client", job.client
    return job.owner, "session", job.session


class FairQueue:
    """Fair order of waiting tasks: the asker that started a task longest ago comes first.

    An asker is a session, or a client program; see `Asker`. The order depends only on arrivals and
    starts. Beside `places` tasks in progress, one more may start (unless there is a single place)
    if one asker has several and the new one has none.
    """

    def __init__(self, places: int):
        self.places = places
        self.most = places + 1 if places > 1 else places
        self._started: LRU[Asker, int] = LRU(MAX_ASKERS)
        self._count = 0

    def order(self, waiting: Iterable[Task]) -> list[Task]:
        """Tasks in the order in which they may start: each asker's first, then each second."""
        rounds: Counter[Asker] = Counter()
        keyed = []
        for place, task in enumerate(waiting):
            asker = asker_of(task.job)
            keyed.append(((rounds[asker], self._started.peek(asker) or 0, place), task))
            rounds[asker] += 1
        return [task for _, task in sorted(keyed, key=lambda pair: pair[0])]

    def note_start(self, task: Task) -> None:
        """Move the asker of `task` to the end of the rotation."""
        self._count += 1
        self._started.put(asker_of(task.job), self._count)

    def has_place(self, task: Task, active: list[Task]) -> bool:
        """True if there is a place for `task` beside the `active` ones."""
        if len(active) < self.places:
            return True
        askers = {asker_of(each.job) for each in active}
        crowded = len(askers) < len(active) < self.most
        return crowded and asker_of(task.job) not in askers


class Admission:
    """Admits tasks: acquires a lease for each and plans its checkpoints.

    `prepare` makes an admitted task's parser and sampler. `on_admitted(task)` is called before the
    client gets the event of its admission.
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
        """True if `task` should start later, because its prefix is being computed or looked up.

        Starts a lookup on disk if RAM lacks much of the prompt.
        """
        if task.lookup is not None and not task.lookup.found:
            return True
        known = self._kv.reusable(task.ids)
        for other in prefilling:
            shared = min(common_length(other.ids, task.ids), task.target)
            whole = shared == task.target
            if self._kv.layout.opaque:
                shared = self._stop_near(other, shared)
            enough = 1 if task.deferred or whole else MIN_SHARED
            if shared - known >= enough and other.held.length < shared:
                return task.defer(self._kv.layout.cacheable)
        least = MIN_UNKNOWN_BESIDE if prefilling else MIN_UNKNOWN
        if task.lookup is not None or task.target - known < least:
            return False
        task.await_lookup(self._kv.look_up(task.ids, known))
        return task.lookup is not None

    def _stop_near(self, other: Task, shared: int) -> int:
        """Last stop of a running prefill before another prompt diverges; adds one if it is far."""
        before = max((at for at in other.stops if at <= shared), default=0)
        if shared - max(before, other.held.length) < MIN_SHARED or other.restoring:
            return before
        other.plan_stops([*other.stops, shared])
        return shared

    def start(self, task: Task, began: float, *, alone: bool) -> bool:
        """Acquire a lease for `task`; False if other requests hold the bytes it needs.

        `began`: time at which its admission began. `alone`: no other request is computed, so bytes
        are released only by writes to disk. Without a prefix to restore the task is admitted at
        once. Raises ContextLengthExceeded if the prompt can never fit.
        """
        kv, planned = self._kv, task.lookup.target if task.lookup else 0
        hints = CacheHints.of(task.job)
        task.limit_reply(self._limits.context - task.prompt_tokens)
        # while others compute it is tried again soon, so nothing waits for the disk
        evict: Evict = "wait" if alone else "idle"
        lease = kv.acquire(task.ids, task.limit, planned=planned, hints=hints, evict=evict)
        if lease is None and alone and not kv.writing:
            kv.end_pressure()
            kv.clear()
            lease = kv.acquire(task.ids, task.limit, planned=planned, hints=hints)
            lease = lease or kv.acquire(task.ids, 1, planned=planned, hints=hints)
            if lease is None:
                raise ContextLengthExceeded(
                    f"The prompt of {task.prompt_tokens} tokens does not fit the memory budget "
                    "(--ram)."
                )
        if lease is None:
            return False
        if lease.awaiting_state and task.lookup and lease.cached < task.lookup.known:
            kv.release(lease)  # some of what was in RAM was evicted meanwhile: look again
            task.await_lookup(None)
            return False
        task.start(lease, began)
        return True

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
        """Positions at which its prefill leaves checkpoints, within limits of time and number."""
        lease, length = task.held, len(task.ids)
        parted = max(lease.matched, task.lookup.shared if task.lookup else 0)
        most = min(self._kv.ram.max_checkpoints(length), self._cost.stops(task.remaining))
        return stops(task.job.prompt.marks, lease.cached, length, parted=parted, most=most)

    def can_restore(self, task: Task) -> bool:
        """True if the next piece of the task's prefix can be loaded."""
        return task.lookup is not None and self._kv.can_restore(task.held, task.lookup)

    def restore(self, task: Task) -> None:
        """Load one piece from disk; with the last one the task is admitted.

        Raises StoreError, OSError, RuntimeError or ValueError where a file cannot be used.
        """
        assert task.lookup is not None
        lease, before = task.held, task.held.restored
        complete = self._kv.restore(lease, task.lookup)
        task.note_restored(lease.restored - before)
        if complete:
            task.note_phase("restore_s")
            self.admit(task)

    def cancel_restore(self, task: Task) -> None:
        """End a restore that failed: release the lease of the task, which can then start again.

        The prefix loaded so far stays in RAM, unless the failed read made the buffers unusable. The
        task does not read from disk again: it computes what RAM lacks.
        """
        self._kv.cancel_restore(task.stop_restore())
