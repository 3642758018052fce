"""Access checks: web pages of other origins, CORS, API keys, wrong URLs, and a log of refusals.

A web page can make its visitor's browser send requests to 127.0.0.1 and, by pointing its own host
name there (DNS rebinding), also read the answers. Such requests carry the page's host name in Host
and Origin, and newer browsers mark them as cross-site in Sec-Fetch-Site.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxcache.api.dashboard import DOCS, FILES, PAGE, ROOT
from mlxcache.api.errors import HANDLERS, error_response
from mlxcache.api.http import HEALTH, OPENAPI, ApiSettings
from mlxcache.errors import Unauthorized
from mlxcache.owner import OWNER, owner_of

LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa")

LINKABLE_PATHS = frozenset({ROOT, PAGE, DOCS})
"""URL paths that a link on another page may open: they change nothing and are shown in no frame."""

KEYLESS_PATHS = frozenset({HEALTH, ROOT, OPENAPI, *FILES})
"""URL paths that need no key, because they hold no data."""

MAX_HEADERS, MAX_HEADER_BYTES = 128, 32 << 10

LOG_INTERVAL_S = 10.0

_FOREIGN_SITES = ("cross-site", "same-site")

log = logging.getLogger(__name__)


# -- foreign pages ---------------------------------------------------------------------------


def foreign_origin(
    headers: Headers,
    allowed: frozenset[str] = frozenset(),
    *,
    any_host: bool = False,
    linkable: bool = False,
) -> str | None:
    """Return a name of the web page for which a request is refused, or None.

    A request is refused in two cases:

    - Unless `any_host`, if the header Host, the name under which the client reached this server, is
      neither an IP address nor a local name. Host is returned.
    - If Origin is not in `allowed` and the request is from a page of another origin:
      Sec-Fetch-Site, which the browser sets, is `cross-site` or `same-site`; or it is not
      `same-origin`, and Origin is `null` or an http or https origin other than this server's.

    So requests without Origin are allowed, and those from origins of other schemes, such as an
    editor's `vscode-webview://...`. With `linkable`, links on pages of other sites may open it.
    """
    host, origin = headers.get("host", ""), headers.get("origin", "").lower()
    if not any_host and not is_local(_host_name(f"//{host}")):
        return host
    if origin in allowed:
        return None
    site = headers.get("sec-fetch-site", "")
    if site in _FOREIGN_SITES and not (linkable and _is_navigation(headers)):
        return origin or "a page of another site"
    if site == "same-origin":  # set by the browser; a page cannot write this header
        return None
    if origin != "null" and not origin.startswith(("http://", "https://")):
        return None
    address = _address(origin)
    return None if address is not None and address == _address(f"//{host}", origin) else origin


def is_local(name: str | None) -> bool:
    if name is None:
        return False
    name = name.rstrip(".").lower()
    if "." not in name or name.endswith(LOCAL_SUFFIXES) or name == socket.gethostname().lower():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_navigation(headers: Headers) -> bool:
    mode, destination = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return mode == "navigate" and destination == "document"


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return None


def _address(url: str, like: str = "") -> tuple[str, int] | None:
    """Return host and port of `url`, with the scheme of `like` if it has none."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme or urlsplit(like).scheme
        port = parts.port or (443 if scheme == "https" else 80)
        return (parts.hostname or "").rstrip("."), port
    except ValueError:
        return None


def check_page(settings: ApiSettings, request: Request) -> None:
    """Raise HTTPException for a request of another site's page (403) or too many headers (431).

    If keys are required, every host name is accepted: another site's page cannot have a key.
    """
    raw = request.scope["headers"]
    if len(raw) > MAX_HEADERS or sum(len(k) + len(v) for k, v in raw) > MAX_HEADER_BYTES:
        raise HTTPException(
            431, f"more than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them"
        )
    page = foreign_origin(
        request.headers,
        settings.origins,
        any_host=settings.any_host or settings.api_key is not None or bool(settings.owned_keys),
        linkable=request.method == "GET" and request.scope["path"] in LINKABLE_PATHS,
    )
    if page is not None:
        raise HTTPException(
            403,
            f"{page[:100]!r} is not a name of this machine, or it is a web page of another "
            "origin; both are refused. Use an IP address or localhost, allow the page with "
            "--allow-origin, or start the server with an API key to use other names",
        )


# -- CORS ------------------------------------------------------------------------------------


class OriginMiddleware(CORSMiddleware):
    """CORS for the origins in the settings. Cookies are never allowed."""

    def __init__(self, app: ASGIApp, settings: ApiSettings):
        super().__init__(
            app,
            allow_origins=settings.origins,
            allow_methods=("GET", "HEAD", "POST", "PATCH", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("X-Mlxcache-Request", "Retry-After", "Content-Disposition"),
            max_age=600,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        # Starlette answers 200 with a text, and lists permissions also in a refusal.
        answer = super().preflight_response(request_headers)
        if answer.status_code != 200:
            return Response(status_code=403)
        body_headers = ("content-length", "content-type")
        headers = {name: text for name, text in answer.headers.items() if name not in body_headers}
        return Response(status_code=204, headers=headers)


# -- keys ------------------------------------------------------------------------------------


class Keyring:
    """API keys that the server accepts: `common` has no owner, each of `owned` its own."""

    def __init__(self, common: str | None, owned: tuple[str, ...] = ()):
        keys: list[tuple[str, str | None]] = [(key, owner_of(key)) for key in owned]
        if common is not None:
            keys.append((common, None))
        # Digests have one length, so that comparing them does not reveal a key's length.
        self._keys = [(sha256(key.encode()).digest(), owner) for key, owner in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find_owner(self, headers: Headers) -> str | None:
        """Return the owner of the key in the headers; None for the common key.

        Compares in constant time. Raises Unauthorized if no key matches.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        # Header values are bytes, read as latin-1.
        digests = [sha256(each.encode("latin-1")).digest() for each in given]
        matching = [
            owner
            for digest in digests
            for key, owner in self._keys
            if hmac.compare_digest(digest, key)
        ]
        if not matching:
            raise Unauthorized("The API key is missing or wrong.")
        return matching[0]


def check_key(keys: Keyring, request: Request) -> None:
    """Set `OWNER` to the owner of the request's key. Raises Unauthorized if a key is missing."""
    needs_key = keys and request.scope["path"] not in KEYLESS_PATHS
    OWNER.set(keys.find_owner(request.headers) if needs_key else None)


# -- refusals --------------------------------------------------------------------------------


class CheckMiddleware:
    """Middleware that refuses requests for which `check` raises HTTPException or Unauthorized."""

    def __init__(self, app: ASGIApp, check: Callable[[Request], None], refusals: RefusalLog):
        self._app, self._check, self._refusals = app, check, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            try:
                self._check(request)
            except (HTTPException, Unauthorized) as error:
                self._refusals.log_refusal(request, error)
                await error_response(request, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class RefusalLog:
    """Log of refused requests, at most one line per `LOG_INTERVAL_S`, without keys.

    A client that tries many keys thus cannot fill the disk.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._silent_until = float("-inf")
        self._unlogged = 0

    def log_refusal(self, request: Request, error: Exception) -> None:
        more = self._begin_line()
        if more is None:
            return
        status = error.status_code if isinstance(error, HTTPException) else 401
        reason = error.detail if isinstance(error, HTTPException) else error
        client, path, method = _client_of(request), request.scope["path"][:100], request.method
        log.warning("refused with %d: %s, %s %r: %s%s", status, client, method, path, reason, more)

    def log_wrong_base_url(self, request: Request, cause: str) -> None:
        """Log a request to a path that does not exist.

        The path is not quoted: it must be one for which `explain_wrong_base_url` returns a text.
        """
        more = self._begin_line()
        if more is not None:
            client, path = _client_of(request), request.scope["path"]
            log.warning(
                "refused with 404: %s, %s %s: %s%s", client, request.method, path, cause, more
            )

    def _begin_line(self) -> str | None:
        """Return what to append to the next line; None if no line may follow yet."""
        now = self._clock()
        if now < self._silent_until:
            self._unlogged += 1
            return None
        more = f" (and {self._unlogged} others not logged)" if self._unlogged else ""
        self._silent_until, self._unlogged = now + LOG_INTERVAL_S, 0
        return more


# -- wrong base URLs ---------------------------------------------------------------------------

_CLIENT_PATHS = frozenset(
    {
        *("/chat/completions", "/completions", "/responses", "/models"),
        *("/messages", "/messages/count_tokens"),
    }
)
"""URL paths that clients append to their base URL, after the `/v1`."""


def explain_wrong_base_url(path: str) -> str | None:
    """Return what is wrong with the base URL of a client that requests `path`, if that is known."""
    if path in _CLIENT_PATHS:
        return "the client's base URL lacks /v1"
    if path.removeprefix("/v1/v1") in _CLIENT_PATHS:
        return "the client's base URL has one /v1 too many"
    return None


class UnknownPaths:
    """Handler of requests to paths that do not exist; logs those of a wrong base URL.

    The response names the cause too, but most clients do not show its message.
    """

    def __init__(self, refusals: RefusalLog):
        self._refusals = refusals

    async def __call__(self, request: Request, error: Exception) -> Response:
        cause = explain_wrong_base_url(request.scope["path"])
        if cause is not None:
            self._refusals.log_wrong_base_url(request, cause)
        return await HANDLERS[404](request, error)


def _client_of(request: Request) -> str:
    return request.client.host if request.client else "unknown address"
