"""Latest state of a server, collected from its live updates, and the speed of its prefills."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxcache.cli.remote import Remote
from mlxcache.errors import MlxcacheError

PARTS = ("server", "cache", "requests", "sessions")

MAX_RECENT = 100
"""Maximum finished requests to keep."""

Update = tuple[str, Any] | MlxcacheError
"""A part of the state with its body, or the error that ended the updates."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """First and latest progress of a prefill, each as tokens done and the time of receipt.

    The time is in seconds of a monotonic clock.
    """

    first: tuple[int, float]
    last: tuple[int, float]


@dataclass(slots=True)
class LiveState:
    """Latest state of a server, in the parts of `GET /v1/live`.

    An attribute holds what was last received of its part, None before that. `requests` maps the id
    of each request received to its latest object; of the finished ones, `MAX_RECENT` are kept. Not
    thread-safe.
    """

    server: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None
    sessions: list[dict[str, Any]] | None = None
    requests: dict[str, dict[str, Any]] | None = None
    _prefills: dict[str, _Prefill] = field(default_factory=dict)

    def apply(self, part: str, body: Any, now: float) -> None:
        """Store the new `body` of the part `part` of `GET /v1/live`.

        Requests are added to those already received, or replace them by id; any other part is
        replaced. `now` is the time of receipt, in seconds of any monotonic clock.
        """
        if part == "sessions":
            self.sessions = body["data"]
        elif part == "requests":
            self._apply_requests(body["data"], now)
        elif part in ("server", "cache"):
            setattr(self, part, body)

    def _apply_requests(self, rows: list[dict[str, Any]], now: float) -> None:
        known = self.requests = self.requests or {}
        known.update({row["id"]: row for row in rows})
        for row in rows:
            progress = row["progress"] or {}
            if progress.get("phase") != "prefill":
                self._prefills.pop(row["id"], None)
                continue
            at = (progress["done_tokens"], now)
            known_prefill = self._prefills.get(row["id"])
            first = known_prefill.first if known_prefill else at
            self._prefills[row["id"]] = _Prefill(first, at)
        for row in self.recent()[MAX_RECENT:]:
            del known[row["id"]]

    @property
    def complete(self) -> bool:
        """True once every part has been received.

        Sessions are expected only if the server's state is "ready": without a model it sends none.
        """
        if self.server is None:
            return False
        known = self.cache is not None and self.requests is not None
        return known and (self.sessions is not None or self.server["state"] != "ready")

    def running(self) -> list[dict[str, Any]]:
        """Return the running and waiting requests, oldest first."""
        return sorted((r for r in self._rows() if r["progress"]), key=lambda r: r["created_at"])

    def recent(self) -> list[dict[str, Any]]:
        """Return the finished requests, newest first."""
        over = (row for row in self._rows() if not row["progress"])
        return sorted(over, key=lambda row: row["created_at"], reverse=True)

    def _rows(self) -> list[dict[str, Any]]:
        return list((self.requests or {}).values())

    def speed(self, row: Mapping[str, Any]) -> float | None:
        """Return the tokens per second of a running request, or None if unknown.

        `row` describes the request as in `GET /v1/requests`. While decoding, this is the server's
        figure. During prefill it is measured from the updates.
        """
        reported: float | None = row["progress"]["tokens_per_s"]
        prefill = self._prefills.get(row["id"])
        if reported is not None or prefill is None:
            return reported
        tokens, seconds = (b - a for a, b in zip(prefill.first, prefill.last, strict=True))
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def as_object(self) -> dict[str, Any]:
        """Return the object for --json, with a key for each part of the state.

        `requests` is a list, in which finished requests come last. The other parts are as the
        server sent them, null if not received.
        """
        return {
            "server": self.server,
            "cache": self.cache,
            "requests": [*self.running(), *self.recent()],
            "sessions": self.sessions,
        }


def watch(remote: Remote) -> queue.SimpleQueue[Update]:
    """Start a daemon thread that puts live updates of the server `remote` into the returned queue.

    An update is the name of a part of the state and its body. When the updates end, the last item
    is a MlxcacheError that says why.
    """
    updates: queue.SimpleQueue[Update] = queue.SimpleQueue()

    def read() -> None:
        try:
            for part, body in remote.live(PARTS):
                updates.put((part, body))
            updates.put(MlxcacheError(f"The server at {remote.url} has ended."))
        except MlxcacheError as error:
            updates.put(error)

    threading.Thread(target=read, name="mlxcache-top", daemon=True).start()
    return updates
