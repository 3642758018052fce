"""Error responses: the status of each error and its body in each API.

Sources: https://platform.openai.com/docs/guides/error-codes and
https://docs.anthropic.com/en/api/errors.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxcache import errors
from mlxcache.wire.anthropic_request import NO_THREADS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """HTTP status of an error, the values of its field `type` in both APIs, and OpenAI's `code`."""

    status: int
    openai: str
    anthropic: str
    code: str | None = None


SHAPES: Mapping[type[errors.MlxcacheError], Shape] = {
    errors.MlxcacheError: Shape(500, "server_error", "api_error"),
    errors.BadRequest: Shape(400, "invalid_request_error", "invalid_request_error"),
    errors.Unsupported: Shape(400, "invalid_request_error", "invalid_request_error"),
    errors.ContextLengthExceeded: Shape(400, "invalid_request_error", "invalid_request_error"),
    errors.SnapshotRefused: Shape(400, "invalid_request_error", "invalid_request_error"),
    errors.Unauthorized: Shape(
        401, "authentication_error", "authentication_error", "invalid_api_key"
    ),
    errors.NotFound: Shape(404, "invalid_request_error", "not_found_error", "not_found"),
    errors.TooLarge: Shape(413, "invalid_request_error", "request_too_large", "request_too_large"),
    errors.Busy: Shape(503, "server_error", "overloaded_error", "busy"),
    errors.QueueFull: Shape(503, "server_error", "overloaded_error", "queue_full"),
    errors.TooMany: Shape(429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded"),
    errors.NotReady: Shape(503, "server_error", "overloaded_error", "not_ready"),
    errors.DeadlineExceeded: Shape(504, "server_error", "timeout_error", "deadline_exceeded"),
    errors.GenerationFailed: Shape(500, "server_error", "api_error", "generation_failed"),
    errors.ModelError: Shape(500, "server_error", "api_error", "model_error"),
    errors.ConfigError: Shape(500, "server_error", "api_error", "config_error"),
    errors.StoreError: Shape(500, "server_error", "api_error", "store_error"),
    errors.Corrupt: Shape(500, "server_error", "api_error", "corrupt"),
    errors.Gone: Shape(503, "server_error", "overloaded_error", "gone"),
    errors.Vanished: Shape(503, "server_error", "overloaded_error", "vanished"),
    errors.PrefixNotStored: Shape(500, "server_error", "api_error", "store_error"),
    errors.DiskFull: Shape(507, "server_error", "api_error", "disk_full"),
    errors.RemoteUnavailable: Shape(503, "server_error", "overloaded_error", "remote_unavailable"),
}
"""One entry for each class of `mlxcache.errors`; a test checks that none is missing."""

_HTTP: Mapping[int, Shape] = {
    403: Shape(403, "invalid_request_error", "permission_error", "forbidden"),
    404: SHAPES[errors.NotFound],
    405: Shape(405, "invalid_request_error", "invalid_request_error", "method_not_allowed"),
    408: Shape(408, "invalid_request_error", "invalid_request_error", "request_timeout"),
    431: Shape(431, "invalid_request_error", "invalid_request_error", "headers_too_large"),
}
_UNEXPECTED = SHAPES[errors.MlxcacheError]


def find_shape(error: Exception) -> Shape:
    """Return the shape of `error`: 500 for unexpected ones. An HTTPException keeps its status."""
    if isinstance(error, HTTPException):
        other = Shape(error.status_code, "invalid_request_error", "invalid_request_error")
        return _HTTP.get(error.status_code, other)
    for cls in type(error).__mro__:
        if cls in SHAPES:
            return SHAPES[cls]
    return _UNEXPECTED


def build_openai_error(error: Exception) -> dict[str, Any]:
    """Return `{"error": {"message", "type", "param", "code"}}`."""
    shape = find_shape(error)
    body = {
        "message": _message(error),
        "type": shape.openai,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or shape.code,
    }
    return {"error": body}


def build_anthropic_error(error: Exception, request_id: str | None = None) -> dict[str, Any]:
    """Return `{"type": "error", "error": {"type", "message"}, "request_id"}`.

    For a prompt that exceeds the context, the message has `prompt is too long`, which clients look
    for. For the unsupported field `thread`, the `error` has `details` with the code `NO_THREADS`:
    Anthropic's SDK then sends the whole conversation instead.
    """
    message = _message(error)
    if isinstance(error, errors.ContextLengthExceeded) and "prompt is too long" not in message:
        message = f"prompt is too long: {message}"
    body: dict[str, Any] = {"type": find_shape(error).anthropic, "message": message}
    code = getattr(error, "code", None)
    if code == NO_THREADS:
        body["details"] = {"error_code": code}
    return {"type": "error", "error": body, "request_id": request_id}


def _message(error: Exception) -> str:
    if isinstance(error, HTTPException):
        return f"{error.detail}."
    if isinstance(error, errors.MlxcacheError):
        return str(error) or type(error).__name__
    return "Internal error; the server's log has the details under this request's id."


def is_anthropic_client(request: Request) -> bool:
    path = request.scope["path"]  # not request.url: it needs a valid Host header
    if path.startswith("/v1/messages"):
        return True
    return "anthropic-version" in request.headers or "anthropic-beta" in request.headers


def error_response(request: Request, error: Exception) -> Response:
    id = request.scope.get("state", {}).get("request_id")
    anthropic = is_anthropic_client(request)
    body = build_anthropic_error(error, id) if anthropic else build_openai_error(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, errors.Busy | errors.Vanished):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return Response(
        msgspec.json.encode(body),
        status_code=find_shape(error).status,
        headers=headers,
        media_type="application/json",
    )


async def _handle(request: Request, error: Exception) -> Response:
    if find_shape(error).status == 500:
        id = request.scope.get("state", {}).get("request_id")
        # The messages of these name the file and the cause: no traceback is needed.
        trace = None if isinstance(error, errors.StoreError | errors.ModelError) else error
        log.error("%s: request failed: %s", id, error, exc_info=trace)
    return error_response(request, error)


_NOT_SERVED = re.compile(
    r"/v1/(?:assistants|audio|batches|complete|containers|conversations|embeddings|evals|files"
    r"|fine_tuning|images|messages/batches|moderations|organizations|realtime|rerank"
    r"|skills|threads|uploads|vector_stores|videos)(?:/|$)"
)
"""URL paths of OpenAI's and Anthropic's APIs, and of rerankers, that this server lacks.

Source: https://platform.openai.com/docs/api-reference and https://docs.anthropic.com/en/api."""


async def _no_route(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    if _NOT_SERVED.match(path):
        text = (
            f"{path[:200]} is not supported: this server has /v1/chat/completions, "
            "/v1/completions, /v1/responses and /v1/models of OpenAI's API, and /v1/messages of "
            "Anthropic's."
        )
    elif path.startswith(("/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/embed")):
        text = (
            f"{path[:200]} is of Ollama's API, which is not supported. Set the client to an "
            "OpenAI-compatible server, with a base URL that ends in /v1."
        )
    else:
        text = (
            f"There is nothing at {path[:200]}. (A client's base URL ends in /v1 for the OpenAI "
            "API, and not for Anthropic's.)"
        )
    return error_response(request, errors.NotFound(text))


async def _disconnected(request: Request, _: Exception) -> Response:
    # Sent to a closed connection: Starlette needs a response to end the exchange.
    id = request.scope.get("state", {}).get("request_id")
    log.info("%s: request cancelled: the client disconnected", id)
    return Response(status_code=499)


HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    errors.MlxcacheError: _handle,
    HTTPException: _handle,
    404: _no_route,
    ClientDisconnect: _disconnected,
}
"""Exception handlers for Starlette; `FallbackMiddleware` handles all other exceptions."""
