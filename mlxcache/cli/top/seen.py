"""What a server has told so far of what goes on, and how fast prompts are computed meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxcache.cli.remote import Remote
from mlxcache.errors import MlxcacheError

PARTS = ("server", "cache", "requests", "sessions")

MOST_RECENT = 100
"""Requests that are kept beside those that run."""

News = tuple[str, Any] | MlxcacheError
"""A part with its body, or why there is no more."""


@dataclass(slots=True)
class _Prefill:
    """Where the prefill of a request was when it was first seen, and is now: tokens, seconds."""

    first: tuple[int, float]
    last: tuple[int, float]


@dataclass(slots=True)
class Seen:
    """The latest of each part; None before it came. Use from one thread."""

    server: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None
    sessions: list[dict[str, Any]] | None = None
    requests: dict[str, dict[str, Any]] | None = None
    _prefills: dict[str, _Prefill] = field(default_factory=dict)

    def take(self, part: str, body: Any, now: float) -> None:
        """Take what was told at `now`, in seconds of any clock."""
        if part == "sessions":
            self.sessions = body["data"]
        elif part == "requests":
            self._take_requests(body["data"], now)
        elif part in ("server", "cache"):
            setattr(self, part, body)

    def _take_requests(self, rows: list[dict[str, Any]], now: float) -> None:
        known = self.requests = self.requests or {}
        known.update({row["id"]: row for row in rows})
        for row in rows:
            progress = row["progress"] or {}
            if progress.get("phase") != "prefill":
                self._prefills.pop(row["id"], None)
                continue
            at = (progress["done_tokens"], now)
            self._prefills.setdefault(row["id"], _Prefill(at, at)).last = at
        for row in self.recent()[MOST_RECENT:]:
            del known[row["id"]]

    @property
    def whole(self) -> bool:
        """Whether all has been told that can be: of a server without a model, only its state."""
        if self.server is None:
            return False
        told = self.cache is not None and self.requests is not None
        return told and (self.sessions is not None or self.server["state"] != "ready")

    def running(self) -> list[dict[str, Any]]:
        """The requests that are not over, the oldest first."""
        return sorted((r for r in self._rows() if r["progress"]), key=lambda r: r["created_at"])

    def recent(self) -> list[dict[str, Any]]:
        """The requests that are over, the newest first."""
        over = (row for row in self._rows() if not row["progress"])
        return sorted(over, key=lambda row: row["created_at"], reverse=True)

    def _rows(self) -> list[dict[str, Any]]:
        return list((self.requests or {}).values())

    def speed(self, row: Mapping[str, Any]) -> float | None:
        """Tokens per second of a request that runs: of its reply, or of its prompt as seen here."""
        told: float | None = row["progress"]["tokens_per_s"]
        seen = self._prefills.get(row["id"])
        if told is not None or seen is None:
            return told
        tokens, seconds = (b - a for a, b in zip(seen.first, seen.last, strict=True))
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def as_object(self) -> dict[str, Any]:
        """For programs: each part as the server tells it, null where it has not."""
        return {
            "server": self.server,
            "cache": self.cache,
            "requests": [*self.running(), *self.recent()],
            "sessions": self.sessions,
        }


def watch(remote: Remote) -> queue.SimpleQueue[News]:
    """What a server tells from now on, read in a thread of its own; an error comes last."""
    news: queue.SimpleQueue[News] = queue.SimpleQueue()

    def read() -> None:
        try:
            for part, body in remote.live(PARTS):
                news.put((part, body))
            news.put(MlxcacheError(f"The server at {remote.url} has ended."))
        except MlxcacheError as error:
            news.put(error)

    threading.Thread(target=read, name="mlxcache-top", daemon=True).start()
    return news
