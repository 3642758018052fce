"""What goes on, as server-sent events: one look at the engine for all who watch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlxcache.api.feed import PARTS, Feed
from mlxcache.api.http import ApiSettings, Deps
from mlxcache.api.sse import comment, event
from mlxcache.errors import BadRequest, TooMany
from mlxcache.owner import OWNER

MOST_READERS = 32
"""Streams that each owner may have open at once."""

log = logging.getLogger(__name__)


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
