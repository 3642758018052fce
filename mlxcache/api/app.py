"""The HTTP application: routes, error handlers and middleware.

The middleware defined here adds request ids and security headers, counts errors, and answers 500 if
a handler fails unexpectedly.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcache.api import (
    anthropic,
    cache,
    dashboard,
    live,
    metrics,
    openai,
    responses,
    sessions,
    status,
)
from mlxcache.api import models as models_
from mlxcache.api.access import (
    CheckMiddleware,
    Keyring,
    OriginMiddleware,
    RefusalLog,
    UnknownPaths,
    check_key,
    check_page,
)
from mlxcache.api.errors import HANDLERS, error_response, is_anthropic_client
from mlxcache.api.http import HEALTH, ApiSettings, Deps, get_request_id, make_request_id
from mlxcache.api.openapi import PATH, describe

if TYPE_CHECKING:
    from mlxcache.engine.models import Models

REQUEST_HEADER = "X-Mlxcache-Request"

ANTHROPIC_REQUEST_HEADER = "request-id"
"""Header with the same id, in which Anthropic's SDKs look for it."""

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response, which keep pages from loading it as a script, image or frame."""

log = logging.getLogger(__name__)


def create_app(models: Models, settings: ApiSettings | None = None) -> Starlette:
    """Build the HTTP application for `models`, which may still be loading."""
    settings = settings or ApiSettings()
    deps = Deps(models.default, settings, models)
    endpoints = {
        **openai.ENDPOINTS,
        **responses.ENDPOINTS,
        **anthropic.ENDPOINTS,
        **sessions.ENDPOINTS,
        **cache.ENDPOINTS,
        **status.ENDPOINTS,
        **models_.ENDPOINTS,
        **live.endpoints(deps.models),
        **dashboard.ENDPOINTS,
        **metrics.endpoints(deps),
    }
    routes: list[BaseRoute] = []
    for key, handler in endpoints.items():
        method, path = key.split(" ")
        routes.append(Route(path, partial(handler, deps), methods=[method]))
    routes.append(Route(PATH, describe(routes), methods=["GET"]))
    return Starlette(
        routes=routes,
        middleware=_middleware(deps),
        # A log of its own: keys that are refused meanwhile do not hide a wrong base URL.
        exception_handlers={**HANDLERS, 404: UnknownPaths(RefusalLog())},
    )


def _middleware(deps: Deps) -> list[Middleware]:
    """Return the middleware, outermost first."""
    settings, refusals = deps.settings, RefusalLog()
    keys = Keyring(settings.api_key, settings.owned_keys)
    # Pages are refused before CORS adds headers. A preflight carries no key, so CORS comes before
    # the keys; an allowed page must be able to read a 500, so CORS comes before the fallback.
    cors = [Middleware(OriginMiddleware, settings=settings)] if settings.origins else []
    return [
        Middleware(RequestMiddleware, error_counts=deps.error_counts),
        Middleware(CheckMiddleware, check=partial(check_page, settings), refusals=refusals),
        *cors,
        Middleware(FallbackMiddleware),
        Middleware(CheckMiddleware, check=partial(check_key, keys), refusals=refusals),
    ]


class RequestMiddleware:
    """Middleware that gives each request an id, adds `SECURITY_HEADERS` and counts error responses.

    Errors of `/health` are not counted, because clients poll it until the model is loaded.
    """

    def __init__(self, app: ASGIApp, error_counts: Counter[int]):
        self._app, self._error_counts = app, error_counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
                if is_anthropic_client(Request(scope)):
                    headers[ANTHROPIC_REQUEST_HEADER] = id
                headers.update(SECURITY_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class FallbackMiddleware:
    """Middleware that answers 500 for an exception without a handler, and logs it."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            log.exception("%s: request %s %r failed", id, request.method, scope["path"][:200])
            if started:
                raise
            await error_response(request, error)(scope, receive, send)
