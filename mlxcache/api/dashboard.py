"""The dashboard: static files of this package.

The files need no key, because they hold no data. The page calls the API with the user's key.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from mlxcache.api.http import Deps
from mlxcache.api.models import prefetching
from mlxcache.api.operation import Operation
from mlxcache.errors import NotFound

PAGE = "/dashboard"
DOCS = "/docs"
ROOT = "/"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",
}
"""They allow only scripts and requests to the page's own server, and no HTML from text."""

_PAGES = {"index.html": PAGE, "docs.html": DOCS}


def _files() -> dict[str, tuple[str, bytes]]:
    found = {}
    for file in files("mlxcache.api").joinpath("page").iterdir():
        kind = TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            path = _PAGES.get(file.name, f"{PAGE}/{file.name}")
            found[path] = (kind, file.read_bytes())
    return found


FILES = _files()
"""Content type and content of each file by its URL path."""


async def lead_to_page(deps: Deps, request: Request) -> Response:
    """Redirect to the dashboard, so that the server's bare address can be opened in a browser."""
    return RedirectResponse(PAGE, background=prefetching(deps))


async def docs(deps: Deps, request: Request) -> Response:
    """Return a page that shows `/openapi.json` in readable form.

    It loads nothing from other servers.
    """
    return await file(deps, request)


async def file(_: Deps, request: Request) -> Response:
    """Return the dashboard or one of its files, or 304 if the browser has the current version."""
    found = FILES.get(request.url.path)
    if found is None:
        raise NotFound("The dashboard has no such file.")
    kind, content = found
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    headers = HEADERS | {"ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


ENDPOINTS = {
    "GET /": Operation(lead_to_page, types=(), status=307),
    "GET /dashboard": Operation(file, types=("text/html",), also=(304,)),
    "GET /docs": Operation(docs, types=("text/html",), also=(304,)),
    "GET /dashboard/{name}": Operation(file, types=("*/*",), also=(304,)),
}
