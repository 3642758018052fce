"""Middleware of every request: its id, security headers, error counts, and a 500 for a bug."""

from __future__ import annotations

import logging
from collections import Counter

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcache.api.errors import error_response
from mlxcache.api.http import HEALTH, get_request_id, make_request_id

REQUEST_HEADER = "X-Mlxcache-Request"

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response: no page can load it as a script or an image, nor frame it."""

log = logging.getLogger(__name__)


class RequestMiddleware:
    """Give each request an id, add `SECURITY_HEADERS`, and count error responses by status.

    Errors of `/health` are not counted: clients poll it until the model is loaded.
    """

    def __init__(self, app: ASGIApp, error_counts: Counter[int]):
        self._app, self._error_counts = app, error_counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection; other types than HTTP pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = make_request_id()
        scope.setdefault("state", {})["request_id"] = id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] >= 400 and scope["path"] != HEALTH:
                    self._error_counts[message["status"]] += 1
                headers = MutableHeaders(scope=message)
                headers[REQUEST_HEADER] = id
                headers.update(SECURITY_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class FallbackMiddleware:
    """Answer 500 for an exception without a handler; re-raise it if the response has begun."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection; other types than HTTP pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_noting_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_noting_start)
        except Exception as error:
            request = Request(scope)
            id = get_request_id(request)
            log.exception("%s: %s %r failed", id, request.method, scope["path"][:200])
            if started:
                raise
            await error_response(request, error)(scope, receive, send)
