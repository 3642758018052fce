"""Server-sent events, and responses that stream them until their client leaves or stops reading."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio
import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

from mlxcache.api.http import ApiSettings

log = logging.getLogger(__name__)

Events = AsyncGenerator[ServerSentEvent, None]
SHUTDOWN_GRACE_S = 2.0
"""Seconds to send a stream's last events when the server stops."""

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""JSON escapes of Unicode line ends, at which some clients would break lines."""


def make_event(data: Any, *, name: str | None = None) -> ServerSentEvent:
    """Return an event with `data` as JSON on one line. `name` becomes the `event:` line."""
    text = msgspec.json.encode(data).decode()
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return ServerSentEvent(text, event=name, sep="\n")


def make_raw_event(text: str) -> ServerSentEvent:
    """Return an event whose data is `text`, not encoded as JSON, such as `[DONE]`."""
    return ServerSentEvent(text, sep="\n")


def make_comment(text: str) -> ServerSentEvent:
    """Return a comment, which clients ignore. It shows proxies that the connection is used."""
    return ServerSentEvent(comment=text, sep="\n")


class EventStream(EventSourceResponse):
    """Response that streams a reply. `close` is called however the response ends.

    `ping` makes the event that is sent at least every `ApiSettings.ping_seconds`. `id`: that of the
    request, for the log. `close` also ends `events` early when the server stops.
    """

    def __init__(
        self,
        events: Events,
        settings: ApiSettings,
        *,
        id: str,
        ping: Callable[[], ServerSentEvent],
        close: Callable[[], Awaitable[None]],
    ):
        self._id, self._close = id, close
        self.stopping = anyio.Event()
        super().__init__(
            events,
            sep="\n",
            # Earlier than promised, so that the time to send it is covered too.
            ping=0.9 * settings.ping_seconds,
            ping_message_factory=ping,
            send_timeout=settings.send_timeout,
            shutdown_event=self.stopping,
            shutdown_grace_period=SHUTDOWN_GRACE_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.ensure_future(self._close_on_shutdown())
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            seconds = self.send_timeout
            log.warning(
                "%s: reply cancelled: the client stopped reading for %g s", self._id, seconds
            )
        finally:
            watch.cancel()
            await self._close()

    async def _close_on_shutdown(self) -> None:
        await self.stopping.wait()
        await self._close()
