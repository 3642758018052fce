"""What every request goes through: its id, the API key, and an answer whatever happens."""

from __future__ import annotations

import hmac
import logging

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcache.api.errors import error_response
from mlxcache.api.hosts import stranger
from mlxcache.api.http import ApiSettings, new_request_id
from mlxcache.errors import Unauthorized

REQUEST_HEADER = "X-Mlxcache-Request"
OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key."""

log = logging.getLogger(__name__)


class RequestMiddleware:
    """Gives each request its id, asks for the key, and turns what nobody handled into a 500.

    Where no key is asked for, requests that a web page makes are refused: see `hosts`.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings):
        self._app = app
        self._key = settings.api_key
        self._any_host = settings.any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection; anything but HTTP passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = new_request_id()
        scope.setdefault("state", {})["request_id"] = id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_HEADER] = id
            await send(message)

        request = Request(scope)
        try:
            self._authorize(request)
            await self._app(scope, receive, send_with_id)
        except (Unauthorized, HTTPException) as error:
            await error_response(request, error)(scope, receive, send_with_id)
        except Exception as error:
            log.exception("%s: %s %s failed", id, request.method, scope["path"])
            if started:
                raise
            await error_response(request, error)(scope, receive, send_with_id)

    def _authorize(self, request: Request) -> None:
        if self._key is None:
            self._refuse_pages(request)
            return
        if request.scope["path"] in OPEN_PATHS:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(token.strip())
        key = self._key.encode()
        # Header values are bytes, read as latin-1.
        # A list, so that the time taken does not tell which of the two matched.
        if not any([hmac.compare_digest(each.encode("latin-1"), key) for each in given]):
            raise Unauthorized("The API key is missing or wrong.")

    def _refuse_pages(self, request: Request) -> None:
        site = None if self._any_host else stranger(request.headers)
        if site is not None:
            raise HTTPException(
                403,
                f"{site[:100]!r} is no name of this machine, and web pages are not let in: use an "
                "address or localhost, or start the server with an API key",
            )
