"""One request for a reply and its response, in any API: load, submit, ping, close.

A subclass of `Exchange` is the form of one API: it turns the request into jobs, and the events of
the engine into the response.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from mlxcache.api import http
from mlxcache.api.sse import Events, EventStream
from mlxcache.errors import MlxcacheError, NotReady
from mlxcache.owner import OWNER
from mlxcache.types import Admitted, Arrival, Event, Job, Prompt
from mlxcache.wire import anthropic_types
from mlxcache.wire.openai_types import Generation

if TYPE_CHECKING:
    from mlxcache.engine.requests import Stream

log = logging.getLogger(__name__)


class Exchange(ABC):
    """One request for a reply, from its arrival to the end of its response.

    `deps` has the engine of the request's model once that is loaded. `streams`: one for each reply
    that the request asks for, from when it is submitted. `admitted` reports the cached prefix of
    the first; None while that is still queued. `session`: label of the session in the body.
    """

    def __init__(
        self,
        deps: http.Deps,
        request: Request,
        api: str,
        asked: anthropic_types.Request | Generation,
        session: str | None,
    ):
        headers = request.headers
        self.deps = deps
        self.streams: list[Stream] = []
        self.admitted: Admitted | None = None
        self.arrival = Arrival(
            http.get_request_id(request),
            api,
            http.read_session_label(headers, session),
            http.read_client_name(headers),
            OWNER.get(),
            http.read_time_limit(headers),
        )
        self._request, self._asked, self._retry = request, asked, http.is_retry(headers)

    # -- the form of an API ------------------------------------------------------------------

    @abstractmethod
    async def jobs(self) -> Sequence[Job]:
        """Check and render the request for the model of `deps`; return a job for each reply."""

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """Read `streams` to their ends, and return the body of a response that is not streamed."""

    @abstractmethod
    def events(self) -> Events:
        """Read `streams` to their ends, and yield the events of a streamed response."""

    @abstractmethod
    def ping(self) -> ServerSentEvent:
        """Return what is sent while there is nothing else to send."""

    @abstractmethod
    def failure(self, error: Exception) -> ServerSentEvent:
        """Return the last event of a stream that failed after its beginning."""

    async def wait(self, submitted: asyncio.Task[None]) -> Events:
        """Yield what is sent before `events` if the model is still being loaded."""
        yield self.ping()

    def make_job(self, prompt: Prompt, began: float, **fields: Any) -> Job:
        """Return a job with what all APIs have in common. `began`: when rendering began."""
        return Job(
            id=self.arrival.id,
            prompt=prompt,
            api=self.arrival.api,
            session=self.arrival.session,
            client=self.arrival.client,
            timeout_s=self.arrival.timeout_s,
            retry=self._retry,
            render_s=time.perf_counter() - began,
            loaded_s=self.deps.loaded_s,
            speculate=self._asked.speculate is not False,
            **fields,
        )

    # -- the course of all -------------------------------------------------------------------

    async def answer(self) -> Response:
        """Answer the request. Until a stream begins, errors have their own status.

        It begins when the first job has left the queue, or after `ApiSettings.queue_grace` seconds
        there or in wait for the first load of the model.
        """
        if not self._asked.stream:
            return http.json_response(
                await http.while_connected(self._request, self._answer_whole())
            )
        submitted = asyncio.ensure_future(self.submit())
        await http.while_connected(self._request, self._wait_until_late(submitted))
        return EventStream(
            self._send(submitted),
            self.deps.settings,
            id=self.arrival.id,
            ping=self.ping,
            close=partial(self._abandon, submitted),
        )

    async def _answer_whole(self) -> dict[str, Any]:
        await self.submit()
        try:
            return await self.whole()
        finally:
            await self.close()

    async def find_model(self) -> None:
        self.deps = await self.deps.of(self._asked.model, self.arrival)

    async def submit(self) -> None:
        """Load the model, submit the jobs, and wait until the first one leaves the queue.

        Waits in the queue at most `queue_grace` seconds. If this raises, `streams` are closed.
        """
        await self.find_model()
        jobs = await self.jobs()
        try:
            for job in jobs:
                self.streams.append(await self.deps.engine.submit(job))
            self.admitted = await self.streams[0].admitted(self.deps.settings.queue_grace)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Cancel the replies that have not ended, even if the calling task is being cancelled."""
        with anyio.CancelScope(shield=True):
            for stream in self.streams:
                await stream.aclose()

    async def _wait_until_late(self, submitted: asyncio.Task[None]) -> None:
        """Wait for `submit`; at most `queue_grace` seconds while the model is being loaded."""
        try:
            await asyncio.wait({submitted}, timeout=self.deps.settings.queue_grace)
            if submitted.done() or self.arrival.record is None:
                await submitted
        except asyncio.CancelledError:
            await self._abandon(submitted)
            raise

    async def _abandon(self, submitted: asyncio.Task[None]) -> None:
        submitted.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({submitted})
        if not submitted.cancelled():
            submitted.exception()  # nobody is left to read it
        await self.close()

    async def _send(self, submitted: asyncio.Task[None]) -> Events:
        id = self.arrival.id
        try:
            if not submitted.done():
                async with aclosing(self.wait(submitted)) as events:
                    async for item in events:
                        yield item
                await asyncio.wait({submitted})
            if submitted.cancelled():
                raise NotReady("The server is stopping.", retry_after=5.0)
            submitted.result()
            async with aclosing(self.events()) as events:
                async for item in events:
                    yield item
        except MlxcacheError as error:
            log.warning("%s: stream failed: %s", id, error)
            yield self.failure(error)
        except Exception as error:
            log.exception("%s: stream failed", id)
            yield self.failure(error)


# -- several replies -------------------------------------------------------------------------

Indexed = tuple[int, Event]


async def merge(streams: Sequence[Stream]) -> AsyncGenerator[Indexed, None]:
    """Yield the events of all `streams` as they arrive, each with the index of its stream.

    At most one event is buffered: if the caller stops reading, the streams are not read either, and
    each cancels its request after its `stall_s` seconds.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    ready: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(1)
    tasks = [asyncio.ensure_future(_forward(i, one, ready)) for i, one in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _forward(
    index: int, stream: Stream, ready: asyncio.Queue[Indexed | Exception | None]
) -> None:
    end: Exception | None = None
    try:
        async for event in stream:
            await ready.put((index, event))
    except Exception as error:  # noqa: BLE001 - the reader raises it
        end = error
    await ready.put(end)
