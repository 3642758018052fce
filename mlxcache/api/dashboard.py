"""The page that a person looks at: files of this package, and nothing else.

It holds no data: it asks the API like any client, with the key where there is one. So it needs
none itself.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.errors import NotFound

PAGE = "/dashboard"

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
"""No script but its own files, no request but to its own server, and no text taken for HTML."""


def _files() -> dict[str, tuple[str, bytes]]:
    """Each file's type and content by its path below `PAGE`."""
    found = {}
    for file in files("mlxcache.api").joinpath("page").iterdir():
        kind = TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            path = PAGE if file.name == "index.html" else f"{PAGE}/{file.name}"
            found[path] = (kind, file.read_bytes())
    return found


FILES = _files()
"""Everything that the page consists of. These paths need no key."""


def routes() -> list[Route]:
    """The page, and what it is made of."""
    return [
        Route(PAGE, file, methods=["GET"]),
        Route(f"{PAGE}/{{name}}", file, methods=["GET"]),
    ]


async def file(request: Request) -> Response:
    """One file, or 304 where the browser has it. Raises NotFound."""
    found = FILES.get(request.url.path)
    if found is None:
        raise NotFound("The dashboard has no such file.")
    kind, content = found
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    headers = HEADERS | {"ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)
