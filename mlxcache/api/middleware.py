"""What every request goes through: its id, the door, and an answer whatever happens."""

from __future__ import annotations

import logging
from collections import Counter

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcache.api.access import PAGES, Keyring, Refusals, stranger
from mlxcache.api.cors import allow, is_preflight, preflight
from mlxcache.api.dashboard import FILES
from mlxcache.api.errors import error_response
from mlxcache.api.http import ApiSettings, new_request_id
from mlxcache.errors import Unauthorized
from mlxcache.owner import OWNER

REQUEST_HEADER = "X-Mlxcache-Request"
HEALTH = "/health"
OPEN_PATHS = frozenset({HEALTH, *FILES})
"""Paths that need no key: they hold no data."""

MOST_HEADERS, MOST_HEADER_BYTES = 128, 32 << 10

ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response: no page may take it for a script or an image, nor frame it."""

log = logging.getLogger(__name__)


class RequestMiddleware:
    """Gives each request its id, lets it in or not, and turns what nobody handled into a 500.

    Requests that web pages make are refused: see `hosts`. Where there are keys, one is asked for.
    Answers that are errors are counted in `refusals`, those of /health not: it is asked in vain
    until the model is there.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings, refusals: Counter[int]):
        self._app, self._counts = app, refusals
        self._origins = settings.origins
        self._any_host = settings.any_host
        self._keys = Keyring(settings.api_key, settings.owned_keys)
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection; anything but HTTP passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = new_request_id()
        scope.setdefault("state", {})["request_id"] = id
        started = False
        request = Request(scope)
        origin = request.headers.get("origin", "").lower()

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(scope, message["status"])
                headers = MutableHeaders(scope=message)
                headers[REQUEST_HEADER] = id
                headers.update(ALWAYS)
                if origin in self._origins:
                    allow(headers, origin)
            await send(message)

        try:
            self._refuse_pages(request)
            if is_preflight(request):
                response = preflight(request, allowed=origin in self._origins)
                await response(scope, receive, send_with_id)
                return
            self._authorize(request)
            await self._app(scope, receive, send_with_id)
        except (Unauthorized, HTTPException) as error:
            self._refusals.tell(request, error)
            await error_response(request, error)(scope, receive, send_with_id)
        except Exception as error:
            log.exception("%s: %s %r failed", id, request.method, scope["path"][:200])
            if started:
                raise
            await error_response(request, error)(scope, receive, send_with_id)

    def _count(self, scope: Scope, status: int) -> None:
        if status >= 400 and scope["path"] != HEALTH:
            self._counts[status] += 1

    def _authorize(self, request: Request) -> None:
        if not self._keys or request.scope["path"] in OPEN_PATHS:
            OWNER.set(None)
            return
        OWNER.set(self._keys.owner(request.headers))

    def _refuse_pages(self, request: Request) -> None:
        raw = request.scope["headers"]
        if len(raw) > MOST_HEADERS or sum(len(k) + len(v) for k, v in raw) > MOST_HEADER_BYTES:
            raise HTTPException(
                431, f"more than {MOST_HEADERS} headers, or {MOST_HEADER_BYTES} bytes of them"
            )
        page = stranger(
            request.headers,
            self._origins,
            any_host=self._any_host or bool(self._keys),
            followed=request.method == "GET" and request.scope["path"] in PAGES,
        )
        if page is not None:
            raise HTTPException(
                403,
                f"{page[:100]!r} is no name of this machine, or a web page of another origin, and "
                "those are not let in: use an address or localhost, let the page in with "
                "--allow-origin, or start the server with an API key for a name of its own",
            )
