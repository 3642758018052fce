"""Who may start: the tasks that wait, in order, and what each needs before it computes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

from mlxcache.cache.checkpoints import stops
from mlxcache.cache.disk import Disk
from mlxcache.cache.kv_cache import Memory
from mlxcache.cache.main_conversation import Claim
from mlxcache.cache.pressure import let_go
from mlxcache.cache.restore import WORTH_LOOKING
from mlxcache.common_prefix import common_length
from mlxcache.engine.cost import Cost
from mlxcache.engine.prefill import Limits
from mlxcache.engine.task import Task
from mlxcache.errors import ContextLengthExceeded
from mlxcache.types import Admitted, Job

K = TypeVar("K")

Asker = tuple[str | None, str, str | None]
"""Who asks: the owner, then a session's label, or the program's name where there is none."""

REMEMBERED = 1024
"""Askers whose last start is remembered, the latest."""


def asker_of(job: Job) -> Asker:
    """Who is to have a fair share."""
    if job.session is None:
        return job.owner, "client", job.client
    return job.owner, "session", job.session


class Turns:
    """Rotation over askers: the one that started something longest ago comes first.

    The order depends on nothing but what came and what started. Of `places` for what is computed
    there is one more, unless there is only one, while one has several and others none.
    """

    def __init__(self, places: int):
        self.places = places
        self.most = places + 1 if places > 1 else places
        self._started: OrderedDict[Asker, int] = OrderedDict()
        self._count = 0

    def order(self, waiting: Iterable[Task]) -> list[Task]:
        """Who may start first: each asker's first, then each one's second, and so on."""
        rounds: Counter[Asker] = Counter()
        keyed = []
        for place, task in enumerate(waiting):
            asker = asker_of(task.job)
            keyed.append(((rounds[asker], self._started.get(asker, 0), place), task))
            rounds[asker] += 1
        return [task for _, task in sorted(keyed, key=lambda pair: pair[0])]

    def started(self, task: Task) -> None:
        """`task` has had its turn."""
        self._count += 1
        asker = asker_of(task.job)
        self._started[asker] = self._count
        self._started.move_to_end(asker)
        if len(self._started) > REMEMBERED:
            self._started.popitem(last=False)

    def room(self, task: Task, active: list[Task]) -> bool:
        """Whether there is a place for `task` while `active` take one each."""
        if len(active) < self.places:
            return True
        askers = {asker_of(each.job) for each in active}
        crowded = len(askers) < len(active) < self.most
        return crowded and asker_of(task.job) not in askers


WORTH_WAITING = 256
"""Tokens that a running prefill must be about to share for a new request to wait for them."""

WORTH_BESIDE = 512
"""Tokens that are worth a look at the disk while others' prompts are computed.

Looking for fewer costs a short prompt one of their chunks, or two on a busy machine.
"""


class Admission:
    """Gives tasks their lineages. `dress` gives an admitted task its parser and sampler."""

    def __init__(self, memory: Memory, limits: Limits, cost: Cost, dress: Callable[[Task], None]):
        self.memory = memory
        self.limits = limits
        self.cost = cost
        self.disk: Disk | None = None
        self.dress = dress
        self.admitted: Callable[[Task], None] = lambda task: None

    def waits(self, task: Task, prefilling: list[Task]) -> bool:
        """Whether `task` is better started later: its prefix is about to be there."""
        if task.look is not None and not task.look.found:
            return True
        known = self.memory.known(task.ids)
        for other in prefilling:
            shared = min(common_length(other.ids, task.ids), task.target)
            if self.memory.layout.opaque:
                shared = self._stop_near(other, shared)
            enough = 1 if task.deferred else WORTH_WAITING
            if shared - known >= enough and other.held.lineage.length < shared:
                task.deferred = self.memory.layout.cacheable
                return task.deferred
        worth = WORTH_BESIDE if prefilling else WORTH_LOOKING
        if self.disk is None or task.look is not None or task.target - known < worth:
            return False
        task.look = self.disk.restorer.look(task.ids, known)
        return True

    def _stop_near(self, other: Task, shared: int) -> int:
        """The last stop of a running prefill before it parts from another prompt; there, if far."""
        before = max((at for at in other.stops if at <= shared), default=0)
        if shared - max(before, other.held.lineage.length) < WORTH_WAITING or other.restoring:
            return before
        other.stops = tuple(sorted({*other.stops, shared}))
        return shared

    def lease(self, task: Task, *, alone: bool) -> bool:
        """Get a lineage for `task`; False if others hold what it needs.

        `alone`: nobody computes, so nothing will be given back by waiting, unless it is being
        written to disk. Raises ContextLengthExceeded where the prompt can never fit.
        """
        memory, planned = self.memory, task.look.target if task.look else 0
        claim = Claim.of(task.job)
        task.limit = min(task.limit or self.limits.context, self.limits.context - len(task.ids))
        memory.room.patient = alone  # others compute meanwhile: it is tried again
        try:
            lease = memory.acquire(task.ids, task.limit, planned, claim)
        finally:
            memory.room.patient = True
        if lease is None and alone and not (self.disk and self.disk.busy):
            let_go(memory.room)
            memory.room.clear()
            lease = memory.acquire(task.ids, task.limit, planned, claim)
            lease = lease or memory.acquire(task.ids, 1, planned, claim)
            if lease is None:
                raise ContextLengthExceeded(
                    f"The prompt of {len(task.ids)} tokens does not fit the memory budget (--ram)."
                )
        if lease is not None and lease.bare and task.look and lease.cached < task.look.known:
            memory.release(lease)  # some of what was in RAM has left it: look again
            task.look = lease = None
        task.lease = lease
        return lease is not None

    def admit(self, task: Task) -> None:
        """Tell the client that its prefix is there: all counts are exact from now on."""
        lease, record = task.held, task.record
        record.cached_tokens, record.restored_tokens = lease.cached, task.restored
        self.admitted(task)
        if self.memory.layout.opaque:
            task.stops = self._stops(task)
        self.dress(task)
        task.push(Admitted(len(task.ids), lease.cached, task.restored))

    def _stops(self, task: Task) -> tuple[int, ...]:
        """Where its prefill leaves checkpoints: no more than it has time for and are kept."""
        lease, length = task.held, len(task.ids)
        parted = max(lease.matched, task.look.shared if task.look else 0)
        most = min(self.memory.room.most_checkpoints(length), self.cost.stops(task.remaining))
        return stops(task.job.prompt.marks, lease.cached, length, parted=parted, most=most)

    def begin(self, task: Task, began: float) -> None:
        """Book how long a task waited and was matched; admit it unless there is more on disk."""
        record = task.record
        record.status = "prefill"
        task.phase("queue_s", began)
        task.phase("match_s")
        record.timing["restore_s"] = 0.0
        task.restoring = task.held.bare
        if not task.restoring:
            self.admit(task)

    def restore(self, task: Task) -> bool:
        """Read one piece from disk; True once all that was planned is there.

        Raises StoreError where that cannot be had.
        """
        assert self.disk is not None
        assert task.look is not None
        lease, at = task.held, task.held.lineage.length
        complete = self.disk.restorer.load(task.look, lease)
        if not self.memory.layout.opaque:
            task.restored += lease.lineage.length - at
            self.memory.commit(lease, task.ids, checkpoint=False)
        elif complete:
            task.restored = lease.lineage.length - lease.cached
            self.memory.commit(lease, task.ids, checkpoint=True)
        if not complete:
            return False
        lease.cached = lease.saved = lease.lineage.length
        lease.bare = False
        task.restoring = False
        task.phase("restore_s")
        self.admit(task)
        return True

    def give_up(self, task: Task) -> None:
        """Let go of a lineage whose restore failed; what was read is kept where it can be used."""
        lease, task.lease, task.restoring = task.held, None, False
        assert task.look is not None
        task.look.target = 0
        if self.memory.layout.opaque:
            self.memory.abandon(lease)
        else:
            self.memory.release(lease)
