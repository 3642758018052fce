"""Choices of one request, the `n` replies that it asks for, read and closed as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from mlxcache.api.http import Deps
from mlxcache.api.sse import close_stream
from mlxcache.types import Event, Job, RequestRecord
from mlxcache.wire.reply import WholeReply, gather_reply

if TYPE_CHECKING:
    from mlxcache.engine.engine import Stream

Indexed = tuple[int, Event]
"""An event, with the index of its choice."""


class Choices:
    """Streams of the choices of one request, which are read and closed together."""

    def __init__(self, streams: Sequence[Stream]):
        self._streams = streams

    @property
    def record(self) -> RequestRecord:
        """Record of the request's first choice."""
        return self._streams[0].record

    async def read(self) -> AsyncGenerator[Indexed, None]:
        """Yield the events of all choices as they arrive, each with the index of its choice.

        Raises the error of the first stream that fails. At most one event is buffered: if the
        caller stops reading, the streams are not read either, and each cancels its request after
        the `stall_s` seconds of `Stream`.
        """
        if len(self._streams) == 1:
            async for event in self._streams[0]:
                yield 0, event
            return
        ready: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(1)
        tasks = [
            asyncio.ensure_future(_forward(i, stream, ready))
            for i, stream in enumerate(self._streams)
        ]
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

    async def gather(self) -> list[WholeReply]:
        """Read all choices to their ends and return their replies, in the order of the choices.

        Raises the first error: GenerationFailed if the model failed, NotReady if a reply was cut
        short because the server is stopping.
        """
        tasks = [asyncio.ensure_future(gather_reply(one)) for one in self._streams]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def aclose(self) -> None:
        """Cancel the choices that have not ended. Idempotent."""
        for stream in self._streams:
            await close_stream(stream)


async def _forward(
    index: int, stream: Stream, ready: asyncio.Queue[Indexed | Exception | None]
) -> None:
    """Put the events of a stream into `ready`, then None or the error that ended the stream.

    Each event is put with `index`, that of its choice.
    """
    end: Exception | None = None
    try:
        async for event in stream:
            await ready.put((index, event))
    except Exception as error:  # noqa: BLE001 - the reader raises it
        end = error
    await ready.put(end)


async def start_choices(deps: Deps, jobs: Sequence[Job]) -> Choices:
    """Submit all `jobs`, wait until `jobs[0]` leaves the queue, and return their streams.

    Waits at most `ApiSettings.queue_grace` seconds, and then returns although `jobs[0]` is still
    queued. A job leaves the queue when its memory is reserved and its cached prefix is known
    (`Admitted`). The caller must close the result. If this function raises or is cancelled, the
    streams are already closed. Raises the errors of `Engine.submit`.
    """
    streams: list[Stream] = []
    choices = Choices(streams)
    try:
        for job in jobs:
            streams.append(await deps.engine.submit(job))
        await streams[0].admitted(deps.settings.queue_grace)
    except BaseException:
        await choices.aclose()
        raise
    return choices
