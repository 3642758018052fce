"""Endpoints of the server's state: health and recent requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from mlxcache.api.http import Deps, json_response
from mlxcache.api.models import input_modalities
from mlxcache.api.operation import Number, Operation
from mlxcache.engine.metrics import reuse_of
from mlxcache.errors import NotFound
from mlxcache.types import RequestRecord

if TYPE_CHECKING:
    from mlxcache.engine.models import Models

LIMIT = Number("limit", 100)

TIMINGS = ("queue_s", "render_s", "match_s", "restore_s", "prefill_s", "first_token_s", "decode_s")


async def health(deps: Deps, request: Request) -> Response:
    """Report the server's state: status 200 only while requests can be served, otherwise 503.

    The server is `stalled` if one step of the model has taken longer than a minute, and `failed`
    also if the unloaded weights of the default model cannot be read again.
    """
    engine = deps.engine
    body: dict[str, Any] = {
        "id": deps.settings.id,
        "status": engine.state,
        "stalled_s": round(engine.silent_s, 1),
    }
    if (ranks := engine.ranks) is not None:
        body["ranks"] = ranks["others"]
    reason = engine.failure
    if engine.state == "ready" and (info := engine.info) is not None:
        reason = reason or await engine.find_obstacle()
        if engine.silent_s >= deps.settings.stalled_seconds:
            body["status"] = "stalled"
        elif reason is not None:
            body["status"] = "failed"
        else:
            named: dict[str, Any] = {"model": info.id, "backend": info.backend}
            modalities = {"input_modalities": input_modalities(info)}
            if (equal := engine.equal_passes) is not None:
                named["equal_passes"] = equal
            return json_response(body | {"status": "ok"} | named | modalities)
    if reason is not None:
        body["reason"] = reason
    response = json_response(body, 503)
    response.headers["Retry-After"] = "5"
    return response


async def requests(deps: Deps, request: Request) -> Response:
    """List the `?limit=` most recent requests, newest first; 100 by default."""
    records = deps.models.requests()[: LIMIT.read(request)]
    data = [describe_with_progress(deps.models, record) for record in records]
    return json_response({"object": "list", "data": data})


async def one_request(deps: Deps, request: Request) -> Response:
    """Describe one recent request: its tokens, its timings, and why a prefix was lost."""
    id = str(request.path_params["id"])
    record = await deps.engine.request(id)
    if record is None:
        raise NotFound(f"No recent request has the id {id!r}.")
    if (engine := deps.models.of_record(record)) is not deps.engine:
        record = await engine.request(id) or record
    return json_response(describe_with_progress(deps.models, record))


def describe_with_progress(models: Models, record: RequestRecord) -> Mapping[str, Any]:
    """Return `describe_request` with what the engine that serves the request knows of it."""
    engine = models.of_record(record)
    return describe_request(record, engine.prefill_left_s(record), engine.load_share)


def describe_request(
    record: RequestRecord, left_s: float | None = None, load_share: float | None = None
) -> Mapping[str, Any]:
    """Return the object with which `GET /v1/requests` describes a request.

    `left_s`: estimated seconds for the rest of its prefill, if known. `load_share`: progress of
    loading its model, from 0 to 1, None if that is not being loaded.
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
        "guess_source": record.guess_source,
        "guess_passes": record.guess_passes,
        "guess_saved_s": record.guess_saved_s,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "canonicalised": list(record.canonicalised),
        "timing": {name: record.timing.get(name) for name in TIMINGS},
        "lost": record.lost,
        "joined": record.joined,
        "progress": measure_progress(record, left_s, load_share=load_share),
    }


def measure_progress(
    record: RequestRecord,
    left_s: float | None = None,
    now: float | None = None,
    *,
    load_share: float | None = None,
) -> dict[str, Any] | None:
    """Return the phase of a request and its progress, or None if it has ended.

    In prefill, `done_tokens` counts the cached and the computed tokens of the prompt; in `decode`,
    the tokens of the reply, whose total is unknown. `tokens_per_s` is the reply's average so far,
    None before its second token. A request that waits for its model is in the phase `loading`,
    with `share`. `now`: seconds since 1970.
    """
    if record.status not in ("queued", "prefill", "decode"):
        return None
    loading = record.status == "queued" and load_share is not None
    done, total, speed = 0, record.prompt_tokens, None
    if record.status == "prefill":
        done = min(total, record.cached_tokens + record.fed_tokens)
    elif record.status == "decode":
        done, speed = record.generated_tokens, _speed(record, now or time.time())
    return {
        "phase": "loading" if loading else record.status,
        "done_tokens": done,
        "total_tokens": None if record.status == "decode" else total,
        "tokens_per_s": speed,
        "left_s": None if left_s is None else round(left_s, 1),
        **({"share": round(load_share or 0.0, 3)} if loading else {}),
    }


def _speed(record: RequestRecord, now: float) -> float | None:
    timing = record.timing
    if "first_token_s" not in timing or record.generated_tokens < 2:
        return None
    first_at = record.created_at + timing["first_token_s"] - timing.get("render_s", 0.0)
    return round((record.generated_tokens - 1) / max(0.001, now - first_at), 1)


ENDPOINTS = {
    "GET /health": Operation(health),
    "GET /v1/requests": Operation(requests, answer="List", query=(LIMIT,)),
    "GET /v1/requests/{id}": Operation(one_request),
}
