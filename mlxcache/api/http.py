"""Helpers of all routes: settings, request bodies and ids, JSON responses, disconnects."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxcache.api.record import Recorder
from mlxcache.errors import BadRequest, ModelError, NotReady, TooLarge
from mlxcache.owner import OWNER
from mlxcache.types import Arrival, ModelInfo, RequestRecord
from mlxcache.wire.decode import decode

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine
    from mlxcache.engine.models import Models
    from mlxcache.sessions.book import SessionBook
    from mlxcache.sessions.books import SessionBooks

T = TypeVar("T")

HEALTH = "/health"

BODY_PAUSE_S, BODY_S = 30.0, 600.0
"""Maximum seconds to wait for the next part of a body, and for a whole body held in memory."""

_DRAIN_BYTES = 256 << 20
_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the HTTP API. Times are in seconds.

    - `api_key`: accepted key without an owner, or None.
    - `owned_keys`: further accepted keys, each with its own sessions. Requests need no key if there
      is neither an `api_key` nor an owned one.
    - `origins`: origins of web pages that may use the API.
    - `max_body_bytes`: largest request body that is held in memory.
    - `default_max_tokens`: limit of a reply for requests without one, or None.
    - `ping_seconds`: a ping is sent in a stream that would otherwise be silent for this long.
    - `stalled_seconds`: duration of a step of the MLX thread after which /health answers 503.
    - `send_timeout`: time for which a client may stop reading a stream before the stream is ended.
    - `queue_grace`: longest wait in the queue before a streamed response begins.
    - `any_host`: accept every host name, even without a key.
    - `recorder`: writes the bodies of chat requests to files, or None.
    - `id`: id of the server in its cache folder, which /health repeats; "" without one.
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
    id: str = ""


COMMON_ERRORS = (400, 401, 403, 404, 405, 413, 429, 500, 503)


def _zero_counts() -> Counter[int]:
    # Prometheus sees no increase in a counter whose first value is 1.
    return Counter(dict.fromkeys(COMMON_ERRORS, 0))


@dataclass(frozen=True, slots=True)
class Deps:
    """Objects that the routes use: the engine, the settings, and error counts by HTTP status.

    `models`: all models, if there are several, else None. `loaded_s`: in a result of `of`, the
    seconds that the request waited for the first load of its model; otherwise 0.
    """

    engine: Engine
    settings: ApiSettings
    error_counts: Counter[int] = field(default_factory=_zero_counts)
    models: Models | None = None
    loaded_s: float = 0.0

    async def of(self, model: str | None, arrival: Arrival | None = None) -> Deps:
        """Return these objects with the engine of the model that a request names.

        `model`: the name in the request; an unknown one, or None, stands for the default model.
        Waits while the model is loaded for the first time, and raises the errors of `Models.of`.
        `arrival`: the request, to be listed by `requests` while it waits; None if it is not to be
        listed. `loaded_s` of the result is the seconds that the request waited.
        """
        if self.models is None:
            return self
        began, waits = time.monotonic(), self.models.find(model).state != "ready"
        engine = await self.models.of(model, arrival)
        return replace(self, engine=engine, loaded_s=time.monotonic() - began if waits else 0.0)

    def load_share(self, model: str | None) -> float | None:
        """Return the progress of loading a model, from 0 to 1; see `Engine.load_share`.

        `model`: the name in a request; an unknown one, or None, stands for the default model.
        Returns None if the model is not being loaded now.
        """
        return (self.engine if self.models is None else self.models.find(model)).load_share

    def figures(self) -> dict[str, Any]:
        """Return the body of `GET /v1/cache`. Waits for the disk: call in a worker thread."""
        return self.engine.figures() if self.models is None else self.models.figures()

    @property
    def sessions(self) -> SessionBook | SessionBooks:
        """Sessions of all models. Raises NotReady before the default model is loaded."""
        return self.engine.sessions if self.models is None else self.models.sessions

    def engine_of(self, record: RequestRecord) -> Engine:
        """Return the engine that served the request of `record`; the default one if unknown."""
        return self.engine if self.models is None else self.models.of_record(record)

    def requests(self) -> list[RequestRecord]:
        """Return the records of recent requests of the current API key, newest first.

        They are among the last 1,000 requests of all keys, and include waiting and running ones.
        """
        return (self.engine if self.models is None else self.models).requests()


def make_request_id() -> str:
    """Return a new request id: `req_` and 24 random hexadecimal digits."""
    return f"req_{secrets.token_hex(12)}"


def get_request_id(request: Request) -> str:
    """Return the id that the middleware gave to a request.

    It is also the job's id in the engine, and is sent as a response header.
    """
    return str(request.scope["state"]["request_id"])


def refuse_owners(why: str) -> None:
    """Raise HTTPException (403) if the request's key has an owner.

    For endpoints that act on what belongs to all owners, as `why` says.
    """
    if OWNER.get() is not None:
        raise HTTPException(403, f"this server has several keys, and {why}")


def require_model(deps: Deps) -> ModelInfo:
    """Return a description of the model of `deps.engine`.

    Raises NotReady while the model loads or the server stops, and ModelError if loading failed.
    """
    engine = deps.engine
    if engine.state == "ready" and engine.info is not None:
        return engine.info
    if engine.state == "failed":
        reason = engine.failure or "The model could not be loaded."
        raise ModelError(f"{reason} See the server's log.")
    if engine.state == "stopped":
        raise NotReady("The server is stopping.", retry_after=10.0)
    raise NotReady("The model is still loading.", retry_after=5.0)


def accepts_images(deps: Deps) -> bool:
    """Return whether the model of `deps.engine` accepts images; False until it is loaded."""
    return deps.engine.info is not None and deps.engine.info.has_images


def json_response(body: Any, status: int = 200) -> Response:
    """Return a JSON response with `body`, encoded by msgspec."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def read_number(request: Request, name: str, default: int) -> int:
    """Return the whole number `name` from the query string, or `default` if it is absent.

    Raises BadRequest for other text, and for more than 17 digits.
    """
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 18):
        raise BadRequest(f"`{name}` must be a whole number.", param=name)
    return int(text)


# -- bodies ----------------------------------------------------------------------------------


async def read_json(request: Request, type: type[T], deps: Deps) -> T:
    """Read a request's JSON body as a value of `type`, and pass it to the recorder, if any.

    Raises BadRequest if the body is not JSON or does not fit `type`, TooLarge if it is longer than
    `ApiSettings.max_body_bytes`, HTTPException (408) if it does not arrive in time (see
    `read_body`), and ClientDisconnect if the client disconnects before.
    """
    body = await read_body(request, deps.settings.max_body_bytes)
    value = decode(type, body)
    if deps.settings.recorder is not None:
        deps.settings.recorder.record(get_request_id(request), request.url.path, body)
    return value


async def read_body(
    request: Request, limit: int, *, pause: float = BODY_PAUSE_S, seconds: float = BODY_S
) -> bytes:
    """Read a whole request body of at most `limit` bytes.

    Raises TooLarge if the announced or the received length exceeds `limit`, HTTPException (408) if
    no part arrives for `pause` seconds or the body is incomplete after `seconds`, and
    ClientDisconnect if the client disconnects.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        await _drain(request)
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in iterate_body(request, pause, seconds):
        size += len(chunk)
        if size > limit:
            chunks.clear()
            await _drain(request)
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


async def iterate_body(
    request: Request, pause: float = BODY_PAUSE_S, seconds: float | None = None
) -> AsyncIterator[bytes]:
    """Yield a request body in parts as they arrive.

    Raises HTTPException (408) if no part arrives for `pause` seconds or the body is incomplete
    after `seconds`, and ClientDisconnect if the client disconnects.
    """
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
    """Read and discard the rest of a request body, up to limits of size and time.

    If a connection is closed before all data is read, it is reset, and the client may not see the
    response.
    """
    if "100-continue" in request.headers.get("expect", "").lower():
        return
    left = _DRAIN_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return


# -- disconnects -----------------------------------------------------------------------------


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result; cancel it if the client disconnects.

    The request body must have been read. Raises the errors of `work`, and ClientDisconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone})


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
