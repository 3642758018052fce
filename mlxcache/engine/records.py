"""What recent requests did, the last thousand of them."""

from __future__ import annotations

import time
from collections import OrderedDict

from mlxcache.types import Job, RequestRecord

KEPT = 1000


class Records:
    """The latest requests' records by id."""

    def __init__(self) -> None:
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
        )
        self._kept[record.id] = record
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return record

    def all(self) -> list[RequestRecord]:
        """Newest first."""
        return list(reversed(self._kept.values()))

    def get(self, id: str) -> RequestRecord | None:
        """One of them."""
        return self._kept.get(id)
