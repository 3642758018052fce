"""A reply as server-sent events: pings, stalled readers, clients that leave, late errors.

Built on sse-starlette's EventSourceResponse, which sends, pings and listens for a disconnect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

from mlxcache.api.http import ApiSettings, Deps
from mlxcache.errors import MlxcacheError
from mlxcache.types import Admitted, Event, Job, Progress

if TYPE_CHECKING:
    from mlxcache.engine.engine import Stream

log = logging.getLogger(__name__)

Events = AsyncGenerator[ServerSentEvent, None]
SHUTDOWN_GRACE = 2.0
"""Seconds that a stream has for its farewell when the server stops."""


_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Unicode's line ends, at which lenient clients break lines too, as JSON escapes."""


def event(data: Any, *, name: str | None = None) -> ServerSentEvent:
    """An event whose data is `data` as JSON, on one line; `name` is its `event:` line."""
    text = msgspec.json.encode(data).decode()
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return ServerSentEvent(text, event=name, sep="\n")


def raw_event(text: str) -> ServerSentEvent:
    """An event whose data is `text` as it is, such as `[DONE]`."""
    return ServerSentEvent(text, sep="\n")


def comment(text: str) -> ServerSentEvent:
    """A line that clients skip and that keeps proxies from giving up."""
    return ServerSentEvent(comment=text, sep="\n")


class Pulse:
    """How far a reply has come, for the comments that fill its silences."""

    def __init__(self) -> None:
        self._words = "queued"

    def see(self, event: Event) -> None:
        """Note one event of the stream."""
        match event:
            case Progress(done, total):
                self._words = f"prefill {done}/{total}"
            case Admitted():
                self._words = f"prefill {event.cached_tokens}/{event.prompt_tokens}"
            case _:
                self._words = "decode"

    def ping(self) -> ServerSentEvent:
        """A comment such as `prefill 1024/18500`; done and total are in tokens."""
        return comment(self._words)


async def close(stream: Stream) -> None:
    """Close `stream`, also while the task that asks for it is being cancelled."""
    with anyio.CancelScope(shield=True):
        await stream.aclose()


async def start(deps: Deps, job: Job) -> tuple[Stream, Admitted | None]:
    """Submit `job` and wait for its admission, at most `queue_grace` seconds.

    The second value is None if it still waits in the queue. The caller closes the stream; if
    this raises (what `Engine.submit` raises) or is cancelled, it is closed already.
    """
    stream = await deps.engine.submit(job)
    try:
        return stream, await stream.admitted(deps.settings.queue_grace)
    except BaseException:
        await close(stream)
        raise


class EventStream(EventSourceResponse):
    """A streamed reply that owns its engine stream: whatever happens, the stream is closed."""

    def __init__(
        self,
        stream: Stream,
        events: Events,
        settings: ApiSettings,
        *,
        ping: Callable[[], ServerSentEvent],
        on_error: Callable[[Exception], ServerSentEvent],
    ):
        """`ping` makes what is sent in a silence, `on_error` the last event of a failed reply."""
        self._stream = stream
        self.stopping = anyio.Event()
        super().__init__(
            _guarded(events, on_error),
            sep="\n",
            # A little early, so that the silence including the send stays within the promise.
            ping=0.9 * settings.ping_seconds,
            ping_message_factory=ping,
            send_timeout=settings.send_timeout,
            shutdown_event=self.stopping,
            shutdown_grace_period=SHUTDOWN_GRACE,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all; returns early if the client leaves or stalls."""
        watch = asyncio.ensure_future(self._close_on_shutdown())
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            id = self._stream.record.id
            log.warning("%s: cancelled, the client reads nothing", id)
        finally:
            watch.cancel()
            await close(self._stream)

    async def _close_on_shutdown(self) -> None:
        await self.stopping.wait()
        await self._stream.aclose()


async def _guarded(
    events: Events, on_error: Callable[[Exception], ServerSentEvent]
) -> AsyncIterator[ServerSentEvent]:
    async with aclosing(events):
        try:
            async for item in events:
                yield item
        except MlxcacheError as error:
            log.warning("a stream failed: %s", error)
            yield on_error(error)
        except Exception as error:
            log.exception("a stream failed")
            yield on_error(error)
