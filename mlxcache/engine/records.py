"""What recent requests did, the last thousand of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from mlxcache.engine.tally import Tally
from mlxcache.owner import own_ids
from mlxcache.types import Job, RequestRecord

KEPT = 1000


class Records:
    """The latest requests' records by id, and the tally of all. Use from the event loop.

    `told` is called with each that is over.
    """

    def __init__(self, told: Callable[[RequestRecord], None]) -> None:
        self.tally = Tally()
        self._told = told
        self._kept: OrderedDict[str, RequestRecord] = OrderedDict()

    def begin(self, job: Job) -> RequestRecord:
        """A record for a request that has just come; what came first is forgotten first."""
        record = RequestRecord(
            id=job.id,
            session=job.session,
            api=job.api,
            client=job.client,
            status="queued",
            created_at=time.time(),
            prompt_tokens=len(job.prompt.ids),
            timing={"render_s": round(job.render_s, 6)},
            canonicalised=job.prompt.rules,
            owner=job.owner,
        )
        self._kept[record.id] = record
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return record

    def over(self, record: RequestRecord) -> None:
        """A request is over, and known is what it lost."""
        self.tally.add(record)
        self._told(record)

    def all(self, owner: str | None) -> list[RequestRecord]:
        """An owner's, newest first."""
        return [record for record in reversed(self._kept.values()) if record.owner == owner]

    def get(self, id: str, owner: str | None) -> RequestRecord | None:
        """One of an owner's."""
        found = self._kept.get(id)
        return found if found is not None and found.owner == owner else None


def owned(job: Job, owner: str | None) -> Job:
    """A job as one owner's: the cache knows its prompt by ids that are only the owner's."""
    prompt = job.prompt
    if owner is None:
        return job
    return replace(
        job,
        owner=owner,
        prompt=replace(prompt, ids=own_ids(prompt.ids, owner), tokens=prompt.fed),
    )
