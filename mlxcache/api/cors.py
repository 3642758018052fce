"""Answers that let a browser's page of another origin in: of those origins that a person named.

The protocol: https://fetch.spec.whatwg.org/#http-cors-protocol.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response

METHODS = "GET, POST, PATCH, DELETE"
READABLE = "X-Mlxcache-Request, Retry-After, Content-Disposition"
CACHED_SECONDS = "600"


def is_preflight(request: Request) -> bool:
    """Whether a browser asks what a page may do, before the page does it. It sends no key."""
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


def preflight(request: Request, *, allowed: bool) -> Response:
    """The answer to such a question. Without the headers of `allow` it is a no."""
    response = Response(status_code=204 if allowed else 403)
    if allowed:
        asked = request.headers
        response.headers["Access-Control-Allow-Methods"] = METHODS
        response.headers["Access-Control-Max-Age"] = CACHED_SECONDS
        if "access-control-request-headers" in asked:
            wanted = asked["access-control-request-headers"]
            response.headers["Access-Control-Allow-Headers"] = wanted
        if asked.get("access-control-request-private-network") == "true":
            response.headers["Access-Control-Allow-Private-Network"] = "true"
    return response


def allow(headers: MutableHeaders, origin: str) -> None:
    """Let the page of `origin`, and no other, read a response. Cookies are never asked for."""
    headers["Access-Control-Allow-Origin"] = origin
    headers["Access-Control-Expose-Headers"] = READABLE
    headers.add_vary_header("Origin")
