"""OpenAPI document of all endpoints, generated from the routes and the types of their bodies.

Source: https://spec.openapis.org/oas/v3.1.0.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as cache_result
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlxcache import __version__
from mlxcache.api import cache, sessions
from mlxcache.api.http import HEALTH, json_response
from mlxcache.wire import anthropic_types as anthropic
from mlxcache.wire import openai_types as openai
from mlxcache.wire import responses_types as responses

PATH = "/openapi.json"

Schema = dict[str, Any]

JSON, EVENTS, BINARY = "application/json", "text/event-stream", "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """Description of one endpoint, besides its path and its handler's docstring.

    `optional`: the body may be empty. `raw`: content types of a body that is not, or not always,
    JSON. `answer`: schema of its JSON response, `types` the content types. `also`: further statuses
    that are not errors.
    """

    body: type[msgspec.Struct] | None = None
    answer: str = "Object"
    optional: bool = False
    raw: tuple[str, ...] = ()
    query: Mapping[str, Schema] | None = None
    types: tuple[str, ...] = (JSON,)
    status: int = 200
    also: tuple[int, ...] = ()


def _number(default: int, least: int = 0, most: int = 2**63 - 1) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "default": default}


def _words(*values: str, default: str | None = None) -> Schema:
    return {"type": "string", "enum": list(values)} | ({"default": default} if default else {})


_TEXT: Schema = {"type": "string"}
_LIMIT = {"limit": _number(100, 1)}
_ITEMS = {
    "limit": _number(20, 1, 100),
    "order": _words("asc", "desc", default="desc"),
    "after": _TEXT,
}
_MODELS = {
    "limit": _number(20, 1, 1000),
    "after_id": _TEXT,
    "before_id": _TEXT,
    "lifecycle": _TEXT,
}
_TREE = {
    "limit": _number(sessions.DEFAULT_SESSIONS, 1, cache.MAX_SESSIONS),
    "nodes": _number(cache.DEFAULT_NODES, 1, cache.MAX_NODES),
}
_SNAPSHOT = {"format": _words("mlxcache", "mlx-lm", default="mlxcache")}
_RESTORED = {"name": _TEXT, "prompt_bytes": _number(0), "model": _TEXT}
_CHAT = (JSON, EVENTS)
_PAGE = Operation(types=("text/html",), also=(304,))

OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/chat/completions": Operation(openai.ChatRequest, "ChatCompletion", types=_CHAT),
    "POST /v1/completions": Operation(openai.TextRequest, "TextCompletion", types=_CHAT),
    "POST /v1/responses": Operation(responses.ResponsesRequest, "Response", types=_CHAT),
    "POST /v1/responses/input_tokens": Operation(responses.ResponsesRequest, "InputTokens"),
    "GET /v1/responses/{id}": Operation(
        None, "Response", query={"stream": _words("true", "false")}
    ),
    "DELETE /v1/responses/{id}": Operation(answer="Deleted"),
    "POST /v1/responses/{id}/cancel": Operation(answer="Response"),
    "GET /v1/responses/{id}/input_items": Operation(answer="List", query=_ITEMS),
    "POST /v1/messages": Operation(anthropic.Request, "Message", types=_CHAT),
    "POST /v1/messages/count_tokens": Operation(anthropic.Conversation, "InputTokens"),
    "GET /v1/models": Operation(answer="Models", query=_MODELS),
    "POST /v1/models/{id}/load": Operation(),
    "POST /v1/models/{id}/unload": Operation(),
    "GET /api/v0/models": Operation(answer="List"),
    "GET /v1/api/v0/models": Operation(answer="List"),
    "GET /v1/sessions": Operation(answer="List", query=_LIMIT),
    "POST /v1/sessions": Operation(raw=(BINARY,), query=_RESTORED, status=201),
    "PATCH /v1/sessions/{id}": Operation(sessions.Patch),
    "DELETE /v1/sessions/{id}": Operation(answer="Deleted"),
    "POST /v1/sessions/{id}/fork": Operation(sessions.Fork, optional=True, status=201),
    "GET /v1/sessions/{id}/snapshot": Operation(query=_SNAPSHOT, types=(BINARY,)),
    "DELETE /v1/cache": Operation(query={"pinned": _words("true", "false")}),
    "POST /v1/cache/warm": Operation(raw=(JSON, "text/plain")),
    "GET /v1/cache/tree": Operation(query=_TREE),
    "POST /v1/cache/prune": Operation(query={"limit_bytes": _number(0)}),
    "GET /v1/requests": Operation(answer="List", query=_LIMIT),
    "GET /v1/live": Operation(query={"parts": _TEXT}, types=(EVENTS,)),
    "GET /v1/trace": Operation(types=(EVENTS,)),
    "GET /metrics": Operation(types=("text/plain",)),
    "GET /": Operation(types=(), status=307),
    "GET /dashboard": _PAGE,
    "GET /dashboard/{name}": Operation(types=("*/*",), also=(304,)),
    "GET /docs": _PAGE,
}
"""What is to be said of an endpoint, as `METHOD PATH`. A GET or DELETE may have no entry."""

_TAGS = {
    "openai": "OpenAI",
    "responses": "OpenAI",
    "anthropic": "Anthropic",
    "models": "Models",
    "sessions": "Sessions",
    "cache": "Cache",
}
"""Group of the endpoints of a module; all others are of the group `Server`."""

_PUBLIC_PATHS = ("/", "/dashboard", "/dashboard/{name}", "/docs", HEALTH, PATH)
_PUBLIC = frozenset(f"GET {path}" for path in _PUBLIC_PATHS)
"""Endpoints that need no key."""

_REASONS = {
    200: "Success.",
    201: "Created.",
    304: "Not modified.",
    307: "Redirect to the dashboard.",
    400: "The request is malformed, contradicts itself, or needs something that is not supported.",
    401: "The key is missing or wrong.",
    403: "Refused for this origin, host or key.",
    404: "Not found.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait; `Retry-After` says when to try again.",
    431: "The headers are too large.",
    500: "The server failed; its log says why.",
    503: "Not ready, stopping, or busy; `Retry-After` says when to try again.",
    504: "The time limit of the request passed.",
    507: "The disk is full.",
}

UNSUPPORTED = "x-unsupported"
"""Key in the schema of a field that the server refuses."""

_REFUSED = "Not supported: using it is a 400, unless its value has no effect."
_MODULE = re.compile(rb"mlxcache\.wire\.([a-z]+)_types\.")
_PARTS = re.compile(r"\{([a-z_]+)(?::path)?\}")


# -- schemas ---------------------------------------------------------------------------------


def _object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _completion(kind: str) -> Schema:
    return _object(
        id=_TEXT,
        object=_constant(kind),
        created=_COUNT,
        model=_TEXT,
        choices=_LIST,
        usage=_object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
    )


def _constant(value: str) -> Schema:
    return {"type": "string", "const": value}


_COUNT: Schema = {"type": "integer", "minimum": 0}
_LIST: Schema = {"type": "array", "items": {"type": "object"}}
_OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}

_ANSWERS: Mapping[str, Schema] = {
    "Object": {"type": "object"},
    "List": _object(object=_constant("list"), data=_LIST),
    "Models": _object(data=_LIST),
    "Deleted": _object(id=_TEXT, object=_TEXT, deleted={"const": True}),
    "InputTokens": _object(input_tokens=_COUNT),
    "ChatCompletion": _completion("chat.completion"),
    "TextCompletion": _completion("text_completion"),
    "Response": _object(
        id=_TEXT,
        object=_constant("response"),
        status=_TEXT,
        model=_TEXT,
        output=_LIST,
        metadata={"type": "object"},
    ),
    "Message": _object(
        id=_TEXT,
        type=_constant("message"),
        role=_constant("assistant"),
        content=_LIST,
        stop_reason=_TEXT,
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "Error": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_OPTIONAL_TEXT, code=_OPTIONAL_TEXT)
        | {"required": ["message", "type"]}
    ),
}


def _body_schemas() -> tuple[dict[type, Schema], dict[str, Schema]]:
    """Return the schema of each type in `Operation.body`, and the components of all."""
    types = list(dict.fromkeys(one.body for one in OPERATIONS.values() if one.body is not None))
    template = "#/components/schemas/{name}"
    schemas, components = msgspec.json.schema_components(types, ref_template=template)
    named = msgspec.json.encode([*schemas, components])
    both = msgspec.json.decode(_MODULE.sub(rb"\1.", named))  # such as `openai.Tool`
    for type in types:
        if issubclass(type, openai.UnsupportedFields):
            _mark_unsupported(both[-1][type.__name__], own=type.__annotations__)
    return dict(zip(types, both, strict=False)), both[-1]


def _mark_unsupported(schema: Schema, own: Mapping[str, Any]) -> None:
    """Mark the fields that the server refuses, and move them after the others.

    `own`: fields that the type of the body defines itself because it supports them.
    """
    properties: dict[str, Schema] = schema["properties"]
    for name in openai.UnsupportedFields.__struct_fields__:
        if name in own:
            continue
        properties[name] = properties.pop(name) | {UNSUPPORTED: True, "description": _REFUSED}


# -- the document ----------------------------------------------------------------------------


def build_document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    bodies, components = _body_schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route):
            path = route.path.replace(":path", "")
            method = next(m for m in sorted(route.methods or ()) if m != "HEAD")
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, route, bodies)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlxcache",
            "version": __version__,
            "description": "Session server for local coding agents on mlx-lm.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, **_ANSWERS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(
    method: str, path: str, route: Route, bodies: Mapping[type, Schema]
) -> dict[str, Any]:
    name = f"{method} {path}"
    if name not in OPERATIONS and method not in ("GET", "DELETE"):
        raise ValueError(f"{name} has no entry in OPERATIONS")
    operation = OPERATIONS.get(name, Operation())
    handler = route.endpoint
    while isinstance(handler, partial):
        handler = handler.func
    tag = _TAGS.get(handler.__module__.rpartition(".")[2], "Server")
    doc = inspect.getdoc(handler)
    if not doc:
        raise ValueError(f"the handler of {name} has no docstring")
    summary, _, text = doc.partition("\n\n")
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "tags": [tag],
        "summary": " ".join(summary.split()),
        "parameters": [
            *(_parameter("path", name, _TEXT) for name in _PARTS.findall(path)),
            *(_parameter("query", *query) for query in (operation.query or {}).items()),
        ],
        "responses": _responses(operation, name, tag),
    }
    if text:
        found["description"] = text.strip()
    if operation.body is not None:
        content = {JSON: {"schema": bodies[operation.body]}}
        found["requestBody"] = {"required": not operation.optional, "content": content}
    elif operation.raw:
        found["requestBody"] = {"required": True, "content": {kind: {} for kind in operation.raw}}
    if name in _PUBLIC:
        found["security"] = []
    return found


def _parameter(place: str, name: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _responses(operation: Operation, name: str, tag: str) -> dict[str, Any]:
    answer = {"$ref": f"#/components/schemas/{operation.answer}"}
    content = {kind: {"schema": answer} if kind == JSON else {} for kind in operation.types}
    found: dict[str, Any] = {
        str(operation.status): {"description": _REASONS[operation.status]}
        | ({"content": content} if content else {})
    }
    for status in operation.also:
        found[str(status)] = {"description": _REASONS[status]}
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in _errors(operation, name, tag):
        found[str(status)] = {"description": _REASONS[status], "content": error}
    return found


def _errors(operation: Operation, name: str, tag: str) -> Sequence[int]:
    found = {400, 403, 431, 500} | (set() if name in _PUBLIC else {401, 503})
    if name == "GET /health":
        found |= {503}
    if "{" in name:
        found |= {404}
    if operation.body is not None or operation.raw:
        found |= {404, 408, 413}
    if EVENTS in operation.types or tag in ("OpenAI", "Anthropic"):
        found |= {404, 429, 504, 507}
    if tag in ("Sessions", "Cache"):
        found |= {429, 504, 507}
    return sorted(found)


# -- routes ----------------------------------------------------------------------------------


def describe(routes: Sequence[BaseRoute]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint with the OpenAPI document of `routes`, which include it."""
    build = cache_result(lambda: build_document(routes))

    async def openapi(_: Request) -> Response:
        """Return a description of all endpoints, as an OpenAPI 3.1 document."""
        return json_response(build())

    return openapi
