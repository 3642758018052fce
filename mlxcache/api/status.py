"""Endpoints of the server's state: health, models, recent requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.errors import is_anthropic_client
from mlxcache.api.http import Deps, json_response, read_number, require_model
from mlxcache.engine.metrics import reuse_of
from mlxcache.errors import BadRequest, NotFound
from mlxcache.types import ModelInfo, RequestRecord
from mlxcache.wire import anthropic_models

TIMINGS = ("queue_s", "render_s", "match_s", "restore_s", "prefill_s", "first_token_s", "decode_s")
"""Timings of a request in order, in seconds; null for a stage not reached yet."""


def routes(deps: Deps) -> list[Route]:
    """Return the routes of the server's state, all of which only read."""
    handlers = {
        "/health": health,
        "/v1/models": models,
        "/v1/models/{id:path}": model,
        "/api/v0/models": lm_studio_models,
        "/v1/api/v0/models": lm_studio_models,
        "/api/v0/models/{id:path}": lm_studio_model,
        "/v1/api/v0/models/{id:path}": lm_studio_model,
        "/v1/requests": requests,
        "/v1/requests/{id}": one_request,
    }
    return [Route(path, partial(h, deps), methods=["GET"]) for path, h in handlers.items()]


async def health(deps: Deps, request: Request) -> Response:
    """Report the server's state: status 200 only while requests can be served, otherwise 503.

    The server is `stalled` if one step of the model has taken longer than a minute.
    """
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
    """List the served model: in Anthropic's format for its clients, otherwise in OpenAI's.

    Both formats have additional fields of other local servers.
    """
    info = require_model(deps)
    if is_anthropic_client(request):
        return json_response(anthropic_models.list_models(info, empty=_is_other_page(request)))
    return json_response(
        {
            "object": "list",
            "data": [describe_model(info)],
            "has_more": False,
            "first_id": info.id,
            "last_id": info.id,
        }
    )


async def model(deps: Deps, request: Request) -> Response:
    """Describe the served model, whatever name is in the URL."""
    describe = anthropic_models.describe_model if is_anthropic_client(request) else describe_model
    return json_response(describe(require_model(deps), _name(request)))


def _is_other_page(request: Request) -> bool:
    """Return whether a request for Anthropic's list of models asks for a page without models.

    The one served model is on the first page, among the active ones. Raises BadRequest for a
    `limit` that is not from 1 to 1,000.
    """
    if not 1 <= read_number(request, "limit", 20) <= 1000:
        raise BadRequest("`limit` must be from 1 to 1000.", param="limit")
    query = request.query_params
    stages = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
    others = bool(stages) and "active" not in stages
    return others or any(query.get(cursor) for cursor in ("after_id", "before_id"))


async def lm_studio_models(deps: Deps, request: Request) -> Response:
    """List the served model in the format of LM Studio.

    Source: https://lmstudio.ai/docs/developer/rest/endpoints.
    """
    return json_response({"object": "list", "data": [_lm_studio_object(require_model(deps))]})


async def lm_studio_model(deps: Deps, request: Request) -> Response:
    """Describe the served model in the format of LM Studio, whatever name is in the URL."""
    return json_response(_lm_studio_object(require_model(deps), _name(request)))


def _name(request: Request) -> str:
    name = str(request.path_params["id"])
    if not name:
        raise NotFound("The path must end in a model's name.")
    return name


def describe_model(info: ModelInfo, name: str | None = None) -> dict[str, Any]:
    """Return a model object with the fields of OpenAI, Anthropic and other local servers.

    Lengths are in tokens: `max_context_length` is the model's own limit, `context_length` and
    `loaded_context_length` are both this server's. `sampling_defaults` apply if a request omits the
    field. `created` is in seconds since 1970. `name` replaces the model's id.
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
        "sampling_defaults": dict(info.sampling),
    }


def _lm_studio_object(info: ModelInfo, name: str | None = None) -> dict[str, Any]:
    """Return a model object in the format of LM Studio. Fields that are not known are null.

    `name` replaces the model's id.
    """
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


async def requests(deps: Deps, request: Request) -> Response:
    """List the `?limit=` most recent requests, newest first; 100 by default."""
    records = deps.engine.requests()[: read_number(request, "limit", 100)]
    return json_response({"object": "list", "data": [_described(deps, r) for r in records]})


async def one_request(deps: Deps, request: Request) -> Response:
    """Show one recent request: its tokens, timings, and why part of its prefix was not reused."""
    id = str(request.path_params["id"])
    record = await deps.engine.request(id)
    if record is None:
        raise NotFound(f"No recent request has the id {id!r}.")
    return json_response(_described(deps, record))


def _described(deps: Deps, record: RequestRecord) -> Mapping[str, Any]:
    return describe_request(record, deps.engine_of(record).prefill_left_s(record))


def describe_request(record: RequestRecord, left_s: float | None = None) -> Mapping[str, Any]:
    """Return the object with which `GET /v1/requests` describes a request.

    Times are in seconds, counts in tokens. `left_s` is the estimated time for the rest of its
    prefill, None if it is not in prefill.
    """
    computed = record.cached_tokens or record.fed_tokens
    return {
        "id": record.id,
        "object": "request",
        "model": record.model,
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
        "progress": measure_progress(record, left_s),
    }


def measure_progress(
    record: RequestRecord, left_s: float | None = None, now: float | None = None
) -> dict[str, Any] | None:
    """Return the phase of a request and its progress, or None if it has ended.

    The keys are `phase`, `done_tokens`, `total_tokens`, `tokens_per_s` and `left_s`. In prefill,
    `done_tokens` counts the cached and the computed tokens of the prompt, and `total_tokens` all of
    it. In `decode`, `done_tokens` counts tokens of the reply, and the total is None because it is
    unknown. `tokens_per_s` is the reply's average so far, None before its second token. `left_s` is
    the estimated rest of the prefill in seconds. `now` is in seconds since 1970.
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
        "left_s": None if left_s is None else round(left_s, 1),
    }


def _speed(record: RequestRecord, now: float) -> float | None:
    """Return the reply's tokens per second since its first token; None before the second.

    `now` is in seconds since 1970.
    """
    timing = record.timing
    if "first_token_s" not in timing or record.generated_tokens < 2:
        return None
    first_at = record.created_at + timing["first_token_s"] - timing.get("render_s", 0.0)
    return round((record.generated_tokens - 1) / max(0.001, now - first_at), 1)
