"""Keeping web pages out: by what browsers say of who makes a request.

A page that a person visits can make their browser send requests to 127.0.0.1, and, by pointing
its own name there (DNS rebinding), also read the answers. Such requests carry the page's name in
Host and Origin, and newer browsers say in Sec-Fetch-Site that another site made them.
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
from starlette.requests import Request

from mlxcache.errors import Unauthorized
from mlxcache.owner import owner_of

log = logging.getLogger("mlxcache.door")

LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
"""Names below these are never a stranger's: they are not in the public DNS."""

PAGES = frozenset({"/dashboard"})
"""Paths that a link on another page may lead to: nothing but a person reads them."""

_FOREIGN = ("cross-site", "same-site")


def stranger(
    headers: Headers,
    allowed: frozenset[str] = frozenset(),
    *,
    any_host: bool = False,
    followed: bool = False,
) -> str | None:
    """The name of a web page that made the request, or None if none did.

    A page of this server's own is none, and those of the origins `allowed` are let in. An origin
    that is no page's, such as an editor's `vscode-webview://...`, is none; a page that hides its
    own (`null`) is one. `any_host`: this server has names of its own, whatever they are.
    `followed`: a link to this path may be followed.
    """
    host, origin = headers.get("host", ""), headers.get("origin", "").lower()
    if not any_host and not is_local(_name(f"//{host}")):
        return host
    if origin in allowed:
        return None
    site = headers.get("sec-fetch-site", "")
    if site in _FOREIGN and not (followed and _is_link(headers)):
        return origin or "a page of another site"
    if site == "same-origin":  # which no page can write itself
        return None
    if origin != "null" and not origin.startswith(("http://", "https://")):
        return None
    place = _place(origin)
    return None if place is not None and place == _place(f"//{host}", origin) else origin


def is_local(name: str | None) -> bool:
    """Whether a name can be this machine's or its own network's: an address, or no public name."""
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


def _is_link(headers: Headers) -> bool:
    """Whether a person followed a link, so that the answer is a page of its own, in no frame."""
    mode, where = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return mode == "navigate" and where == "document"


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return None


def _place(url: str, like: str = "") -> tuple[str, int] | None:
    """The name and the port in a URL; one that names none has that of its scheme, or `like`'s."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme or urlsplit(like).scheme
        port = parts.port or (443 if scheme == "https" else 80)
        return (parts.hostname or "").rstrip("."), port
    except ValueError:
        return None


class Keyring:
    """The keys that are let in. `common` is everybody's, `owned` are each an owner's."""

    def __init__(self, common: str | None, owned: tuple[str, ...] = ()):
        keys: list[tuple[str, str | None]] = [(key, owner_of(key)) for key in owned]
        if common is not None:
            keys.append((common, None))
        # Digests are of one length, so that not even a key's length shows.
        self._keys = [(sha256(key.encode()).digest(), owner) for key, owner in keys]

    def __bool__(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._keys)

    def owner(self, headers: Headers) -> str | None:
        """The owner of the key that a request carries: as `Authorization: Bearer`, or `X-Api-Key`.

        All keys are compared with both, whichever fits. Raises Unauthorized where none does.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        # Header values are bytes, read as latin-1.
        digests = [sha256(each.encode("latin-1")).digest() for each in given]
        fitting = [
            owner
            for digest in digests
            for key, owner in self._keys
            if hmac.compare_digest(digest, key)
        ]
        if not fitting:
            raise Unauthorized("The API key is missing or wrong.")
        return fitting[0]


EACH_S = 10.0
"""The least time between two lines."""


class Refusals:
    """Tells of requests that were refused at the door, and of how many there was no line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._silent_until = float("-inf")
        self._untold = 0

    def tell(self, request: Request, error: Exception) -> None:
        """Log a refusal, or count it. What the client sent is shown as a literal, cut short."""
        now = self._clock()
        if now < self._silent_until:
            self._untold += 1
            return
        status = error.status_code if isinstance(error, HTTPException) else 401
        why = error.detail if isinstance(error, HTTPException) else error
        client = request.client.host if request.client else "somebody"
        more = f" (and {self._untold} others not told of)" if self._untold else ""
        path = request.scope["path"][:100]
        log.warning("%d for %s, %s %r: %s%s", status, client, request.method, path, why, more)
        self._silent_until, self._untold = now + EACH_S, 0
