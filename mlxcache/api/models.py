"""Endpoints of models: list and describe them, load and unload their weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.errors import is_anthropic_client
from mlxcache.api.http import Deps, json_response, read_number, refuse_owners, require_model
from mlxcache.errors import BadRequest, NotFound
from mlxcache.types import ModelInfo
from mlxcache.wire import anthropic_models

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine


def routes(deps: Deps) -> list[Route]:
    """Return the routes of models, in the formats of OpenAI, Anthropic and LM Studio."""
    reading = {
        "/v1/models": models,
        "/v1/models/{id:path}": model,
        "/api/v0/models": lm_studio_models,
        "/v1/api/v0/models": lm_studio_models,
        "/api/v0/models/{id:path}": lm_studio_model,
        "/v1/api/v0/models/{id:path}": lm_studio_model,
    }
    changing = {"/v1/models/{id:path}/load": load, "/v1/models/{id:path}/unload": unload}
    return [
        *(Route(path, partial(h, deps), methods=["POST"]) for path, h in changing.items()),
        *(Route(path, partial(h, deps), methods=["GET"]) for path, h in reading.items()),
    ]


async def models(deps: Deps, request: Request) -> Response:
    """List the models: in Anthropic's form for clients of its API, else in OpenAI's."""
    require_model(deps)
    if is_anthropic_client(request):
        opened = [one for one in _infos(deps) if one is not None]
        return json_response(anthropic_models.list_models(opened, empty=_is_other_page(request)))
    data = _listed(deps)
    return json_response(
        {
            "object": "list",
            "data": data,
            "has_more": False,
            "first_id": data[0]["id"],
            "last_id": data[-1]["id"],
        }
    )


def _infos(deps: Deps) -> list[ModelInfo | None]:
    """Return the description of each model of the server, the default model first.

    None stands for a model that was not loaded since the server started.
    """
    engines = deps.models.engines if deps.models is not None else [deps.engine]
    return [engine.info for engine in engines]


def _listed(deps: Deps) -> list[dict[str, Any]]:
    """Return the objects that `GET /v1/models` lists in OpenAI's form, one for each model.

    They have the fields of `describe_model` or `_unknown`, and those of `Models.describe` without
    `label`, such as `state`.
    """
    infos = _infos(deps)
    if deps.models is None:
        engine = deps.engine
        state = {"aliases": list(engine.aliases), "default": True, **(engine.residence or {})}
        return [describe_model(info) | state for info in infos if info is not None]
    return [
        (describe_model(info, state["label"]) if info is not None else _unknown(state["label"]))
        | {key: value for key, value in state.items() if key != "label"}
        for info, state in zip(infos, deps.models.describe(), strict=True)
    ]


def _unknown(label: str) -> dict[str, Any]:
    """Return the object of a model that was never loaded, with `label` as its `id`.

    It lacks the fields of `describe_model` that are not known, such as `context_length`; its
    `created` is 0 and its `state` is `never`.
    """
    return {
        "id": label,
        "object": "model",
        "created": 0,
        "owned_by": "mlxcache",
        "type": "model",
        "display_name": label,
        "state": "never",
    }


async def load(deps: Deps, request: Request) -> Response:
    """Begin to load a model's weights if they are not in memory, and describe the model.

    The answer does not wait until the weights are read. But a model that was never loaded is loaded
    before the answer, which may take minutes.
    """
    engine = await engine_named(deps, _name(request))
    await engine.load_weights()
    return json_response(_object(deps, engine))


async def unload(deps: Deps, request: Request) -> Response:
    """Drop a model's weights from memory; the next request for it reads them again.

    Answers 503 while requests for it run. On a server with several keys it is refused.
    """
    refuse_owners(
        "its models serve all of them: a model is unloaded when another one needs its memory or, "
        "with --idle-unload, after a time without requests"
    )
    engine = await engine_named(deps, _name(request), wait=False)
    if engine.state == "ready":
        await engine.unload_weights()
    return json_response(_object(deps, engine))


async def engine_named(deps: Deps, name: str, *, wait: bool = True) -> Engine:
    """Return the engine of the model with the name, id or alias `name`.

    With `wait`, a model that was never loaded is loaded first, which may take minutes and raises
    the errors of `Models.of`; without it, the engine is returned as it is. Raises NotFound for an
    unknown name, and NotReady or ModelError if the default model is not loaded.
    """
    require_model(deps)
    if deps.models is None:
        if deps.engine.info is None or name not in (deps.engine.info.id, deps.engine.label):
            raise NotFound(f"There is no model {name!r}.")
        return deps.engine
    engine = deps.models.named(name)
    return await deps.models.of(engine.label) if wait else engine


def _object(deps: Deps, engine: Engine) -> dict[str, Any]:
    known = describe_model(engine.info, engine.label) if engine.info else _unknown(engine.label)
    return known | dict(engine.residence or {})


async def model(deps: Deps, request: Request) -> Response:
    """Describe the model that serves requests with the name in the URL.

    Of a model that was never loaded only the name is known.
    """
    name = _name(request)
    info, for_anthropic = _info(deps, name), is_anthropic_client(request)
    if info is None:
        found = anthropic_models.describe_unknown(name) if for_anthropic else _unknown(name)
    else:
        describe = anthropic_models.describe_model if for_anthropic else describe_model
        found = describe(info, name)
    return json_response(found)


def _info(deps: Deps, name: str) -> ModelInfo | None:
    """Return the description of the model that serves requests with the model name `name`.

    An unknown name is served by the default model. None if the model was never loaded. Raises
    NotReady or ModelError if the default model is not loaded.
    """
    default = require_model(deps)
    return default if deps.models is None else deps.models.find(name).info


def _is_other_page(request: Request) -> bool:
    """Return whether a request for Anthropic's list of models must get an empty list.

    All models are on the first page, and all have the lifecycle `active`. So the list is empty if
    the query has `after_id` or `before_id`, or has `lifecycle` without the value `active`. Raises
    BadRequest for a `limit` that is not from 1 to 1,000.
    """
    if not 1 <= read_number(request, "limit", 20) <= 1000:
        raise BadRequest("`limit` must be from 1 to 1000.", param="limit")
    query = request.query_params
    stages = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
    others = bool(stages) and "active" not in stages
    return others or any(query.get(cursor) for cursor in ("after_id", "before_id"))


async def lm_studio_models(deps: Deps, request: Request) -> Response:
    """List the models in the format of LM Studio, except those that were never loaded.

    Source: https://lmstudio.ai/docs/developer/rest/endpoints.
    """
    require_model(deps)
    return json_response(
        {"object": "list", "data": [_lm_studio_object(one) for one in _infos(deps) if one]}
    )


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

    Lengths are in tokens: `max_context_length` is the model's own limit, `context_length` and
    `loaded_context_length` are both this server's. `sampling_defaults` maps sampling parameters to
    the values used if a request omits them. `created` is in seconds since 1970. `backend` is the
    library that runs the model. `input_modalities` lists "text", and "image" if the model accepts
    images. The argument `name` becomes the `id` of the object; None for the model's own id.
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
    """Return what a request to the model may contain: "text", and "image" if it accepts images."""
    return ["text", "image"] if info.has_images else ["text"]


def _lm_studio_object(info: ModelInfo, name: str | None = None) -> dict[str, Any]:
    """Return a model object in the format of LM Studio. Fields that are not known are null.

    `name` becomes the `id` of the object; None for the model's own id.
    """
    publisher, slash, _ = info.id.partition("/")
    return {
        "id": name or info.id,
        "object": "model",
        "type": "vlm" if info.has_images else "llm",
        "publisher": publisher if slash and publisher else "local",
        "arch": info.architecture,
        "compatibility_type": "mlx",
        "quantization": getattr(info, "quantization", None),
        "state": "loaded",
        "max_context_length": info.max_context_length,
        "loaded_context_length": info.context_length,
    }
