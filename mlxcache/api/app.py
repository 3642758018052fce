"""The HTTP application: routes, error handlers and middleware.

The middleware defined here adds request ids and security headers, counts errors, and answers 500 if
a handler fails unexpectedly.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Match, Route
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
from mlxcache.api.http import (
    HEALTH,
    OPENAPI,
    ApiSettings,
    Deps,
    get_request_id,
    make_request_id,
)
from mlxcache.api.openapi import describe
from mlxcache.api.operation import Operation

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
    endpoints: dict[str, Operation] = {
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
    endpoints[f"GET {OPENAPI}"] = describe(endpoints)
    methods: defaultdict[str, set[str]] = defaultdict(set)
    for key in endpoints:
        method, path = key.split(" ")
        methods[path].add(method)
    routes: list[BaseRoute] = []
    for key, operation in endpoints.items():
        method, path = key.split(" ")
        routes.append(Endpoint(path, operation, deps, method, methods[path]))
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


class Endpoint(Route):
    """Route of one method, which answers 405 for a method that its path does not have at all.

    Another route may match that path too: `/v1/models/{id}` matches `/v1/models/a/load`.
    """

    def __init__(
        self, path: str, operation: Operation, deps: Deps, method: str, allowed: Collection[str]
    ):
        super().__init__(path, partial(operation.handler, deps), methods=[method])
        self.operation = operation
        self._allowed = {*allowed, *(("HEAD",) if "GET" in allowed else ())}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, more = super().matches(scope)
        refused = match is Match.PARTIAL and scope["method"] not in self._allowed
        return Match.FULL if refused else match, more

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in self._allowed:
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(self._allowed))})
        await super().handle(scope, receive, send)


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
