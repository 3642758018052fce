"""`GET /v1/live`: the server's state as server-sent events; `GET /v1/trace`: requests as they end.

One `Feed` per owner polls the engine while that owner has readers, and sends each of them the parts
that changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlxcache import __version__
from mlxcache.api.cache import build_tree
from mlxcache.api.http import ApiSettings, Deps
from mlxcache.api.models import describe_model
from mlxcache.api.operation import EVENTS, Operation, Text
from mlxcache.api.sse import make_comment, make_event
from mlxcache.api.status import describe_with_progress, measure_progress
from mlxcache.engine.trace import Recordings
from mlxcache.errors import BadRequest, MlxcacheError, TooMany
from mlxcache.owner import OWNER

if TYPE_CHECKING:
    from mlxcache.engine.models import Models

log = logging.getLogger(__name__)

PARTS = ("server", "cache", "requests", "sessions", "tree")
PARTS_TAKEN = Text("parts")

BUSY_S, IDLE_S = 0.25, 0.5
"""Poll intervals of requests in seconds: while one is running, and otherwise."""

FIGURES_S = 1.0

SESSIONS_S, SESSIONS_COST, MAX_SESSIONS_S = 1.5, 5.0, 10.0
"""Poll interval of sessions in seconds: from SESSIONS_S to MAX_SESSIONS_S, and in between
SESSIONS_COST times the duration of the last poll.
"""

FIRST_FIGURES_S = 1.0
"""Maximum seconds that the first reader waits for figures, so that its first state is complete."""

RECENT_REQUESTS = RECENT_SESSIONS = 100
MAX_READERS = 32
"""Maximum streams that each owner may have open at once."""

TRACE_WAIT_S = 0.5
"""Seconds without a request that ended after which it is checked whether a trace must end."""


class Feed:
    """Live state of the server, as far as one owner may see it. For the event loop only.

    Nothing is queued: a slow reader receives the current state and misses intermediate ones.
    Sessions are read only if they may have changed, because reading them uses the MLX thread. The
    cache's figures are read in another thread, because that waits for the disk.
    """

    def __init__(self, models: Models, owner: str | None):
        self._models, self._owner = models, owner
        self._engine = models.default
        self._version = 0
        self._parts: dict[str, tuple[int, Any]] = {}
        self._rows: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._wanted: Counter[str] = Counter()
        self._readers = 0
        self._changed = asyncio.Event()
        self._end_reason: str | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sessions_seen: Any = None
        self._sessions_due = self._figures_due = 0.0

    async def watch(self, parts: Sequence[str]) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield (name, body) for each of `parts` in its current state, then after each change.

        The body of `requests` holds at first the newest `RECENT_REQUESTS` and all running requests,
        then only those that changed. The last item is `("end", {"reason": ...})`: `stopped` if the
        server stops, `failed` if the default model or reading the state failed.
        """
        self._wanted.update(parts)
        self._readers += 1
        seen = -1
        try:
            if self._readers == 1:
                self._start()
                await asyncio.wait([self._tasks["figures"]], timeout=FIRST_FIGURES_S)
            while True:
                changed, version = self._changed, self._version
                for item in self._changes_since(seen, parts):
                    yield item
                seen = version
                if self._end_reason is not None:
                    yield "end", {"reason": self._end_reason}
                    return
                if seen == self._version:
                    await changed.wait()
        finally:
            self._wanted.subtract(parts)
            self._readers -= 1
            if self._readers == 0:
                self._stop()

    def _start(self) -> None:
        self._end_reason, self._sessions_seen = None, None
        self._sessions_due = self._figures_due = 0.0
        token = OWNER.set(self._owner)
        try:
            self._poll()
            self._begin("polling", self._poll_on)
        finally:
            OWNER.reset(token)

    def _stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._parts.clear()
        self._rows.clear()

    def _begin(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Begin `work`, and return True, unless the one of this name before still runs."""
        if name in self._tasks and not self._tasks[name].done():
            return False
        self._tasks[name] = asyncio.create_task(work())
        self._tasks[name].add_done_callback(self._end_on_failure)
        return True

    def _end_on_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("live updates of the dashboard failed, their streams end", exc_info=error)
            self._end_reason = "failed"
            self._notify()

    def _changes_since(self, seen: int, parts: Sequence[str]) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for part in PARTS:
            if part not in parts:
                continue
            if part == "requests":
                rows = [row for version, row in self._rows.values() if version > seen]
                if rows or seen < 0:
                    found.append((part, {"object": "list", "data": rows}))
            elif part in self._parts and self._parts[part][0] > seen:
                found.append((part, self._parts[part][1]))
        return found

    def _notify(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _set_part(self, part: str, body: Any) -> None:
        if part not in self._parts or self._parts[part][1] != body:
            self._parts[part] = (self._version + 1, body)
            self._notify()

    # -- polling -----------------------------------------------------------------------------

    async def _poll_on(self) -> None:
        await asyncio.sleep(BUSY_S)
        while True:
            runs = self._poll()
            if self._end_reason is not None:
                return
            await asyncio.sleep(BUSY_S if runs else IDLE_S)

    def _poll(self) -> bool:
        """Read `server` and `requests`, and start reading the other parts that are due.

        Returns whether any request is queued or running.
        """
        engine, now = self._engine, asyncio.get_running_loop().time()
        info = engine.info
        self._set_part(
            "server",
            {
                "state": engine.state,
                "version": __version__,
                "model": describe_model(info) if info is not None else None,
                "stalled_s": round(engine.silent_s),
            },
        )
        if now >= self._figures_due and self._begin("figures", self._read_figures):
            self._figures_due = now + FIGURES_S
            wanted = self._wanted["sessions"] or self._wanted["tree"]
            if engine.state == "ready" and wanted and now >= self._sessions_due:
                self._begin("sessions", self._read_sessions)
        runs = self._poll_requests()
        if engine.state in ("stopped", "failed"):
            self._end_reason = engine.state
            self._notify()
        return runs

    async def _read_figures(self) -> None:
        self._set_part("cache", await asyncio.to_thread(self._models.figures))

    def _poll_requests(self) -> bool:
        any_runs, rows, changed = False, {}, False
        for number, record in enumerate(self._models.requests()):
            runs = measure_progress(record) is not None
            any_runs = any_runs or runs
            if number >= RECENT_REQUESTS and not runs:
                continue
            row = describe_with_progress(self._models, record)
            before = self._rows.get(record.id)
            changed = changed or before is None or before[1] != row
            rows[record.id] = before if before and before[1] == row else (self._version + 1, row)
        self._rows = rows
        if changed:
            self._notify()
        return any_runs

    async def _read_sessions(self) -> None:
        """Read `sessions`, and `tree` if a reader asks for it, if they may have changed."""
        loop = asyncio.get_running_loop()
        try:
            book = self._models.sessions
            held = await asyncio.to_thread(self._held_bytes)
            seen = (await book.rows(RECENT_SESSIONS), held, bool(self._wanted["tree"]))
            if seen == self._sessions_seen:
                return
            began = loop.time()
            listed = await book.list(RECENT_SESSIONS)
            data = [one.as_object() for one in listed]
            self._set_part("sessions", {"object": "list", "data": data})
            if self._wanted["tree"]:
                self._set_part("tree", await build_tree(book, listed))
        except MlxcacheError as error:
            log.debug("live updates of the dashboard: sessions not read: %s", error)
            return
        self._sessions_seen = seen
        cost = SESSIONS_COST * (loop.time() - began)
        self._sessions_due = loop.time() + min(MAX_SESSIONS_S, max(SESSIONS_S, cost))

    def _held_bytes(self) -> Any:
        """Return figures that change when RAM or disk changes. Waits for the disk."""
        figures = self._models.figures()
        tiers = [figures.get(tier, {}).get("used_bytes") for tier in ("ram", "disk")]
        return (*tiers, figures.get("pending_bytes"), figures.get("segments"))


# -- the endpoint ----------------------------------------------------------------------------


class LiveReaders:
    def __init__(self, models: Models):
        self._models = models
        self._feeds: dict[str | None, Feed] = {}
        self._readers: Counter[str | None] = Counter()

    def enter(self) -> Callable[[], None]:
        """Count one more live stream of the current owner; return a function that uncounts it.

        Raises TooMany if the owner already has `MAX_READERS` streams.
        """
        owner = OWNER.get()
        if self._readers[owner] >= MAX_READERS:
            raise TooMany(
                f"{MAX_READERS} live streams are open already: close one.", retry_after=30.0
            )
        self._readers[owner] += 1
        return partial(self._readers.subtract, (owner,))

    async def stream_events(self, parts: list[str]) -> AsyncGenerator[ServerSentEvent, None]:
        owner = OWNER.get()
        if owner not in self._feeds:
            self._feeds[owner] = Feed(self._models, owner)
        async with aclosing(self._feeds[owner].watch(parts)) as watched:
            async for name, body in watched:
                yield make_event(body, name=name)


async def live(readers: LiveReaders, deps: Deps, request: Request) -> Response:
    """Stream the current state, then each change, as server-sent events.

    The stream goes on until the client closes it: do not wait for its end. `?parts=` selects parts
    of the state, separated by commas: `server`, `cache`, `requests`, `sessions`, `tree`; the
    default is all. Available even while the model loads. The status is 429 if too many streams are
    open.
    """
    parts = request.query_params.get(PARTS_TAKEN.name, ",".join(PARTS)).split(",")
    if not set(parts) <= set(PARTS):
        raise BadRequest(f"`parts` must be one or more of {', '.join(PARTS)}.", param="parts")
    # Counted here, not when the stream begins: many requests may arrive before the first begins.
    leave = readers.enter()
    events = readers.stream_events(list(dict.fromkeys(parts)))
    return LiveStream(events, deps.settings, leave)


class LiveStream(EventSourceResponse):
    """Response that streams live updates. However it ends, it calls `leave`."""

    def __init__(
        self, events: AsyncGenerator[Any, None], settings: ApiSettings, leave: Callable[[], None]
    ):
        self._events, self._leave = events, leave
        super().__init__(
            events,
            sep="\n",
            ping=0.9 * settings.ping_seconds,
            ping_message_factory=lambda: make_comment("live"),
            send_timeout=settings.send_timeout,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.debug("live updates of the dashboard ended: the client stopped reading")
        finally:
            self._leave()
            await self._events.aclose()


# -- trace -----------------------------------------------------------------------------------


async def trace(readers: LiveReaders, deps: Deps, request: Request) -> Response:
    """Stream each request of the caller's key when it ends, as a line of a trace without text.

    The stream goes on until the client closes it: do not wait for its end. The events are `trace`,
    the first line of a trace file, then `request` for each request, then `end` with a `reason`:
    `stopped` if the server stops, `failed` if its model failed, `lagging` if the reader is too
    slow. The status is 429 if too many streams are open.
    """
    leave = readers.enter()
    return LiveStream(_trace(deps, OWNER.get()), deps.settings, leave)


async def _trace(deps: Deps, owner: str | None) -> AsyncGenerator[ServerSentEvent, None]:
    recordings: Recordings = deps.engine.recordings
    with recordings.record(owner) as recording:
        growth = {"prefill_growth": deps.engine.prefill_growth}
        yield make_event(recording.writer.header() | growth, name="trace")
        while True:
            line = await recording.take(TRACE_WAIT_S)
            if line is not None:
                yield make_event(line, name="request")
                continue
            reason: Any = "lagging" if recording.lagging else deps.engine.state
            if reason in ("lagging", "stopped", "failed"):
                yield make_event({"reason": reason}, name="end")
                return


def endpoints(models: Models) -> Mapping[str, Operation]:
    """Return the endpoints of live streams, which count their readers."""
    return {
        "GET /v1/live": Operation(
            partial(live, LiveReaders(models)), query=(PARTS_TAKEN,), types=(EVENTS,)
        ),
        "GET /v1/trace": Operation(partial(trace, LiveReaders(models)), types=(EVENTS,)),
    }
