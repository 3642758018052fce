"""From a raw request to a checked value, and what routes are made of.

Decoding a body, request ids, and the names by which people tell requests apart.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxcache.api.record import Recorder
from mlxcache.errors import ModelError, NotReady, TooLarge
from mlxcache.types import ModelInfo
from mlxcache.wire.decode import decode

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """How the API behaves, apart from the model. Times are in seconds.

    `api_key` None: none is asked for. `default_max_tokens` holds where a request names none.
    `ping_seconds`: the longest silence in a stream. `send_timeout`: how long a reader may stall.
    `stalled_seconds`: for how long one step of the MLX thread's may go on before /health says that
    nothing is served.
    `queue_grace`: how long a streamed request may wait in the queue before its headers go out.
    `any_host`: serve requests for any host name, also without a key. `origins`: web pages that are
    let in. `recorder`: keeps the bodies of chat requests.
    `owned_keys`: keys that are let in too, each of which has sessions of its own.
    """

    api_key: str | None = None
    owned_keys: tuple[str, ...] = ()
    origins: frozenset[str] = frozenset()
    max_body_bytes: int = 64 << 20
    default_max_tokens: int | None = None
    ping_seconds: float = 10.0
    stalled_seconds: float = 60.0
    send_timeout: float = 30.0
    queue_grace: float = 5.0
    any_host: bool = False
    recorder: Recorder | None = None


USUAL_REFUSALS = (400, 401, 403, 404, 405, 413, 429, 500, 503)


def _no_refusals() -> Counter[int]:
    """Prometheus sees no rise from nothing to one."""
    return Counter(dict.fromkeys(USUAL_REFUSALS, 0))


@dataclass(frozen=True, slots=True)
class Deps:
    """What every route is made of. `refusals` counts answers that are errors, by status."""

    engine: Engine
    settings: ApiSettings
    refusals: Counter[int] = field(default_factory=_no_refusals)


def new_request_id() -> str:
    """`req_` and 24 hexadecimal digits."""
    return f"req_{secrets.token_hex(12)}"


def request_id(request: Request) -> str:
    """The id of this request: the engine's job id and the header of the response."""
    return str(request.scope["state"]["request_id"])


async def read(request: Request, type: type[T], deps: Deps) -> T:
    """`read_body` and `decode` in one, within the settings' limit; recorded if that is on."""
    body = await read_body(request, deps.settings.max_body_bytes)
    value = decode(type, body)
    if deps.settings.recorder is not None:
        deps.settings.recorder.keep(request_id(request), request.url.path, body)
    return value


def json_response(body: Any, status: int = 200) -> Response:
    """`body` as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def serving(deps: Deps) -> ModelInfo:
    """The model that is served. Raises NotReady before and after, ModelError if it failed."""
    engine = deps.engine
    if engine.state == "ready" and engine.info is not None:
        return engine.info
    if engine.state == "failed":
        why = engine.failure or "The model could not be loaded."
        raise ModelError(f"{why} The server's log says more.")
    if engine.state == "stopped":
        raise NotReady("The server is stopping.", retry_after=10.0)
    raise NotReady("The model is still loading.", retry_after=5.0)


def takes_images(deps: Deps) -> bool:
    """Whether the model that is served takes images; False while there is none."""
    return deps.engine.info is not None and deps.engine.info.has_images


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    The body must have been read. Raises what `work` raises, or starlette's ClientDisconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


BODY_PAUSE, BODY_SECONDS = 30.0, 600.0
"""How long the next byte of a body may take, and all of one that is held in memory."""

_DRAIN_BYTES = 256 << 20
_DRAIN_SECONDS = 10.0


async def read_body(
    request: Request, limit: int, *, pause: float = BODY_PAUSE, seconds: float = BODY_SECONDS
) -> bytes:
    """The whole body, at most `limit` bytes.

    Raises TooLarge by the announced length or as soon as more arrives, HTTPException as `arriving`
    does, and starlette's ClientDisconnect if the client goes away first.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        await _drain(request)
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in arriving(request, pause, seconds):
        size += len(chunk)
        if size > limit:
            chunks.clear()
            await _drain(request)
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


async def arriving(
    request: Request, pause: float = BODY_PAUSE, seconds: float | None = None
) -> AsyncIterator[bytes]:
    """A body's parts. Raises HTTPException (408) where none comes for `pause` seconds, or where
    not all have come after `seconds`; and ClientDisconnect."""
    end = None if seconds is None else time.monotonic() + seconds
    async with aclosing(request.stream()) as parts:
        while True:
            left = pause if end is None else min(pause, end - time.monotonic())
            try:
                async with asyncio.timeout(left):
                    part = await anext(parts, None)
            except TimeoutError as error:
                raise HTTPException(
                    408, "the request's body did not arrive in time", {"Connection": "close"}
                ) from error
            if part is None:
                return
            yield part


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The request body is larger than this server's limit of {limit} bytes.")


async def _drain(request: Request) -> None:
    """Read on for a while and forget it.

    A connection closed on unread data is reset, and the client would see that, not the answer.
    """
    if "100-continue" in request.headers.get("expect", "").lower():
        return
    left = _DRAIN_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
