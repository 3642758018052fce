"""The prefix tree as a picture: what the sessions share, where they part, what is in which tier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.http import Deps, json_response
from mlxcache.api.sessions import DEFAULT_LIMIT, book, whole_number
from mlxcache.errors import BadRequest
from mlxcache.owner import OWNER
from mlxcache.sessions.tree_view import picture

if TYPE_CHECKING:
    from mlxcache.sessions.book import SessionBook
    from mlxcache.store.listing import Listed

DEFAULT_NODES, MOST_NODES = 200, 1000
MOST_SESSIONS = 1000


def routes(deps: Deps) -> list[Route]:
    """The one route of the picture."""
    return [Route("/v1/cache/tree", partial(tree, deps), methods=["GET"])]


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
