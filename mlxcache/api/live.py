"""What goes on, as server-sent events: one look at the engine for all who watch."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlxcache import __version__
from mlxcache.api.cache import tree_object
from mlxcache.api.http import ApiSettings, Deps
from mlxcache.api.sse import comment, event
from mlxcache.api.status import model_object, progress, record_object
from mlxcache.errors import BadRequest, MlxcacheError, TooMany
from mlxcache.owner import OWNER

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine

log = logging.getLogger(__name__)

PARTS = ("server", "cache", "requests", "sessions", "tree")
"""What can be watched, in the order in which it is told."""

BUSY_S, IDLE_S, FIGURES_S = 0.25, 0.5, 1.0
SESSIONS_S, SHARE, MOST_S = 1.5, 5.0, 10.0
"""Seconds between two looks: at requests while some run, while none does, and at figures; at
sessions at least, or so many times as long as the last look took, at most `MOST_S`."""

FIRST_S = 1.0
"""How long the first reader waits for figures, so that what is first told is whole."""

RECENT = 100
"""Requests that are told of, beside those that run."""

SHOWN = 100
"""Sessions that are told of: those used last."""


class Feed:
    """What one owner sees. Use from the event loop.

    Nothing is queued for anybody: a reader that comes late is told what is, and not what was. It
    looks at the sessions only where something may have changed, so the MLX thread is asked
    seldom, and never once per reader. Figures wait for the disk, so they are read in a thread.
    """

    def __init__(self, engine: Engine, owner: str | None):
        self._engine, self._owner = engine, owner
        self._version = 0
        self._parts: dict[str, tuple[int, Any]] = {}
        self._rows: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._wanted: Counter[str] = Counter()
        self._readers = 0
        self._news = asyncio.Event()
        self._over: str | None = None
        self._looking: asyncio.Task[None] | None = None
        self._figures: asyncio.Task[None] | None = None
        self._sessions: asyncio.Task[None] | None = None
        self._seen: Any = None
        self._due = self._figures_due = 0.0

    async def watch(self, parts: Sequence[str]) -> AsyncGenerator[tuple[str, Any], None]:
        """Each of `parts` as it is now, and from then on when it changes.

        Yields (part, body), of `requests` those that changed; at last ("end", {"reason"}).
        """
        self._wanted.update(parts)
        self._readers += 1
        seen = -1
        try:
            if self._readers == 1:
                self._begin()
                if self._figures is not None:
                    await asyncio.wait([self._figures], timeout=FIRST_S)
            while True:
                news, told = self._news, self._version
                for each in self._since(seen, parts):
                    yield each
                seen = told
                if self._over is not None:
                    yield "end", {"reason": self._over}
                    return
                if seen == self._version:
                    await news.wait()
        finally:
            self._wanted.subtract(parts)
            self._readers -= 1
            if self._readers == 0:
                self._end()

    def _begin(self) -> None:
        self._over, self._seen, self._due, self._figures_due = None, None, 0.0, 0.0
        token = OWNER.set(self._owner)
        try:
            self._look()
            self._looking = asyncio.create_task(self._look_on())
        finally:
            OWNER.reset(token)
        self._looking.add_done_callback(self._ended)

    def _end(self) -> None:
        for task in (self._looking, self._figures, self._sessions):
            if task is not None:
                task.cancel()
        self._looking = self._figures = self._sessions = None
        self._parts.clear()
        self._rows.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for news that will not come."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the live feed failed", exc_info=error)
            self._over = "failed"
            self._tell()

    def _since(self, seen: int, parts: Sequence[str]) -> list[tuple[str, Any]]:
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

    def _tell(self) -> None:
        self._version += 1
        self._news.set()
        self._news = asyncio.Event()

    def _put(self, part: str, body: Any) -> None:
        if part not in self._parts or self._parts[part][1] != body:
            self._parts[part] = (self._version + 1, body)
            self._tell()

    # -- looking -----------------------------------------------------------------------------

    async def _look_on(self) -> None:
        await asyncio.sleep(BUSY_S)
        while True:
            runs = self._look()
            if self._over is not None:
                return
            await asyncio.sleep(BUSY_S if runs else IDLE_S)

    def _look(self) -> bool:
        """Look at all that is at hand; whether a request runs."""
        engine, now = self._engine, asyncio.get_running_loop().time()
        info = engine.info
        self._put(
            "server",
            {
                "state": engine.state,
                "version": __version__,
                "model": model_object(info) if info is not None else None,
                "stalled_s": round(engine.silent_s),
            },
        )
        if now >= self._figures_due and (self._figures is None or self._figures.done()):
            self._figures_due = now + FIGURES_S
            self._figures = asyncio.create_task(self._see_figures())
            self._figures.add_done_callback(self._ended)
            if engine.state == "ready" and (self._wanted["sessions"] or self._wanted["tree"]):
                self._look_at_sessions(now)
        runs = self._look_at_requests()
        if engine.state in ("stopped", "failed"):
            self._over = engine.state
            self._tell()
        return runs

    async def _see_figures(self) -> None:
        self._put("cache", await asyncio.to_thread(self._engine.figures))

    def _look_at_requests(self) -> bool:
        runs, rows, told = False, {}, False
        for number, record in enumerate(self._engine.requests()):
            going = progress(record) is not None
            runs = runs or going
            if number >= RECENT and not going:
                continue
            row = record_object(record)
            before = self._rows.get(record.id)
            told = told or before is None or before[1] != row
            rows[record.id] = before if before and before[1] == row else (self._version + 1, row)
        self._rows = rows
        if told:
            self._tell()
        return runs

    def _look_at_sessions(self, now: float) -> None:
        if now >= self._due and (self._sessions is None or self._sessions.done()):
            self._sessions = asyncio.create_task(self._see_sessions())

    async def _see_sessions(self) -> None:
        """Tell of the sessions, and of their tree, if anything can have changed in them."""
        book, loop = self._engine.sessions, asyncio.get_running_loop()
        try:
            held = await asyncio.to_thread(self._held)
            seen = (await book.rows(SHOWN), held, bool(self._wanted["tree"]))
            if seen == self._seen:
                return
            began = loop.time()
            listed = await book.list(SHOWN)
            data = [one.as_object() for one in listed]
            self._put("sessions", {"object": "list", "data": data})
            if self._wanted["tree"]:
                self._put("tree", await tree_object(book, listed))
        except MlxcacheError as error:
            log.debug("the sessions cannot be told of: %s", error)
            return
        self._seen = seen
        self._due = loop.time() + min(MOST_S, max(SESSIONS_S, SHARE * (loop.time() - began)))

    def _held(self) -> Any:
        """What tells that the tiers hold something else than before."""
        figures = self._engine.figures()
        tiers = [figures.get(tier, {}).get("used_bytes") for tier in ("ram", "disk")]
        return (*tiers, figures.get("pending_bytes"), figures.get("segments"))


MOST_READERS = 32
"""Streams that each owner may have open at once."""


def routes(deps: Deps) -> list[Route]:
    """The one stream."""
    return [Route("/v1/live", partial(live, deps, Live(deps)), methods=["GET"])]


class Live:
    """The feeds of those owners of whom somebody watches."""

    def __init__(self, deps: Deps):
        self._deps = deps
        self._feeds: dict[str | None, Feed] = {}
        self._readers: Counter[str | None] = Counter()

    def enter(self) -> Callable[[], None]:
        """Count one more reader, of the owner that asks; what is returned counts it no more.

        Raises TooMany. Nobody's readers keep another owner's out.
        """
        owner = OWNER.get()
        if self._readers[owner] >= MOST_READERS:
            raise TooMany(f"{MOST_READERS} readers watch already.", retry_after=30.0)
        self._readers[owner] += 1
        return partial(self._readers.subtract, (owner,))

    async def events(self, parts: list[str]) -> AsyncGenerator[ServerSentEvent, None]:
        """What the owner that asks sees, until it leaves or the server stops."""
        owner = OWNER.get()
        if owner not in self._feeds:
            self._feeds[owner] = Feed(self._deps.engine, owner)
        async with aclosing(self._feeds[owner].watch(parts)) as watched:
            async for name, body in watched:
                yield event(body, name=name)


async def live(deps: Deps, watched: Live, request: Request) -> Response:
    """What is now, then what changes; `?parts=` names some of them, with commas between.

    Answers also while the model loads. Raises BadRequest, and TooMany where too many watch.
    """
    parts = request.query_params.get("parts", ",".join(PARTS)).split(",")
    if not set(parts) <= set(PARTS):
        raise BadRequest(f"`parts` are some of {', '.join(PARTS)}.", param="parts")
    leave = watched.enter()  # and not when the stream begins: many may come at once
    return LiveStream(watched.events(list(dict.fromkeys(parts))), deps.settings, leave)


class LiveStream(EventSourceResponse):
    """A stream of what goes on: whatever happens to its reader, the look at the engine ends."""

    def __init__(
        self, events: AsyncGenerator[Any, None], settings: ApiSettings, leave: Callable[[], None]
    ):
        self._events, self._leave = events, leave
        super().__init__(
            events,
            sep="\n",
            ping=0.9 * settings.ping_seconds,
            ping_message_factory=lambda: comment("live"),
            send_timeout=settings.send_timeout,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all; returns early if the client leaves or stalls."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.debug("a watcher reads nothing, and is left")
        finally:
            self._leave()
            await self._events.aclose()
