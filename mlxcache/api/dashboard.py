"""The dashboard: static files of this package.

The files need no key, because they hold no data. The page calls the API with the user's key.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

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
"""Headers that allow only scripts of the page's own files and requests to its own server.

They also forbid scripts to parse text as HTML."""

_PAGES = {"index.html": PAGE, "docs.html": DOCS}


def _files() -> dict[str, tuple[str, bytes]]:
    """Return (content type, content) of each dashboard file, by URL path such as `/dashboard`."""
    found = {}
    for file in files("mlxcache.api").joinpath("page").iterdir():
        kind = TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            path = _PAGES.get(file.name, f"{PAGE}/{file.name}")
            found[path] = (kind, file.read_bytes())
    return found


FILES = _files()
"""All files of the page by their URL path."""


def routes() -> list[Route]:
    """Return the routes of the dashboard's page and files."""
    return [
        Route(ROOT, lead_to_page, methods=["GET"]),
        Route(PAGE, file, methods=["GET"]),
        Route(DOCS, docs, methods=["GET"]),
        Route(f"{PAGE}/{{name}}", file, methods=["GET"]),
    ]


async def lead_to_page(_: Request) -> Response:
    """Redirect to the dashboard, so that the server's bare address can be opened in a browser."""
    return RedirectResponse(PAGE)


async def docs(request: Request) -> Response:
    """Return a page that shows `/openapi.json` in readable form.

    It loads nothing from other servers.
    """
    return await file(request)


async def file(request: Request) -> Response:
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
