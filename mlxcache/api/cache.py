"""What a person asks of the cache: warm a prefix, check the files, make room, clear all."""

from __future__ import annotations

from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.http import (
    Deps,
    json_response,
    request_id,
    serving,
    while_connected,
)
from mlxcache.api.receive import read_body
from mlxcache.api.sessions import book, whole_number
from mlxcache.api.warm import warm
from mlxcache.errors import BadRequest
from mlxcache.owner import OWNER


def routes(deps: Deps) -> list[Route]:
    """The routes below /v1/cache; `status` has the figures."""
    return [
        Route("/v1/cache/warm", partial(warm_prefix, deps), methods=["POST"]),
        Route("/v1/cache/check", partial(check, deps), methods=["GET"]),
        Route("/v1/cache/prune", partial(prune, deps), methods=["POST"]),
        Route("/v1/cache", partial(clear, deps), methods=["DELETE"]),
    ]


async def warm_prefix(deps: Deps, request: Request) -> Response:
    """Compute the prefix that the body describes: a chat request, or a system prompt as text."""
    body = await read_body(request, deps.settings.max_body_bytes)
    serving(deps)
    work = warm(deps.engine, body, request_id(request))
    return json_response(await while_connected(request, work))


def _refuse_owners() -> None:
    """Raise HTTPException where there are several keys: what follows concerns everybody's files."""
    if OWNER.get() is not None:
        raise HTTPException(
            403,
            "this server has several keys, and all files are nobody's alone: run `mlxcache cache` "
            "on its machine while it is stopped",
        )


async def check(deps: Deps, request: Request) -> Response:
    """What is wrong with the files on disk, all of which are read."""
    _refuse_owners()
    problems = await book(deps).check()
    data = [{"path": str(one.path), "what": one.what} for one in problems]
    return json_response({"object": "list", "data": data})


async def prune(deps: Deps, request: Request) -> Response:
    """Read all files and remove damaged ones; with `?limit_bytes=` what was used least recently."""
    _refuse_owners()
    asked = "limit_bytes" in request.query_params
    limit = whole_number(request, "limit_bytes", 0) if asked else None
    return json_response({"object": "cache.pruned", "freed_bytes": await book(deps).prune(limit)})


async def clear(deps: Deps, request: Request) -> Response:
    """Empty both tiers; pinned sessions stay on disk unless `?pinned=true`.

    Where there are several keys: of what is the key's.
    """
    pinned = request.query_params.get("pinned", "false")
    if pinned not in ("true", "false"):
        raise BadRequest("`pinned` must be 'true' or 'false'.", param="pinned")
    cleared = await book(deps).clear(pinned=pinned == "true")
    return json_response({"object": "cache.cleared", **cleared})
