"""`GET /v1/trace`: stream a trace of requests as they end, as server-sent events.

A trace has no text; see `engine.trace`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.http import Deps
from mlxcache.api.live import LiveReaders, LiveStream
from mlxcache.api.sse import make_event
from mlxcache.engine.trace import Recordings
from mlxcache.owner import OWNER

WAIT_S = 0.5
"""Seconds without a new event after which it is checked whether the stream must end."""


def routes(deps: Deps) -> list[Route]:
    """Return the route `GET /v1/trace`."""
    return [Route("/v1/trace", partial(trace, deps, LiveReaders(deps)), methods=["GET"])]


async def trace(deps: Deps, readers: LiveReaders, request: Request) -> Response:
    """Stream each request of the caller's key when it ends, as a line of a trace without text.

    The stream goes on until the client closes it: do not wait for its end. The events are `trace`,
    the first line of a trace file, then `request` for each request, then `end` with a `reason`:
    `stopped` if the server stops, `failed` if its model failed, `lagging` if the reader is too
    slow. The status is 429 if too many streams are open.
    """
    leave = readers.enter()
    return LiveStream(_events(deps, OWNER.get()), deps.settings, leave)


async def _events(deps: Deps, owner: str | None) -> AsyncGenerator[ServerSentEvent, None]:
    recordings: Recordings = deps.engine.recordings
    with recordings.record(owner) as recording:
        growth = {"prefill_growth": deps.engine.prefill_growth}
        yield make_event(recording.writer.header() | growth, name="trace")
        while True:
            line = await recording.take(WAIT_S)
            if line is not None:
                yield make_event(line, name="request")
                continue
            reason: Any = "lagging" if recording.lagging else deps.engine.state
            if reason in ("lagging", "stopped", "failed"):
                yield make_event({"reason": reason}, name="end")
                return
