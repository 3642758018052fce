"""From a raw request to a checked value, and what routes are made of.

Decoding a body, request ids, and the names by which people tell requests apart.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxcache import typed
from mlxcache.api.receive import read_body
from mlxcache.api.record import Recorder
from mlxcache.errors import ModelError, NotReady
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


_OLD_USER_ID = re.compile(r"_session_([0-9a-fA-F-]{8,})$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def session_label(
    headers: Mapping[str, str],
    *,
    metadata_user_id: str | None = None,
    prompt_cache_key: str | None = None,
) -> str | None:
    """The session that a request says it belongs to; None: it says nothing.

    The first of: X-Session-Id, X-Claude-Code-Session-Id, the `session_id` inside Anthropic's
    `metadata.user_id` (JSON, or the older `..._session_<uuid>`), OpenAI's `prompt_cache_key`.
    At most 200 characters, none of them a control character.
    """
    candidates = (
        headers.get("x-session-id"),
        headers.get("x-claude-code-session-id"),
        _metadata_session(metadata_user_id),
        prompt_cache_key,
    )
    labels = (_CONTROL.sub("", label or "").strip()[:200] for label in candidates)
    return next((label for label in labels if label), None)


def _metadata_session(user_id: str | None) -> str | None:
    if not user_id:
        return None
    try:
        return typed.decode(_UserId, user_id).session_id
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        match = _OLD_USER_ID.search(user_id)
        return match[1] if match else None


class _UserId(msgspec.Struct):
    session_id: str | None = None


def client_name(headers: Mapping[str, str]) -> str | None:
    """The program at the other end by its User-Agent, such as `claude-cli/2.1.329`."""
    words = _CONTROL.sub("", headers.get("user-agent", "")).split()
    if not words:
        return None
    versioned = any(c.isdigit() for c in words[0])
    name = words[0] if versioned or len(words) < 2 or not words[1][0].isdigit() else words[:2]
    return (name if isinstance(name, str) else " ".join(name))[:80]
