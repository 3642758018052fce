"""Endpoints of the cache: figures, warming, checking and removing files, the prefix tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from mlxcache.api import http
from mlxcache.api.operation import JSON, Number, Operation, Word
from mlxcache.api.sessions import require_sessions
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
    from mlxcache.store.listing import Listed

SESSIONS, NODES = Number("limit", 100, most=1000), Number("nodes", 200, most=1000)
LIMIT_BYTES = Number("limit_bytes", 2**63 - 1, 0)
PINNED = Word("pinned", ("false", "true"))


async def read_figures(deps: http.Deps, request: Request) -> Response:
    """Return figures of RAM, disk and the prefix tree, and of requests since the server started."""
    # In a thread: the figures of the disk wait for its lock.
    return http.json_response(await asyncio.to_thread(deps.models.figures))


# -- warming ---------------------------------------------------------------------------------


async def warm_prefix(deps: http.Deps, request: Request) -> Response:
    """Compute a prefix ahead of its first use.

    The body is a chat request of any API, or a system prompt as plain text. The model is the one
    that the request names, as for any request.
    """
    body = await http.read_body(request, deps.settings.max_body_bytes)
    http.require_model(deps)

    async def work() -> dict[str, Any]:
        own = await deps.of(requested_model(body))
        return await warm(own.engine, body, http.get_request_id(request))

    return http.json_response(await http.while_connected(request, work()))


async def warm(engine: Engine, body: bytes, id: str | None = None) -> dict[str, Any]:
    """Compute the prefix that `body` describes, and return the answer of `POST /v1/cache/warm`.

    The prefix of a chat request ends where the reply would begin; without a user message, where the
    first one would begin. A body that does not begin with `{` is a system prompt as text.
    """
    began = time.perf_counter()
    images = engine.info is not None and engine.info.has_images
    prompts = [await engine.render(chat) for chat in chats_to_warm(body, images=images)]
    prompt = prompts[0] if len(prompts) == 1 else _common_prefix(*prompts)
    last = await run_warming(engine, Job(id or http.make_request_id(), prompt))
    return {
        "object": "cache.warmed",
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": last.cached_tokens,
        "restored_tokens": last.restored_tokens,
        "fed_tokens": last.prompt_tokens - last.cached_tokens,
        "seconds": round(time.perf_counter() - began, 3),
    }


async def run_warming(engine: Engine, job: Job) -> Finished:
    """Compute the prompt of `job` without a reply, and return the final event."""
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


async def check(deps: http.Deps, request: Request) -> Response:
    """Read all files of the cache on disk and list the problems found.

    Each has the `path` of a file or folder, and `what` is wrong with it.
    """
    http.refuse_owners(_ALL_FILES)
    problems = await require_sessions(deps).check()
    data = [{"path": str(one.path), "what": one.what} for one in problems]
    return http.json_response({"object": "list", "data": data})


async def prune(deps: http.Deps, request: Request) -> Response:
    """Read all files of the cache on disk and remove damaged ones.

    With `?limit_bytes=`, also evict files until the cache takes at most that many bytes on disk:
    those used least often and longest ago first, pinned ones last.
    """
    http.refuse_owners(_ALL_FILES)
    freed = await require_sessions(deps).prune(LIMIT_BYTES.read(request))
    return http.json_response({"object": "cache.pruned", "freed_bytes": freed})


async def clear(deps: http.Deps, request: Request) -> Response:
    """Remove all sessions and their KV; pinned sessions stay on disk unless `?pinned=true`.

    On a server with several keys, only the sessions of the request's key and their KV are removed.
    """
    pinned = PINNED.read(request) == "true"
    cleared = await require_sessions(deps).clear(pinned=pinned)
    return http.json_response({"object": "cache.cleared", **cleared})


# -- prefix tree -----------------------------------------------------------------------------


async def tree(deps: http.Deps, request: Request) -> Response:
    """Show the prefix tree of the `?limit=` most recent sessions, in at most `?nodes=` nodes.

    Both are from 1 to 1,000. The defaults are 100 sessions and 200 nodes.
    """
    sessions = require_sessions(deps)
    limit, nodes = SESSIONS.read(request), NODES.read(request)
    return http.json_response(await build_tree(sessions, await sessions.list(limit), nodes))


async def build_tree(
    sessions: SessionBook, listed: Sequence[Listed], nodes: int = NODES.default
) -> dict[str, Any]:
    """Build the answer of `GET /v1/cache/tree` for the sessions `listed`, in another thread.

    Sessions of a model that was not loaded are left out. If there are more nodes, the shortest
    leaves are merged into their parents.
    """
    parts = await sessions.tree_parts(listed)
    return await asyncio.to_thread(tree_view, parts, owner=OWNER.get(), most=nodes)


ENDPOINTS = {
    "GET /v1/cache": Operation(read_figures),
    "DELETE /v1/cache": Operation(clear, query=(PINNED,)),
    "POST /v1/cache/warm": Operation(warm_prefix, raw=(JSON, "text/plain")),
    "GET /v1/cache/tree": Operation(tree, query=(SESSIONS, NODES)),
    "GET /v1/cache/check": Operation(check),
    "POST /v1/cache/prune": Operation(prune, query=(LIMIT_BYTES,)),
}
