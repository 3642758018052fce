"""Endpoints of models: list and describe them, load and unload their weights."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.background import BackgroundTask, BackgroundTasks
from starlette.requests import Request
from starlette.responses import Response

from mlxcache.api.errors import is_anthropic_client
from mlxcache.api.http import Deps, json_response, refuse_owners, require_model
from mlxcache.api.operation import Number, Operation, Text
from mlxcache.errors import NotFound
from mlxcache.types import ModelInfo

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine


LIMIT = Number("limit", 20, most=1000)
CURSORS, LIFECYCLE = (Text("after_id"), Text("before_id")), Text("lifecycle")


async def models(deps: Deps, request: Request) -> Response:
    """List the models: in Anthropic's form for clients of its API, else in OpenAI's."""
    require_model(deps)
    LIMIT.read(request)  # all models are on one page; a wrong number is refused nevertheless
    page: dict[str, Any]
    if is_anthropic_client(request):
        infos = [] if _is_other_page(request) else _infos(deps)
        page = {"data": [_anthropic_object(info) for info in infos]}
    else:
        page = {"object": "list", "data": _listed(deps)}
    ids = [one["id"] for one in page["data"]] or [None]
    page |= {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
    return json_response(page, background=prefetching(deps))


def prefetching(deps: Deps) -> BackgroundTasks:
    """Return what follows a client's first request: its conversation is read from disk."""
    return BackgroundTasks([BackgroundTask(engine.prefetch) for engine in deps.models.engines])


def _infos(deps: Deps) -> list[ModelInfo]:
    """Return the descriptions of the models that were loaded, the default model first."""
    return [engine.info for engine in deps.models.engines if engine.info is not None]


def _listed(deps: Deps) -> list[dict[str, Any]]:
    engines = deps.models.engines
    found = []
    for engine, state in zip(engines, deps.models.describe(), strict=True):
        shown = {key: value for key, value in state.items() if key != "label"}
        name = state["label"] if len(engines) > 1 else None  # a lone model goes by its id
        info = engine.info
        known = _unknown(state["label"]) if info is None else describe_model(info, name)
        found.append(known | shown)
    return found


def _unknown(name: str) -> dict[str, Any]:
    """Return the object of a model that was never loaded: without fields that are not known."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "mlxcache",
        "type": "model",
        "display_name": name,
        "state": "never",
    }


async def load(deps: Deps, request: Request) -> Response:
    """Begin to load a model's weights if they are not in memory, and describe the model.

    The answer does not wait until the weights are read. But a model that was never loaded is loaded
    before the answer, which may take minutes.
    """
    engine = await engine_named(deps, _name(request))
    await engine.load_weights()
    return json_response(_object(engine))


async def unload(deps: Deps, request: Request) -> Response:
    """Drop a model's weights from memory; the next request for it reads them again.

    Answers 503 while requests for it run. On a server with several keys it is refused.
    """
    refuse_owners(
        "its models serve all of them: a model is unloaded when another one needs its memory or, "
        "with --idle-unload, after a time without requests"
    )
    engine = await engine_named(deps, _name(request), wait=False)
    await engine.unload_weights()
    return json_response(_object(engine))


async def engine_named(deps: Deps, name: str, *, wait: bool = True) -> Engine:
    """Return the engine of the model with the name, id or alias `name`. Raises NotFound.

    With `wait`, a model that was never loaded is loaded first, which may take minutes.
    """
    require_model(deps)
    engine = deps.models.named(name)
    return await deps.models.of(engine.label) if wait else engine


def _object(engine: Engine) -> dict[str, Any]:
    known = describe_model(engine.info, engine.label) if engine.info else _unknown(engine.label)
    return known | dict(engine.residence or {})


async def model(deps: Deps, request: Request) -> Response:
    """Describe the model that serves requests with the name in the URL.

    Of a model that was never loaded only the name is known.
    """
    name = _name(request)
    info, for_anthropic = _info(deps, name), is_anthropic_client(request)
    if info is None:
        found = _anthropic_unknown(name) if for_anthropic else _unknown(name)
    else:
        describe = _anthropic_object if for_anthropic else describe_model
        found = describe(info, name)
    return json_response(found)


def _info(deps: Deps, name: str) -> ModelInfo | None:
    """Return the description of the model that serves `name`; None if it was never loaded."""
    require_model(deps)
    return deps.models.find(name).info


def _is_other_page(request: Request) -> bool:
    """Return whether a request for Anthropic's list of models must get an empty list.

    All models are on the first page, and all have the lifecycle `active`.
    """
    query = request.query_params
    stages = [*query.getlist(LIFECYCLE.name), *query.getlist("lifecycle[]")]
    others = bool(stages) and "active" not in stages
    return others or any(query.get(cursor.name) for cursor in CURSORS)


async def lm_studio_models(deps: Deps, request: Request) -> Response:
    """List the models in the format of LM Studio, except those that were never loaded.

    Source: https://lmstudio.ai/docs/developer/rest/endpoints.
    """
    require_model(deps)
    data = [_lm_studio_object(info) for info in _infos(deps)]
    return json_response({"object": "list", "data": data})


async def lm_studio_model(deps: Deps, request: Request) -> Response:
    """Describe in the format of LM Studio the model that serves the name in the URL.

    Of a model that was never loaded only the name is known.
    """
    name = _name(request)
    info = _info(deps, name)
    if info is None:
        return json_response({"id": name, "object": "model", "state": "not-loaded"})
    return json_response(_lm_studio_object(info, name))


def _name(request: Request) -> str:
    name = str(request.path_params["id"])
    if not name:
        raise NotFound("The path must end in a model's name.")
    return name


def describe_model(info: ModelInfo, name: str | None = None) -> dict[str, Any]:
    """Return a model object with the fields of OpenAI, Anthropic and other local servers.

    Lengths are in tokens; `context_length` and `loaded_context_length` are both this server's.
    `name` becomes the `id`; None for the model's own.
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
        "backend": info.backend,
        "input_modalities": input_modalities(info),
    }


def input_modalities(info: ModelInfo) -> list[str]:
    return ["text", "image"] if info.has_images else ["text"]


def _lm_studio_object(info: ModelInfo, name: str | None = None) -> dict[str, Any]:
    publisher, slash, _ = info.id.partition("/")
    return {
        "id": name or info.id,
        "object": "model",
        "type": "vlm" if info.has_images else "llm",
        "publisher": publisher if slash and publisher else "local",
        "arch": info.architecture,
        "compatibility_type": "mlx",
        "quantization": None,
        "state": "loaded",
        "max_context_length": info.max_context_length,
        "loaded_context_length": info.context_length,
    }


# -- Anthropic's form: https://docs.anthropic.com/en/api/models-list -------------------------

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING_TYPES = ("adaptive", "between_tools", "disabled", "enabled")


def _anthropic_object(info: ModelInfo, name: str | None = None) -> dict[str, Any]:
    """Return the model object of Anthropic's API, with lengths that other local servers have.

    `max_tokens`, the longest reply, is the whole context length, without the prompt subtracted.
    """
    return {
        "id": name or info.id,
        "type": "model",
        "display_name": info.id,
        "created_at": _time(info.created),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": info.context_length,
        "max_tokens": info.context_length,
        "capabilities": _capabilities(info),
        "context_length": info.context_length,
        "max_context_length": info.max_context_length,
        "loaded_context_length": info.context_length,
    }


def _anthropic_unknown(name: str) -> dict[str, Any]:
    known = {"id": name, "type": "model", "display_name": name, "created_at": _time(0)}
    unknown = ("max_input_tokens", "max_tokens", "capabilities")
    return known | {"lifecycle": "active"} | dict.fromkeys(unknown)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _capabilities(info: ModelInfo) -> dict[str, Any]:
    thinks = info.has_thinking
    return {
        "batch": _is(False),
        "citations": _is(False),
        "code_execution": _is(False),
        "context_management": _is(
            False,
            clear_thinking_20251015=_is(False),
            clear_tool_uses_20250919=_is(False),
            compact_20260112=_is(False),
        ),
        "effort": _is(thinks, **{effort: _is(thinks) for effort in _EFFORTS}),
        "image_input": _is(info.has_images),
        "pdf_input": _is(False),
        "server_tools": _is(False, code_execution=_is(False), web_search=_is(False)),
        "structured_outputs": _is(True),
        # Every type is accepted, whatever the model.
        "thinking": _is(thinks, types={kind: _is(True) for kind in _THINKING_TYPES}),
    }


def _is(supported: bool, **more: Any) -> dict[str, Any]:
    return {"supported": supported, **more}


ENDPOINTS = {
    "POST /v1/models/{id:path}/load": Operation(load),
    "POST /v1/models/{id:path}/unload": Operation(unload),
    "GET /v1/models": Operation(models, answer="Models", query=(LIMIT, *CURSORS, LIFECYCLE)),
    "GET /v1/models/{id:path}": Operation(model),
    "GET /api/v0/models": Operation(lm_studio_models, answer="List"),
    "GET /v1/api/v0/models": Operation(lm_studio_models, answer="List"),
    "GET /api/v0/models/{id:path}": Operation(lm_studio_model),
    "GET /v1/api/v0/models/{id:path}": Operation(lm_studio_model),
}
