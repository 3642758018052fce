"""A request body of either API on its own: what it would render, and what in it changes nothing."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

import msgspec

from mlxcache.api.warm import is_anthropic
from mlxcache.errors import BadRequest
from mlxcache.types import Chat
from mlxcache.wire import anthropic_request, anthropic_types, openai_request
from mlxcache.wire.decode import decode
from mlxcache.wire.openai_types import ChatRequest

_RENDERED = frozenset({"messages", "system", "tools"})
_ARGUMENTS = frozenset({"thinking", "reasoning_effort", "enable_thinking", "chat_template_kwargs"})
_IMAGES = frozenset({"image", "image_url", "input_image"})


def read_body(body: bytes) -> dict[str, Any]:
    """The JSON object that a chat request is. Raises BadRequest for anything else."""
    request = decode(dict[str, Any], body)
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("it is no chat request: it has no `messages`.", param="messages")
    return request


def chat_of(request: dict[str, Any]) -> Chat:
    """The conversation of a request of either API, an image as a text that names its digest.

    Raises BadRequest.
    """
    request = {"model": "any", **_without_images(request)}
    body = msgspec.json.encode(request)
    if is_anthropic(request):
        return anthropic_request.to_chat(decode(anthropic_types.Conversation, body), strict=False)[
            0
        ]
    return openai_request.to_chat(decode(ChatRequest, body))


def _without_images(value: Any) -> Any:
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in _IMAGES:  # a schema may have a property of that name
            raw = msgspec.json.encode({k: v for k, v in value.items() if k != "cache_control"})
            return {"type": "text", "text": f"[image {hashlib.sha256(raw).hexdigest()[:16]}]"}
        return {key: _without_images(item) for key, item in value.items()}
    return [_without_images(item) for item in value] if isinstance(value, list) else value


def without_effect(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between two requests and changes nothing in their prompts."""
    keys = sorted({*one, *other} - _RENDERED - _ARGUMENTS)
    found = [key for key in keys if one.get(key) != other.get(key)]
    return found + _forms(one, other)


def _forms(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Of what both requests have: marks and forms in which the same was written differently."""
    pairs = [(_head(one), _head(other))]
    pairs += list(zip(one["messages"], other["messages"], strict=False))
    found: list[str] = []
    for first, second in pairs:
        if first == second:
            continue
        bare = _plain(first, marks=True), _plain(second, marks=True)
        if bare[0] == bare[1]:
            found.append("cache_control")
        elif _plain(first) == _plain(second):
            found.append("the form of messages")
            if _marked(first) != _marked(second):
                found.append("cache_control")
    return sorted(set(found))


def _head(request: dict[str, Any]) -> dict[str, Any]:
    return {key: request.get(key) for key in ("system", "tools")}


def _marked(value: Any) -> bool:
    return b'"cache_control"' in msgspec.json.encode(value)


def _plain(value: Any, *, marks: bool = False) -> Any:
    """`value` without cache_control and, unless only `marks` go, in one form: texts as strings,
    arguments as objects."""
    if isinstance(value, list):
        items = [_plain(item, marks=marks) for item in value]
        texts = [i.get("text") for i in items if isinstance(i, dict) and i.get("type") == "text"]
        if not marks and len(items) == len(texts) == 1:
            return texts[0]
        return items
    if not isinstance(value, dict):
        return value
    made = {k: _plain(v, marks=marks) for k, v in value.items() if k != "cache_control"}
    arguments = made.get("arguments")
    if not marks and isinstance(arguments, str):
        with suppress(msgspec.DecodeError):
            made["arguments"] = msgspec.json.decode(arguments)
    return made
