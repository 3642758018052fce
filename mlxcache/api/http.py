"""Helpers of all routes: settings, models, request headers and bodies, JSON, disconnects."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxcache import typed
from mlxcache.api.record import Recorder
from mlxcache.errors import BadRequest, ModelError, NotReady, TooLarge
from mlxcache.names import clean_label
from mlxcache.owner import OWNER
from mlxcache.types import Arrival, ModelInfo
from mlxcache.wire.decode import decode

if TYPE_CHECKING:
    from mlxcache.api.responses import ResponseExchange
    from mlxcache.engine.engine import Engine
    from mlxcache.engine.models import Models

T = TypeVar("T")

HEALTH, OPENAPI = "/health", "/openapi.json"

BODY_PAUSE_S, BODY_S = 30.0, 600.0
"""Maximum seconds to wait for the next part of a body, and for a whole body held in memory."""

MAX_BODY_BYTES = 64 << 20
_DRAIN_BYTES = 256 << 20
_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the HTTP API. Times are in seconds.

    - `owned_keys`: accepted keys, each with its own sessions; `api_key` is one without an owner.
      Requests need no key if there is none of both.
    - `origins`: origins of web pages that may use the API.
    - `max_body_bytes`: largest request body that is held in memory.
    - `default_max_tokens`: limit of a reply for requests without one.
    - `ping_seconds`: a ping is sent in a stream that would otherwise be silent for this long.
    - `stalled_seconds`: duration of a step of the MLX thread after which /health answers 503.
    - `send_timeout`: time for which a client may stop reading a stream before it is ended.
    - `queue_grace`: longest wait in the queue before a streamed response begins.
    - `any_host`: accept every host name, even without a key.
    - `id`: id of the server in its cache folder, which /health repeats.
    """

    api_key: str | None = None
    owned_keys: tuple[str, ...] = ()
    origins: frozenset[str] = frozenset()
    max_body_bytes: int = MAX_BODY_BYTES
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
    """Objects that the routes use: engine, settings, models, and error counts by HTTP status.

    `engine` is that of the default model. In a result of `of`, it is that of the request's model,
    and `loaded_s` the seconds that the request waited for the first load of this. `running`:
    requests of the Responses API that are being computed, by the id of the response.
    """

    engine: Engine
    settings: ApiSettings
    models: Models
    error_counts: Counter[int] = field(default_factory=_zero_counts)
    running: dict[str, ResponseExchange] = field(default_factory=dict)
    loaded_s: float = 0.0

    async def of(self, model: str | None, arrival: Arrival | None = None) -> Deps:
        """Return these objects with the engine of the model that a request names.

        An unknown name, or None, stands for the default model. Waits while the model is loaded for
        the first time, and raises the errors of `Models.of`. `arrival`: the request, to be listed
        while it waits; None if it is not to be listed.
        """
        began, waits = time.monotonic(), self.models.find(model).state != "ready"
        engine = await self.models.of(model, arrival)
        return replace(self, engine=engine, loaded_s=time.monotonic() - began if waits else 0.0)


def require_model(deps: Deps) -> ModelInfo:
    """Return the description of the model of `deps.engine`. Raises NotReady or ModelError."""
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
    return deps.engine.info is not None and deps.engine.info.has_images


# -- requests and responses ------------------------------------------------------------------


def make_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def get_request_id(request: Request) -> str:
    """Return the id that the middleware gave to a request, which is also its job's id."""
    return str(request.scope["state"]["request_id"])


def refuse_owners(why: str) -> None:
    """Raise HTTPException (403) if the request's key has an owner; `why` says the reason."""
    if OWNER.get() is not None:
        raise HTTPException(403, f"this server has several keys, and {why}")


def json_response(
    body: Any, status: int = 200, background: BackgroundTask | None = None
) -> Response:
    encoded = msgspec.json.encode(body)
    return Response(encoded, status, media_type="application/json", background=background)


# -- headers ---------------------------------------------------------------------------------

_SECONDS = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")
_OLD_USER_ID = re.compile(r"_session_([0-9a-fA-F-]{8,})$")


def is_retry(headers: Mapping[str, str]) -> bool:
    attempts = headers.get("x-stainless-retry-count", "")
    return attempts.isdecimal() and int(attempts) > 0


def read_time_limit(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in X-Request-Timeout, or None. Raises BadRequest unless above 0."""
    text = headers.get("x-request-timeout")
    if text is None:
        return None
    if not _SECONDS.fullmatch(text.strip()) or not float(text):
        raise BadRequest(
            "The header X-Request-Timeout must be a number of seconds above 0.",
            param="X-Request-Timeout",
        )
    return float(text)


def read_session_label(headers: Mapping[str, str], own: str | None = None) -> str | None:
    """Return the session label of a request: that of its headers, or else its `own`, if any."""
    candidates = (headers.get("x-session-id"), headers.get("x-claude-code-session-id"), own)
    return next(filter(None, (clean_label(label or "") for label in candidates)), None)


def session_of_user_id(user_id: str) -> str | None:
    """Return the session in Anthropic's `metadata.user_id`: JSON, or `..._session_<uuid>`."""
    try:
        return typed.decode(_UserId, user_id).session_id
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        match = _OLD_USER_ID.search(user_id)
        return match[1] if match else None


class _UserId(msgspec.Struct):
    session_id: str | None = None


def read_client_name(headers: Mapping[str, str]) -> str | None:
    """Return the client program from User-Agent, such as `claude-cli/2.1.329`; None if missing."""
    words = clean_label(headers.get("user-agent", "")).split()
    if not words:
        return None
    versioned = any(c.isdigit() for c in words[0])
    alone = versioned or len(words) < 2 or not words[1][0].isdigit()
    return (words[0] if alone else " ".join(words[:2]))[:80]


# -- bodies ----------------------------------------------------------------------------------


async def read_json(request: Request, type: type[T], deps: Deps) -> T:
    """Read a request's JSON body as a value of `type`, and pass it to the recorder, if any."""
    body = await read_body(request, deps.settings.max_body_bytes)
    value = decode(type, body)
    if deps.settings.recorder is not None:
        deps.settings.recorder.record(get_request_id(request), request.url.path, body)
    return value


async def read_body(
    request: Request, limit: int, *, pause: float = BODY_PAUSE_S, seconds: float = BODY_S
) -> bytes:
    """Read a whole request body.

    Raises TooLarge if it is announced or turns out to be longer than `limit` bytes, HTTPException
    (408) if no part arrives for `pause` seconds or the body is incomplete after `seconds`, and
    ClientDisconnect if the client disconnects.
    """
    too_large = TooLarge(f"The request body is larger than this server's limit of {limit} bytes.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        await _drain(request)
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in iterate_body(request, pause, seconds):
        size += len(chunk)
        if size > limit:
            chunks.clear()
            await _drain(request)
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


async def iterate_body(
    request: Request, pause: float = BODY_PAUSE_S, seconds: float = math.inf
) -> AsyncIterator[bytes]:
    """Yield a request body in parts as they arrive, with the time limits of `read_body`."""
    end = time.monotonic() + seconds
    async with aclosing(request.stream()) as parts:
        while True:
            try:
                async with asyncio.timeout(min(pause, end - time.monotonic())):
                    part = await anext(parts, None)
            except TimeoutError as error:
                raise HTTPException(
                    408, "the request's body did not arrive in time", {"Connection": "close"}
                ) from error
            if part is None:
                return
            yield part


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
    """Await `work`; cancel it and raise ClientDisconnect if the client disconnects.

    The request body must have been read.
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
