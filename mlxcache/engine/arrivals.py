"""Requests that wait for a model that is loaded for the first time. Use from one event loop.

Their prompts cannot be rendered before the model is loaded, so no scheduler has them yet.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mlxcache.engine.metrics import Records
from mlxcache.engine.requests import MAX_RETRY_S, MIN_RETRY_S, QUEUE_SHARE
from mlxcache.errors import MlxcacheError, QueueFull, TooMany
from mlxcache.types import Arrival, RequestRecord

FIRST_LOAD_S = 10.0
"""Assumed seconds of a load of which nothing is known yet."""


@dataclass(slots=True)
class _Waiting:
    began: float
    arrivals: list[Arrival | None]


class Arrivals:
    """Requests that wait until their model is loaded, by its label.

    `places`: the most requests that may wait for one model. `records` gets a record of each.
    `share(label)` returns the part of that model that is loaded, from 0 to 1, or None if unknown.
    """

    def __init__(self, records: Records, places: int, share: Callable[[str], float | None]):
        self._records, self._places, self._share = records, places, share
        self._waiting: dict[str, _Waiting] = {}

    @property
    def total(self) -> int:
        """Number of requests that wait for any model."""
        return sum(len(one.arrivals) for one in self._waiting.values())

    def waits_for(self, label: str) -> bool:
        """Return whether any request waits for the model `label`."""
        return label in self._waiting

    @contextmanager
    def waiting(self, label: str, arrival: Arrival | None) -> Iterator[None]:
        """Context manager: count a request as waiting for the model `label`, and record it.

        `arrival`: the request; None if it is not recorded, and then not refused either. Raises
        QueueFull if `places` requests wait for the model already, and TooMany if 1/`QUEUE_SHARE` of
        `places` are taken by requests of the same session. After the body, the record is removed
        for `Records.begin` to make another; an exception instead ends it as rejected or cancelled.
        """
        self._check(label, arrival)
        waiting = self._waiting.setdefault(label, _Waiting(time.monotonic(), []))
        waiting.arrivals.append(arrival)
        record = self._records.expect(arrival, label) if arrival is not None else None
        try:
            if arrival is not None:
                arrival.note_waiting(record)
            yield
        except MlxcacheError as error:
            if record is not None:
                self._records.reject(record, error)
            raise
        except BaseException:
            if record is not None:
                self._cancelled(record)
            raise
        else:
            if record is not None:  # `Engine.submit` makes a complete one
                self._records.forget(record.id)
        finally:
            if arrival is not None:
                arrival.note_waiting(None)
            waiting.arrivals.remove(arrival)
            if not waiting.arrivals:
                self._waiting.pop(label, None)

    def _cancelled(self, record: RequestRecord) -> None:
        record.status = "cancelled"
        self._records.end(record)

    def _check(self, label: str, arrival: Arrival | None) -> None:
        waiting = self._waiting.get(label)
        if waiting is None or arrival is None:
            return
        sessions = Counter(
            (one.owner, one.session) for one in waiting.arrivals if one and one.session
        )
        own = sessions[arrival.owner, arrival.session] if arrival.session else 0
        after = self._left_s(label, waiting.began)
        if len(waiting.arrivals) >= self._places:
            raise QueueFull(
                f"{len(waiting.arrivals)} requests wait already until {label} is loaded, the most "
                "that --queue allows: try again later.",
                retry_after=after,
            )
        if own >= max(1, self._places // QUEUE_SHARE):
            raise TooMany(
                f"{own} requests of this session wait already until {label} is loaded, its share "
                "of the queue: try again later.",
                retry_after=after,
            )

    def _left_s(self, label: str, began: float) -> float:
        """Estimate the seconds until the model `label` is loaded."""
        share, passed = self._share(label) or 0.0, time.monotonic() - began
        left = passed * (1 - share) / share if share > 0.05 else FIRST_LOAD_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, left))
