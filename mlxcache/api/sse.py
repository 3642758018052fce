"""Replies as server-sent events: pings, stalled clients, disconnects, errors after the start.

Built on EventSourceResponse of sse-starlette, which sends, pings and detects disconnects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

from mlxcache.api.http import ApiSettings, Deps
from mlxcache.errors import MlxcacheError
from mlxcache.types import Admitted, Event, Job, Progress, RequestRecord

if TYPE_CHECKING:
    from mlxcache.engine.engine import Stream

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
    """Return an SSE comment with `text`, which clients ignore.

    It shows proxies that the connection is still in use.
    """
    return ServerSentEvent(comment=text, sep="\n")


class ReplyProgress:
    """Phase of one reply, to be sent as a comment at least every `ApiSettings.ping_seconds`."""

    def __init__(self, load_share: Callable[[], float | None] = lambda: None) -> None:
        """Begin in the phase `queued`.

        `load_share` returns the progress of loading the model, from 0 to 1, or None if the model is
        not being loaded (see `Engine.load_share`).
        """
        self._text: str | None = None
        self._load_share = load_share

    def update(self, event: Event) -> None:
        """Set the phase according to an event. Call this for every event of the stream."""
        match event:
            case Progress(done, total):
                self._text = f"prefill {done}/{total}"
            case Admitted():
                self._text = f"prefill {event.cached_tokens}/{event.prompt_tokens}"
            case _:
                self._text = "decode"

    def to_comment(self) -> ServerSentEvent:
        """Return a comment: `queued`, `loading`, `prefill DONE/TOTAL` in tokens, or `decode`.

        `loading` is followed by the progress of loading the model, in percent.
        """
        share = self._load_share() if self._text is None else None
        queued = "queued" if share is None else f"loading {share:.0%}"
        return make_comment(self._text or queued)


async def close_stream(stream: Closable) -> None:
    """Close `stream`, even while the calling task is being cancelled.

    This cancels the requests of the stream that have not ended.
    """
    with anyio.CancelScope(shield=True):
        await stream.aclose()


async def start_stream(deps: Deps, job: Job) -> tuple[Stream, Admitted | None]:
    """Submit `job` and wait until it leaves the queue; return its stream and its `Admitted` event.

    The event reports the cached prefix. None is returned in its place if the job is still queued
    after `ApiSettings.queue_grace` seconds. The caller must close the stream. If this function
    raises or is cancelled, the stream is already closed. Raises the errors of `Engine.submit`.
    """
    stream = await deps.engine.submit(job)
    try:
        return stream, await stream.admitted(deps.settings.queue_grace)
    except BaseException:
        await close_stream(stream)
        raise


class Closable(Protocol):
    """Interface of an engine stream, or of several that are read as one."""

    @property
    def record(self) -> RequestRecord: ...

    async def aclose(self) -> None: ...


class EventStream(EventSourceResponse):
    """Response that streams a reply. Its engine stream is closed however the response ends."""

    def __init__(
        self,
        stream: Closable,
        events: Events,
        settings: ApiSettings,
        *,
        ping: Callable[[], ServerSentEvent],
        on_error: Callable[[Exception], ServerSentEvent],
    ):
        """Create a response that sends `events` of `stream`.

        `ping` makes the event that is sent at least every `ApiSettings.ping_seconds`, and
        `on_error` the last event of a reply that failed. `stream` is closed at the end.
        """
        self._stream = stream
        self.stopping = anyio.Event()
        super().__init__(
            _with_errors(events, on_error, stream.record.id),
            sep="\n",
            # Earlier than promised, so that the time to send it is covered too.
            ping=0.9 * settings.ping_seconds,
            ping_message_factory=ping,
            send_timeout=settings.send_timeout,
            shutdown_event=self.stopping,
            shutdown_grace_period=SHUTDOWN_GRACE_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; return early if the client disconnects or stops reading."""
        watch = asyncio.ensure_future(self._close_on_shutdown())
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            id = self._stream.record.id
            seconds = self.send_timeout
            log.warning("%s: reply cancelled: the client stopped reading for %g s", id, seconds)
        finally:
            watch.cancel()
            await close_stream(self._stream)

    async def _close_on_shutdown(self) -> None:
        await self.stopping.wait()
        await self._stream.aclose()


async def _with_errors(
    events: Events, on_error: Callable[[Exception], ServerSentEvent], id: str
) -> AsyncIterator[ServerSentEvent]:
    async with aclosing(events):
        try:
            async for item in events:
                yield item
        except MlxcacheError as error:
            log.warning("%s: stream failed: %s", id, error)
            yield on_error(error)
        except Exception as error:
            log.exception("%s: stream failed", id)
            yield on_error(error)
