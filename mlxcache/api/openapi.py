"""OpenAPI document of all endpoints, generated from their operations and the types of bodies.

Source: https://spec.openapis.org/oas/v3.1.0.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache as cache_result
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mlxcache import __version__
from mlxcache.api.access import KEYLESS_PATHS
from mlxcache.api.dashboard import PAGE
from mlxcache.api.http import HEALTH, Deps, json_response
from mlxcache.api.operation import EVENTS, JSON, Operation, Schema
from mlxcache.wire import openai_types as openai

_TAGS = {
    "openai": "OpenAI",
    "responses": "OpenAI",
    "anthropic": "Anthropic",
    "models": "Models",
    "sessions": "Sessions",
    "cache": "Cache",
}
"""Group of the endpoints of a module; all others are of the group `Server`."""

_KEYLESS = KEYLESS_PATHS | {f"{PAGE}/{{name}}"}

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
_PARTS = re.compile(r"\{([a-z_]+)\}")


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


_TEXT: Schema = {"type": "string"}
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
    "Compaction": _object(
        id=_TEXT, object=_constant("response.compaction"), created_at=_COUNT, output=_LIST
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


def _body_schemas(types: Sequence[type]) -> tuple[dict[type, Schema], dict[str, Schema]]:
    """Return the schema of each of `types`, and the components of all."""
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
        values = list(openai.harmless(name))
        del properties[name]
        properties[name] = {"enum": values, UNSUPPORTED: True, "description": _REFUSED}


# -- the document ----------------------------------------------------------------------------


def build_document(endpoints: Mapping[str, Operation]) -> dict[str, Any]:
    types = [one.body for one in endpoints.values() if one.body is not None]
    bodies, components = _body_schemas(list(dict.fromkeys(types)))
    paths: dict[str, dict[str, Any]] = {}
    for name, operation in endpoints.items():
        method, path = name.replace(":path", "").split(" ")
        paths.setdefault(path, {})[method.lower()] = _describe(method, path, operation, bodies)
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


def _describe(
    method: str, path: str, operation: Operation, bodies: Mapping[type, Schema]
) -> dict[str, Any]:
    handler: Any = operation.handler
    while isinstance(handler, partial):
        handler = handler.func
    tag = _TAGS.get(handler.__module__.rpartition(".")[2], "Server")
    doc = inspect.getdoc(handler)
    if not doc:
        raise ValueError(f"the handler of {method} {path} has no docstring")
    summary, _, text = doc.partition("\n\n")
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "tags": [tag],
        "summary": " ".join(summary.split()),
        "parameters": [
            *(_parameter("path", name, _TEXT) for name in _PARTS.findall(path)),
            *(_parameter("query", one.name, one.schema) for one in operation.query),
        ],
        "responses": _responses(operation, path, tag),
    }
    if text:
        found["description"] = text.strip()
    if operation.body is not None:
        content = {JSON: {"schema": bodies[operation.body]}}
        found["requestBody"] = {"required": not operation.optional, "content": content}
    elif operation.raw:
        found["requestBody"] = {"required": True, "content": {kind: {} for kind in operation.raw}}
    if path in _KEYLESS:
        found["security"] = []
    return found


def _parameter(place: str, name: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _responses(operation: Operation, path: str, tag: str) -> dict[str, Any]:
    answer = {"$ref": f"#/components/schemas/{operation.answer}"}
    content = {kind: {"schema": answer} if kind == JSON else {} for kind in operation.types}
    found: dict[str, Any] = {
        str(operation.status): {"description": _REASONS[operation.status]}
        | ({"content": content} if content else {})
    }
    for status in operation.also:
        found[str(status)] = {"description": _REASONS[status]}
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in _errors(operation, path, tag):
        found[str(status)] = {"description": _REASONS[status], "content": error}
    return found


def _errors(operation: Operation, path: str, tag: str) -> Sequence[int]:
    found = {400, 403, 431, 500} | (set() if path in _KEYLESS else {401})
    if path == HEALTH or path not in _KEYLESS:
        found |= {503}
    if "{" in path:
        found |= {404}
    if operation.body is not None or operation.raw:
        found |= {404, 408, 413}
    if EVENTS in operation.types or tag in ("OpenAI", "Anthropic"):
        found |= {404, 429, 504, 507}
    if tag in ("Sessions", "Cache"):
        found |= {429, 504, 507}
    return sorted(found)


# -- the endpoint ----------------------------------------------------------------------------


def describe(endpoints: Mapping[str, Operation]) -> Operation:
    """Return the endpoint with the OpenAPI document of `endpoints`, to which it is then added."""
    build = cache_result(lambda: build_document(endpoints))

    async def openapi(_: Deps, request: Request) -> Response:
        """Return a description of all endpoints, as an OpenAPI 3.1 document."""
        return json_response(build())

    return Operation(openapi)
