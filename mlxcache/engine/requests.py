"""The requests that are queued or computed, as the event loop knows them, and who may come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mlxcache.engine.forecast import Forecast, Going
from mlxcache.engine.scheduler import Scheduler
from mlxcache.engine.shared import Shared
from mlxcache.engine.task import Task
from mlxcache.engine.turns import asker_of
from mlxcache.errors import MlxcacheError, QueueFull, TooMany
from mlxcache.types import Job, RequestRecord

SHARE = 2
"""One session may have one in so many of the places in the queue."""


@dataclass(frozen=True, slots=True)
class Live:
    """A request that is not over."""

    task: Task
    shared: Shared


class Arrivals:
    """All requests that are not over, by id. Use from the event loop. `places` may wait."""

    def __init__(self, places: int):
        self.forecast = Forecast()
        self._places = places
        self._live: dict[str, Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, id: str) -> Live:
        return self._live[id]

    def running(self, job: Job) -> Shared | None:
        """What is computed already and answers `job` too."""
        return next((one.shared for one in self._live.values() if one.shared.takes(job)), None)

    def check(self, job: Job, scheduler: Scheduler) -> None:
        """Raise QueueFull where nobody can wait any more, TooMany where `job`'s session cannot.

        Both say when a place will probably be free.
        """
        records = [(one.task.job, one.shared.record) for one in self._live.values()]
        waiting = Counter(asker_of(j) for j, record in records if record.status == "queued")
        total = waiting.total()
        own = waiting[asker_of(job)] if job.session is not None else 0
        if total < self._places and own < max(1, self._places // SHARE):
            return
        going = [Going(record, j.max_tokens) for j, record in records if record.status != "queued"]
        after = self.forecast.next_place(
            going, rate=scheduler.prefill.cost.rate, round_s=scheduler.pace.round_s
        )
        if total >= self._places:
            raise QueueFull(f"{total} requests are waiting already.", retry_after=after)
        turns = len(waiting)  # each of the sessions that wait starts one before the next of this
        raise TooMany(
            f"{own} requests of this session are waiting already.", retry_after=turns * after
        )

    def add(self, job: Job, record: RequestRecord, scheduler: Scheduler, stall_s: float) -> Live:
        """A request that has come in; it is still to be submitted."""
        put = scheduler.inbox.put
        shared = Shared(
            job,
            record,
            lambda: put(lambda: scheduler.cancel(task)),
            lambda error: put(lambda: scheduler.cancel(task, error)),
            stall_s,
        )
        task = Task(job, shared.push, record)
        live = self._live[job.id] = Live(task, shared)
        return live

    def pop(self, task: Task) -> Live | None:
        """It is over."""
        self.forecast.ended(task.record)
        return self._live.pop(task.job.id, None)

    def all(self) -> Iterable[Shared]:
        """Every computation."""
        return [one.shared for one in self._live.values()]

    def figures(self) -> dict[str, int]:
        """How many requests wait, how many may, and how many are computed. In any thread."""
        statuses = Counter(one.shared.record.status for one in list(self._live.values()))
        return {
            "waiting": statuses["queued"],
            "limit": self._places,
            "prefill": statuses["prefill"],
            "decode": statuses["decode"],
        }

    def fail(self, error: MlxcacheError) -> list[RequestRecord]:
        """Nothing is computed any more: end every request with `error`. Their records."""
        records: list[RequestRecord] = []
        for one in self._live.values():
            one.task.fail(error)
            one.shared.fail(error)
            records += [one.task.record, *one.shared.close()]
        self._live.clear()
        return records
