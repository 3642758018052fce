"""Whose turn it is to start: sessions in rotation, each one's requests in order."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from mlxcache.engine.task import Task
from mlxcache.types import Job

Asker = tuple[str | None, str, str | None]
"""Who asks: the owner, then a session's label, or the program's name where there is none."""

REMEMBERED = 1024
"""Askers whose last start is remembered, the latest."""

K = TypeVar("K")


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
