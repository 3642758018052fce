"""What a person asks of the cache: warm a prefix, check the files, make room, clear all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.http import (
    Deps,
    json_response,
    new_request_id,
    read_body,
    request_id,
    serving,
    while_connected,
)
from mlxcache.api.sessions import DEFAULT_LIMIT, book, whole_number
from mlxcache.errors import BadRequest
from mlxcache.owner import OWNER
from mlxcache.sessions.tree_view import picture
from mlxcache.types import WARMING, Finished, Job, Prompt
from mlxcache.wire.chat_bodies import chats_to_warm
from mlxcache.wire.reply import finished_or_raise

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine
    from mlxcache.sessions.book import SessionBook
    from mlxcache.store.listing import Listed


def routes(deps: Deps) -> list[Route]:
    """The routes below /v1/cache; `status` has the figures."""
    return [
        Route("/v1/cache/warm", partial(warm_prefix, deps), methods=["POST"]),
        Route("/v1/cache/tree", partial(tree, deps), methods=["GET"]),
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


async def warm(engine: Engine, body: bytes, id: str | None = None) -> dict[str, Any]:
    """Compute the prefix that `body` describes, and say what that took.

    A chat request of either API is computed to where the reply begins, one without a message of a
    person up to where that would stand. What is no JSON object is a system prompt. Counts are in
    tokens. Raises BadRequest for a body that is neither, and what `Engine.submit` raises.
    """
    began = time.perf_counter()
    prompts = [await engine.render(chat) for chat in chats_to_warm(body)]
    prompt = prompts[0] if len(prompts) == 1 else _shared(*prompts)
    job = Job(id or new_request_id(), prompt, max_tokens=1, raw=True, api=WARMING)
    stream = await engine.submit(job)
    last: Finished | None = None
    try:
        async for event in stream:
            last = event if isinstance(event, Finished) else last
    finally:
        await stream.aclose()
    last = finished_or_raise(last)
    return {
        "object": "cache.warmed",
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": last.cached_tokens,
        "restored_tokens": last.restored_tokens,
        "fed_tokens": last.prompt_tokens - last.cached_tokens,
        "seconds": round(time.perf_counter() - began, 3),
    }


def _shared(one: Prompt, other: Prompt) -> Prompt:
    """What two prompts begin with in common. Raises BadRequest where that is nothing."""
    size = min(len(one.ids), len(other.ids))
    differ = np.flatnonzero(one.ids[:size] != other.ids[:size])
    length = int(differ[0]) if len(differ) else size
    if not length:
        raise BadRequest("There is nothing to warm: the prompt has no beginning of its own.")
    return Prompt(one.ids[:length], tuple(mark for mark in one.marks if mark < length))


DEFAULT_NODES, MOST_NODES = 200, 1000
MOST_SESSIONS = 1000


async def tree(deps: Deps, request: Request) -> Response:
    """The tree of the sessions used last, `?limit=` of them, as at most `?nodes=` nodes.

    Of either from 1 to 1,000; 100 sessions and 200 nodes unless told.
    """
    sessions, limit = book(deps), whole_number(request, "limit", DEFAULT_LIMIT)
    nodes = whole_number(request, "nodes", DEFAULT_NODES)
    for name, given, most in (("limit", limit, MOST_SESSIONS), ("nodes", nodes, MOST_NODES)):
        if not 1 <= given <= most:
            raise BadRequest(f"`{name}` must be from 1 to {most}.", param=name)
    return json_response(await tree_object(sessions, await sessions.list(limit), nodes))


async def tree_object(
    sessions: SessionBook, listed: Sequence[Listed], nodes: int = DEFAULT_NODES
) -> dict[str, Any]:
    """The picture of what was listed for the owner that asks, made in a thread."""
    own = [one for one in listed if one.session.namespace == sessions.namespace]
    owner = OWNER.get()
    return await asyncio.to_thread(picture, own, sessions.decode, owner=owner, most=nodes)
