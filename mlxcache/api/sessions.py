"""Sessions over HTTP: the list, one, its name and pin, forks, snapshots out and in."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio.to_thread
import msgspec
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mlxcache.api.http import Deps, arriving, json_response, read, read_body, serving
from mlxcache.errors import BadRequest
from mlxcache.store.database import store_errors
from mlxcache.wire.decode import decode
from mlxcache.wire.titles import to_one_line

if TYPE_CHECKING:
    from mlxcache.sessions.book import SessionBook
    from mlxcache.sessions.mlx_lm_files import PromptCacheExport
    from mlxcache.store.snapshot_write import Export

DEFAULT_LIMIT = 100
RESTORE_SECONDS = 6 * 3600.0
"""How long a snapshot may take to arrive, which may be as large as a disk."""
ROOM_BYTES = 64 << 20
"""How often the disk is looked at while a file comes whose size nobody has said."""
MOST_NAME = 200

Name = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]
Handler = Callable[[Deps, Request], Awaitable[Response]]


class Patch(msgspec.Struct, forbid_unknown_fields=True):
    """What can be changed; a name of null takes it away."""

    name: Name | msgspec.UnsetType | None = msgspec.UNSET
    pinned: bool | msgspec.UnsetType = msgspec.UNSET


class Fork(msgspec.Struct, forbid_unknown_fields=True):
    """`at_tokens` None: at the end."""

    name: Name | None = None
    at_tokens: int | None = None


def routes(deps: Deps) -> list[Route]:
    """The routes of sessions."""
    handlers: list[tuple[str, str, Handler]] = [
        ("GET", "/v1/sessions", every),
        ("POST", "/v1/sessions", restore),
        ("GET", "/v1/sessions/{id}", one),
        ("PATCH", "/v1/sessions/{id}", patch),
        ("DELETE", "/v1/sessions/{id}", delete),
        ("POST", "/v1/sessions/{id}/fork", fork),
        ("GET", "/v1/sessions/{id}/snapshot", snapshot),
    ]
    return [Route(path, partial(h, deps), methods=[method]) for method, path, h in handlers]


def book(deps: Deps) -> SessionBook:
    """The sessions. Raises NotReady while the model loads."""
    serving(deps)
    return deps.engine.sessions


async def every(deps: Deps, request: Request) -> Response:
    """The sessions, those used last first; `?limit=` of them, 100 unless told."""
    sessions, limit = book(deps), whole_number(request, "limit", DEFAULT_LIMIT)
    data = [one.as_object() for one in await sessions.list(limit)]
    return json_response({"object": "list", "data": data})


def whole_number(request: Request, name: str, default: int) -> int:
    """A number in the query. Raises BadRequest."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 18):
        raise BadRequest(f"`{name}` must be a whole number.", param=name)
    return int(text)


async def one(deps: Deps, request: Request) -> Response:
    """One session with its leaves."""
    return json_response((await book(deps).get(_id(request))).as_object(leaves=True))


async def patch(deps: Deps, request: Request) -> Response:
    """Rename a session, pin it or let it go; the session as it is then."""
    sessions, body = book(deps), await read(request, Patch, deps)
    name = None if body.name is msgspec.UNSET else to_one_line(body.name or "")
    pinned = None if body.pinned is msgspec.UNSET else body.pinned
    changed = await sessions.patch(_id(request), name=name, pinned=pinned)
    return json_response(changed.as_object())


async def delete(deps: Deps, request: Request) -> Response:
    """Remove a session with what no other session needs."""
    id = _id(request)
    await book(deps).delete(id)
    return json_response({"id": id, "object": "session.deleted", "deleted": True})


async def fork(deps: Deps, request: Request) -> Response:
    """A new session that goes on from this one; no body is needed."""
    sessions = book(deps)
    body = decode(Fork, await read_body(request, deps.settings.max_body_bytes) or b"{}")
    name = to_one_line(body.name) if body.name else None
    made = await sessions.fork(_id(request), name=name, tokens=body.at_tokens)
    return json_response(made.as_object(), 201)


async def snapshot(deps: Deps, request: Request) -> Response:
    """A session as one file, streamed; `?format=` is `mlxcache` or `mlx-lm`."""
    id, format = _id(request), request.query_params.get("format", "mlxcache")
    if format not in ("mlxcache", "mlx-lm"):
        raise BadRequest("`format` must be 'mlxcache' or 'mlx-lm'.", param="format")
    portable = book(deps).portable
    export = portable.prompt_cache if format == "mlx-lm" else portable.snapshot
    made: Export | PromptCacheExport = await export(id)
    return StreamingResponse(
        iterate_in_threadpool(made),
        media_type="application/octet-stream",
        headers={
            "Content-Length": str(made.nbytes),
            "Content-Disposition": f'attachment; filename="{id}.safetensors"',
        },
    )


async def restore(deps: Deps, request: Request) -> Response:
    """A session from the snapshot that is the body; `?name=` names it.

    Of a prompt cache of mlx-lm's the body begins with `?prompt_bytes=` of what it was made of.
    """
    portable = book(deps).portable
    name = to_one_line(request.query_params.get("name", ""))[:MOST_NAME] or None
    announced = request.headers.get("content-length", "")
    folder = portable.incoming(int(announced) if announced.isdecimal() else 0)
    left = whole_number(request, "prompt_bytes", 0)
    if left > deps.settings.max_body_bytes:
        raise BadRequest("The prompt is too long.", param="prompt_bytes")
    prompt = b""
    fd, path = tempfile.mkstemp(".safetensors", f"restore-{os.getpid()}-", folder)
    try:
        with store_errors(folder), os.fdopen(fd, "wb") as file:
            unseen = ROOM_BYTES if not announced.isdecimal() else None
            async for chunk in arriving(request, seconds=RESTORE_SECONDS):
                head, rest = chunk[:left], chunk[left:]
                prompt, left = prompt + head, left - len(head)
                if unseen is not None and (unseen := unseen - len(chunk)) <= 0:
                    portable.incoming(ROOM_BYTES)  # nobody said how much would come
                    unseen = ROOM_BYTES
                await anyio.to_thread.run_sync(file.write, rest)
        text = prompt.decode(errors="replace") or None
        made = await portable.restore(Path(path), name, text)
    finally:
        os.unlink(path)
    return json_response(made.as_object(), 201)


def _id(request: Request) -> str:
    return str(request.path_params["id"])
