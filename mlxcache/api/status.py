"""What the server is and does: health, models, the cache's figures, recent requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.http import Deps, json_response, serving
from mlxcache.engine.metrics import reuse_of
from mlxcache.errors import BadRequest, NotFound
from mlxcache.types import ModelInfo, RequestRecord

TIMINGS = ("queue_s", "render_s", "match_s", "restore_s", "prefill_s", "first_token_s", "decode_s")
"""The stages of a request, in order; one that it has not reached is null."""


def routes(deps: Deps) -> list[Route]:
    """The routes that tell and change nothing."""
    handlers = {
        "/health": health,
        "/v1/models": models,
        "/v1/models/{id:path}": model,
        "/api/v0/models": lm_studio_models,
        "/v1/api/v0/models": lm_studio_models,
        "/api/v0/models/{id:path}": lm_studio_model,
        "/v1/api/v0/models/{id:path}": lm_studio_model,
        "/v1/cache": cache,
        "/v1/requests": requests,
        "/v1/requests/{id}": one_request,
    }
    return [Route(path, partial(h, deps), methods=["GET"]) for path, h in handlers.items()]


async def health(deps: Deps, request: Request) -> Response:
    """200 only when the model can serve. A thread that does not move is told, and not ended."""
    engine = deps.engine
    body: dict[str, Any] = {"status": engine.state, "stalled_s": round(engine.silent_s, 1)}
    if engine.state == "ready" and engine.info is not None:
        if engine.silent_s < deps.settings.stalled_seconds:
            return json_response(body | {"status": "ok", "model": engine.info.id})
        body["status"] = "stalled"
    if engine.failure is not None:
        body["reason"] = engine.failure
    response = json_response(body, 503)
    response.headers["Retry-After"] = "5"
    return response


async def models(deps: Deps, request: Request) -> Response:
    """The one model, in a list that both OpenAI's and Anthropic's clients read."""
    info = serving(deps)
    return json_response(
        {
            "object": "list",
            "data": [model_object(info)],
            "has_more": False,
            "first_id": info.id,
            "last_id": info.id,
        }
    )


async def model(deps: Deps, request: Request) -> Response:
    """The one model, under whatever name it is asked for."""
    return json_response(model_object(serving(deps), _name(request)))


async def lm_studio_models(deps: Deps, request: Request) -> Response:
    """The list in LM Studio's shape. Source: https://lmstudio.ai/docs/developer/rest/endpoints."""
    return json_response({"object": "list", "data": [lm_studio_object(serving(deps))]})


async def lm_studio_model(deps: Deps, request: Request) -> Response:
    """The one model in LM Studio's shape, under whatever name it is asked for."""
    return json_response(lm_studio_object(serving(deps), _name(request)))


def _name(request: Request) -> str:
    name = str(request.path_params["id"])
    if not name:
        raise NotFound("A model has a name.")
    return name


def model_object(info: ModelInfo, name: str | None = None) -> dict[str, Any]:
    """A model as OpenAI, Anthropic (`type`, `display_name`) and local servers describe it.

    Lengths are in tokens: `max_context_length` is what the model was made for,
    the other two are what requests are held to. `created` is in seconds since 1970.
    """
    return {
        "id": name or info.id,
        "object": "model",
        "created": info.created,
        "owned_by": "mlxcache",
        "context_length": info.context_length,
        "max_context_length": info.max_context_length,
        "loaded_context_length": info.context_length,
        "type": "model",
        "display_name": info.id,
    }


def lm_studio_object(info: ModelInfo, name: str | None = None) -> dict[str, Any]:
    """A model as LM Studio describes it; what is not known is null."""
    publisher, slash, _ = info.id.partition("/")
    return {
        "id": name or info.id,
        "object": "model",
        "type": "llm",
        "publisher": publisher if slash and publisher else "local",
        "arch": info.architecture,
        "compatibility_type": "mlx",
        "quantization": getattr(info, "quantization", None),
        "state": "loaded",
        "max_context_length": info.max_context_length,
        "loaded_context_length": info.context_length,
    }


async def cache(deps: Deps, request: Request) -> Response:
    """The engine's figures, which wait for the disk's."""
    return json_response(await asyncio.to_thread(deps.engine.figures))


async def requests(deps: Deps, request: Request) -> Response:
    """Recent requests, newest first; `?limit=` of them, 100 unless told."""
    text = request.query_params.get("limit", "100")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise BadRequest("`limit` must be a whole number.", param="limit")
    records = deps.engine.requests()[: int(text)]
    return json_response({"object": "list", "data": [record_object(r) for r in records]})


async def one_request(deps: Deps, request: Request) -> Response:
    """What one recent request did."""
    id = str(request.path_params["id"])
    record = await deps.engine.request(id)
    if record is None:
        raise NotFound(f"No recent request has the id {id!r}.")
    return json_response(record_object(record))


def record_object(record: RequestRecord) -> Mapping[str, Any]:
    """A record as the API shows it; times are in seconds, counts in tokens."""
    computed = record.cached_tokens or record.fed_tokens
    return {
        "id": record.id,
        "object": "request",
        "session": record.session,
        "status": record.status,
        "api": record.api,
        "client": record.client,
        "created_at": record.created_at,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "restored_tokens": record.restored_tokens,
        "reuse": reuse_of(record) if computed else None,
        "fed_tokens": record.fed_tokens,
        "generated_tokens": record.generated_tokens,
        "drafted_tokens": record.drafted_tokens,
        "accepted_tokens": record.accepted_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "canonicalised": list(record.canonicalised),
        "timing": {name: record.timing.get(name) for name in TIMINGS},
        "lost": record.lost,
        "joined": record.joined,
        "progress": progress(record),
    }


def progress(record: RequestRecord, now: float | None = None) -> dict[str, Any] | None:
    """The phase of a request, and how far it is in it; None once it is over.

    `done_tokens` of `total_tokens`: those of the prompt that the cache holds, in `decode` those
    of the reply, whose number nobody knows. `tokens_per_s` is the reply's average so far, null
    before its second token. `now`: seconds since 1970.
    """
    if record.status not in ("queued", "prefill", "decode"):
        return None
    done, total, speed = 0, record.prompt_tokens, None
    if record.status == "prefill":
        done = min(total, record.cached_tokens + record.fed_tokens)
    elif record.status == "decode":
        done, speed = record.generated_tokens, _speed(record, now or time.time())
    return {
        "phase": record.status,
        "done_tokens": done,
        "total_tokens": None if record.status == "decode" else total,
        "tokens_per_s": speed,
    }


def _speed(record: RequestRecord, now: float) -> float | None:
    """Tokens per second since the first one, from the clock of the record's creation."""
    timing = record.timing
    if "first_token_s" not in timing or record.generated_tokens < 2:
        return None
    first_at = record.created_at + timing["first_token_s"] - timing.get("render_s", 0.0)
    return round((record.generated_tokens - 1) / max(0.001, now - first_at), 1)
