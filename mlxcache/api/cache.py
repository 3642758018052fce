"""Endpoints of the cache: figures, warming, checking and removing files, the prefix tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.http import (
    Deps,
    get_request_id,
    json_response,
    make_request_id,
    read_body,
    read_number,
    refuse_owners,
    require_model,
    while_connected,
)
from mlxcache.api.sessions import DEFAULT_SESSIONS, require_sessions
from mlxcache.common_prefix import common_length
from mlxcache.errors import BadRequest
from mlxcache.owner import OWNER
from mlxcache.sessions.tree_view import tree_view
from mlxcache.types import WARMING, Finished, Job, Prompt
from mlxcache.wire.chat_bodies import chats_to_warm, requested_model
from mlxcache.wire.reply import finished_or_raise

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine
    from mlxcache.sessions.book import SessionBook
    from mlxcache.sessions.books import SessionBooks
    from mlxcache.store.listing import Listed

DEFAULT_NODES, MAX_NODES = 200, 1000
MAX_SESSIONS = 1000


def routes(deps: Deps) -> list[Route]:
    """Return the routes at and below /v1/cache."""
    return [
        Route("/v1/cache", partial(read_figures, deps), methods=["GET"]),
        Route("/v1/cache", partial(clear, deps), methods=["DELETE"]),
        Route("/v1/cache/warm", partial(warm_prefix, deps), methods=["POST"]),
        Route("/v1/cache/tree", partial(tree, deps), methods=["GET"]),
        Route("/v1/cache/check", partial(check, deps), methods=["GET"]),
        Route("/v1/cache/prune", partial(prune, deps), methods=["POST"]),
    ]


async def read_figures(deps: Deps, request: Request) -> Response:
    """Return figures of RAM, disk and the prefix tree, and of requests since the server started."""
    # In a thread: the figures of the disk wait for its lock.
    return json_response(await asyncio.to_thread(deps.figures))


# -- warming ---------------------------------------------------------------------------------


async def warm_prefix(deps: Deps, request: Request) -> Response:
    """Compute a prefix ahead of its first use.

    The body is a chat request of any API, or a system prompt as plain text. The model is the one
    that the request names, as for any request.
    """
    body = await read_body(request, deps.settings.max_body_bytes)
    require_model(deps)
    work = _warm_model(deps, body, get_request_id(request))
    return json_response(await while_connected(request, work))


async def _warm_model(deps: Deps, body: bytes, id: str) -> dict[str, Any]:
    own = await deps.of(requested_model(body))
    return await warm(own.engine, body, id)


async def warm(engine: Engine, body: bytes, id: str | None = None) -> dict[str, Any]:
    """Compute the prefix that `body` describes, and return the answer of `POST /v1/cache/warm`.

    The answer has the counts of the prefix's tokens (prompt, cached, restored, fed) and the seconds
    taken. The prefix of a chat request ends where the reply would begin. Without a user message, it
    ends where the first user message would begin. A body that does not begin with `{` is a system
    prompt as text. `id` is the request id; None makes a new one. Raises BadRequest or Unsupported
    if there is nothing to warm or the body is no valid chat request, and the errors of
    `run_warming`.
    """
    began = time.perf_counter()
    images = engine.info is not None and engine.info.has_images
    prompts = [await engine.render(chat) for chat in chats_to_warm(body, images=images)]
    prompt = prompts[0] if len(prompts) == 1 else _common_prefix(*prompts)
    last = await run_warming(engine, Job(id or make_request_id(), prompt))
    return {
        "object": "cache.warmed",
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": last.cached_tokens,
        "restored_tokens": last.restored_tokens,
        "fed_tokens": last.prompt_tokens - last.cached_tokens,
        "seconds": round(time.perf_counter() - began, 3),
    }


async def run_warming(engine: Engine, job: Job) -> Finished:
    """Compute the prompt of `job` without a reply, and return the final event.

    Raises the errors of `Engine.submit`, GenerationFailed if the model failed, and NotReady if the
    server stopped before the prompt was computed.
    """
    stream = await engine.submit(replace(job, max_tokens=1, raw=True, api=WARMING))
    last: Finished | None = None
    try:
        async for event in stream:
            last = event if isinstance(event, Finished) else last
    finally:
        await stream.aclose()
    return finished_or_raise(last)


def _common_prefix(one: Prompt, other: Prompt) -> Prompt:
    length = common_length(one.ids, other.ids)
    if not length:
        raise BadRequest(
            "There is nothing to warm: the prompt has no part before the user's message."
        )
    return Prompt(one.ids[:length], tuple(mark for mark in one.marks if mark < length))


# -- files -----------------------------------------------------------------------------------


_ALL_FILES = (
    "the files belong to all of them: run `mlxcache cache` on its machine while it is stopped"
)


async def check(deps: Deps, request: Request) -> Response:
    """Read all files of the cache on disk and list the problems found.

    Each has the `path` of a file or folder, and `what` is wrong with it.
    """
    refuse_owners(_ALL_FILES)
    problems = await require_sessions(deps).check()
    data = [{"path": str(one.path), "what": one.what} for one in problems]
    return json_response({"object": "list", "data": data})


async def prune(deps: Deps, request: Request) -> Response:
    """Read all files of the cache on disk and remove damaged ones.

    With `?limit_bytes=`, also evict files until the cache takes at most that many bytes on disk:
    those used least often and longest ago first, pinned ones last.
    """
    refuse_owners(_ALL_FILES)
    has_limit = "limit_bytes" in request.query_params
    limit = read_number(request, "limit_bytes", 0) if has_limit else None
    freed = await require_sessions(deps).prune(limit)
    return json_response({"object": "cache.pruned", "freed_bytes": freed})


async def clear(deps: Deps, request: Request) -> Response:
    """Remove all sessions and their KV; pinned sessions stay on disk unless `?pinned=true`.

    On a server with several keys, only the sessions of the request's key and their KV are removed.
    """
    pinned = request.query_params.get("pinned", "false")
    if pinned not in ("true", "false"):
        raise BadRequest("`pinned` must be 'true' or 'false'.", param="pinned")
    cleared = await require_sessions(deps).clear(pinned=pinned == "true")
    return json_response({"object": "cache.cleared", **cleared})


# -- prefix tree -----------------------------------------------------------------------------


async def tree(deps: Deps, request: Request) -> Response:
    """Show the prefix tree of the `?limit=` most recent sessions, in at most `?nodes=` nodes.

    Both are from 1 to 1,000. The defaults are 100 sessions and 200 nodes.
    """
    sessions, limit = require_sessions(deps), read_number(request, "limit", DEFAULT_SESSIONS)
    nodes = read_number(request, "nodes", DEFAULT_NODES)
    for name, given, most in (("limit", limit, MAX_SESSIONS), ("nodes", nodes, MAX_NODES)):
        if not 1 <= given <= most:
            raise BadRequest(f"`{name}` must be from 1 to {most}.", param=name)
    return json_response(await build_tree(sessions, await sessions.list(limit), nodes))


async def build_tree(
    sessions: SessionBook | SessionBooks, listed: Sequence[Listed], nodes: int = DEFAULT_NODES
) -> dict[str, Any]:
    """Build the answer of `GET /v1/cache/tree`: a prefix tree of at most `nodes` nodes.

    The root is one of them; if there are more, the shortest leaves are merged into their parents.
    `listed`: the sessions to show, all of the current owner. Sessions of a model that this server
    has not loaded since it started are left out. The tree is built in another thread.
    """
    parts = await sessions.tree_parts(listed)
    return await asyncio.to_thread(tree_view, parts, owner=OWNER.get(), most=nodes)
