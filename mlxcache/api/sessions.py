"""Endpoints of sessions: list, show, rename, pin, delete, fork, export and import snapshots."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mlxcache.api import http
from mlxcache.api.models import engine_named
from mlxcache.api.operation import BINARY, Number, Operation, Text, Word
from mlxcache.names import clean_name
from mlxcache.store.database import store_errors
from mlxcache.store.listing import related_objects
from mlxcache.store.snapshot_format import Name
from mlxcache.wire.decode import decode

if TYPE_CHECKING:
    from mlxcache.sessions.book import ServerFiles, SessionBook
    from mlxcache.sessions.files import PromptCacheExport
    from mlxcache.store.snapshots import SnapshotExport

LIMIT, FORMAT = Number("limit", 100), Word("format", ("mlxcache", "mlx-lm"))
NAME, MODEL = Text("name"), Text("model")
PROMPT_BYTES = Number("prompt_bytes", 0, 0, http.MAX_BODY_BYTES)

RESTORE_S = 6 * 3600.0
"""Maximum seconds for a snapshot to arrive."""

SPACE_CHECK_BYTES = 64 << 20
"""Bytes after which free space is checked again, for a file of unknown size."""


class Patch(msgspec.Struct, forbid_unknown_fields=True):
    """Changes to a session. Omitted fields stay unchanged; a `name` of null removes the name."""

    name: Name | msgspec.UnsetType | None = msgspec.UNSET
    pinned: bool | msgspec.UnsetType = msgspec.UNSET


class Fork(msgspec.Struct, forbid_unknown_fields=True):
    """Name of a new session, if any, and number of tokens of the old one to keep from its start.

    If `at_tokens` is omitted, all tokens are kept.
    """

    name: Name | None = None
    at_tokens: int | None = None


def require_sessions(deps: http.Deps) -> SessionBook:
    """Return the sessions of all models. Raises as `require_model`."""
    http.require_model(deps)
    return deps.models.sessions


async def list_sessions(deps: http.Deps, request: Request) -> Response:
    """List the `?limit=` most recently used sessions, 100 by default."""
    sessions, limit = require_sessions(deps), LIMIT.read(request)
    data = [one.as_object() for one in await sessions.list(limit)]
    return http.json_response({"object": "list", "data": data})


async def show(deps: http.Deps, request: Request) -> Response:
    """Show one session with its leaves: the main conversation and those of sub-agents.

    `related` lists the sessions of the same label that belong to other models.
    """
    sessions = require_sessions(deps)
    found = await sessions.get(_id(request))
    related = related_objects(await sessions.related(found.session))
    return http.json_response({**found.as_object(leaves=True), "related": related})


async def patch(deps: http.Deps, request: Request) -> Response:
    """Rename, pin or unpin a session, and return it."""
    sessions, body = require_sessions(deps), await http.read_json(request, Patch, deps)
    name = None if body.name is msgspec.UNSET else clean_name(body.name or "")
    pinned = None if body.pinned is msgspec.UNSET else body.pinned
    changed = await sessions.patch(_id(request), name=name, pinned=pinned)
    return http.json_response(changed.as_object())


async def delete(deps: http.Deps, request: Request) -> Response:
    """Remove a session and the cached tokens that no other session uses."""
    id = _id(request)
    await require_sessions(deps).delete(id)
    return http.json_response({"id": id, "object": "session.deleted", "deleted": True})


async def fork(deps: http.Deps, request: Request) -> Response:
    """Create a session that continues from an existing one. The body may be empty."""
    sessions = require_sessions(deps)
    body = decode(Fork, await http.read_body(request, deps.settings.max_body_bytes) or b"{}")
    name = clean_name(body.name) if body.name else None
    made = await sessions.fork(_id(request), name=name, tokens=body.at_tokens)
    return http.json_response(made.as_object(), 201)


async def snapshot(deps: http.Deps, request: Request) -> Response:
    """Export a session as one file. `?format=` is `mlxcache` (the default) or `mlx-lm`."""
    id, format = _id(request), FORMAT.read(request)
    files = require_sessions(deps).files
    export = files.prompt_cache if format == "mlx-lm" else files.snapshot
    made: SnapshotExport | PromptCacheExport = await export(id)
    return StreamingResponse(
        iterate_in_threadpool(made),
        media_type="application/octet-stream",
        headers={
            "Content-Length": str(made.nbytes),
            "Content-Disposition": f'attachment; filename="{id}.safetensors"',
        },
    )


async def restore(deps: http.Deps, request: Request) -> Response:
    """Import a session from the snapshot in the body. `?name=` sets its name.

    The body may also be a prompt cache file of mlx-lm. If the file does not contain token ids, send
    its prompt in front of it, as text or a JSON list of token ids, and give the length of this
    prompt in bytes as `?prompt_bytes=`. `?model=` names the model on a server with several. Without
    it, a snapshot goes to the model with the same weights, and a prompt cache to the model that the
    file names, else to the default model.
    """
    files = await _files_for(deps, request.query_params.get(MODEL.name))
    name = clean_name(request.query_params.get(NAME.name, "")) or None
    announced = request.headers.get("content-length", "")
    folder = files.incoming(int(announced) if announced.isdecimal() else 0)
    left = PROMPT_BYTES.read(request)
    prompt = b""
    fd, path = tempfile.mkstemp(".safetensors", f"restore-{os.getpid()}-", folder)
    try:
        with store_errors(folder), os.fdopen(fd, "wb") as file:
            unchecked = SPACE_CHECK_BYTES if not announced.isdecimal() else None
            async for chunk in http.iterate_body(request, seconds=RESTORE_S):
                head, rest = chunk[:left], chunk[left:]
                prompt, left = prompt + head, left - len(head)
                if unchecked is not None and (unchecked := unchecked - len(chunk)) <= 0:
                    files.incoming(SPACE_CHECK_BYTES)
                    unchecked = SPACE_CHECK_BYTES
                await anyio.to_thread.run_sync(file.write, rest)
        text = prompt.decode(errors="replace") or None
        made = await files.restore(Path(path), name, text)
    finally:
        os.unlink(path)
    return http.json_response(made.as_object(), 201)


async def _files_for(deps: http.Deps, model: str | None) -> ServerFiles:
    """Return what imports and exports sessions of a model; of all models for None.

    Loads a model that was never loaded. Raises NotFound for an unknown name.
    """
    sessions = require_sessions(deps)
    return sessions.files if model is None else (await engine_named(deps, model)).sessions.files


def _id(request: Request) -> str:
    return str(request.path_params["id"])


ENDPOINTS = {
    "GET /v1/sessions": Operation(list_sessions, answer="List", query=(LIMIT,)),
    "POST /v1/sessions": Operation(
        restore, raw=(BINARY,), query=(NAME, PROMPT_BYTES, MODEL), status=201
    ),
    "GET /v1/sessions/{id}": Operation(show),
    "PATCH /v1/sessions/{id}": Operation(patch, Patch),
    "DELETE /v1/sessions/{id}": Operation(delete, answer="Deleted"),
    "POST /v1/sessions/{id}/fork": Operation(fork, Fork, optional=True, status=201),
    "GET /v1/sessions/{id}/snapshot": Operation(snapshot, query=(FORMAT,), types=(BINARY,)),
}
