"""Chat requests read outside of an endpoint: detect which API they are of, convert, compare.

Recorded requests and prompts to warm are JSON without the URL path to which they were sent.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

import msgspec

from mlxcache.errors import BadRequest
from mlxcache.types import Chat
from mlxcache.utf8 import NotUtf8, decode_utf8
from mlxcache.wire import anthropic_request, anthropic_types, openai_request, responses_request
from mlxcache.wire.decode import decode
from mlxcache.wire.openai_types import ChatRequest
from mlxcache.wire.responses_types import ResponsesRequest

_RENDERED = frozenset({"messages", "system", "tools", "input", "instructions"})
_TEMPLATE_ARGS = frozenset(
    {
        *("thinking", "reasoning_effort", "enable_thinking", "chat_template_kwargs"),
        *("continue_final_message", "add_generation_prompt", "reasoning", "output_config"),
    }
)
_IMAGES = frozenset({"image", "image_url", "input_image"})
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})

_OPENINGS = ("0", "x")
"""Two user messages without a common character: their prompts share only what is before."""


def parse_chat_request(body: bytes) -> dict[str, Any]:
    """Parse a chat request of any API. Raises BadRequest if it is none."""
    request = decode(dict[str, Any], body)
    if is_responses(request):
        return request
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(
            "not a chat request: `messages` must be a list with at least one message.",
            param="messages",
        )
    return request


def is_responses(request: dict[str, Any]) -> bool:
    given = request.get("input")
    return "messages" not in request and isinstance(given, str | list) and bool(given)


def is_anthropic(request: dict[str, Any]) -> bool:
    """Return whether a request must be of Anthropic's API; OpenAI's is preferred."""
    tools = request.get("tools") or []
    if "system" in request or any(isinstance(t, dict) and "function" not in t for t in tools):
        return True
    contents = (m.get("content") for m in request["messages"] if isinstance(m, dict))
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    return any(
        isinstance(b, dict) and (b.get("type") in _ANTHROPIC_BLOCKS or "source" in b)
        for b in blocks
    )


def request_to_chat(request: dict[str, Any]) -> Chat:
    """Convert a request of any API to a chat. Images are replaced by text with their digest.

    A field of the request that OpenAI's endpoints would refuse is ignored.
    """
    return _to_chat({"model": "any", **_without_images(request)}, check=False)


def requested_model(body: bytes) -> str | None:
    """Return the model that a chat request names; None if it names none, or is no request."""
    try:
        request = decode(dict[str, Any], body)
    except BadRequest:
        return None
    model = request.get("model")
    return model if isinstance(model, str) else None


def chats_to_warm(body: bytes, *, images: bool = False) -> list[Chat]:
    """Convert the body of `POST /v1/cache/warm`: a chat request, or a system prompt as plain text.

    `images`: whether the model accepts images. A request without a message of a user gives two
    chats, each with another one added: the common beginning of their prompts is the prefix to warm.
    """
    if not body.lstrip().startswith(b"{"):
        try:
            text = decode_utf8(body)
        except NotUtf8 as error:
            raise BadRequest(f"The body {error}: expected a system prompt as text.") from error
        if not text.strip():
            raise BadRequest("There is nothing to warm: the body is empty.")
        request: dict[str, Any] = {"messages": [{"role": "system", "content": text}]}
    else:
        request = decode(dict[str, Any], body)
    key = "input" if is_responses(request) or "instructions" in request else "messages"
    messages = request.get(key) or []
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise BadRequest(f"`{key}` must be a list.", param=key)
    if any(isinstance(m, dict) and m.get("role") not in ("system", "developer") for m in messages):
        return [_to_chat(request, check=True, images=images)]
    if not any(request.get(part) for part in (key, "system", "instructions", "tools")):
        raise BadRequest("There is nothing to warm: no messages, system prompt or tools.")
    return [
        _to_chat({**request, key: [*messages, {"role": "user", "content": opening}]}, check=True)
        for opening in _OPENINGS
    ]


def _to_chat(request: dict[str, Any], *, check: bool, images: bool = False) -> Chat:
    """Convert a request of any API to a chat.

    With `check`, a field that OpenAI's endpoints would refuse raises Unsupported. One that
    Anthropic's would refuse always does.
    """
    if is_responses(request):
        return _responses_to_chat(request, check=check, images=images)
    if is_anthropic(request):
        body = msgspec.json.encode({"model": "any", **request})
        conversation = decode(anthropic_types.Conversation, body)
        return anthropic_request.to_chat(conversation, strict=False, images=images)[0]
    chat = decode(ChatRequest, msgspec.json.encode(request))
    if check:
        openai_request.check_supported(chat)
    return openai_request.to_chat(chat, images=images)


def _responses_to_chat(request: dict[str, Any], *, check: bool, images: bool) -> Chat:
    body = decode(ResponsesRequest, msgspec.json.encode(request))
    if check:
        responses_request.check_supported(body)
    talk = responses_request.Conversation(responses_request.read_input(body))
    tools = responses_request.Toolbox(body.tools or ())
    return responses_request.to_chat(body, talk, tools, images=images)


def _without_images(value: Any) -> Any:
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in _IMAGES:  # a schema may have a property of that name
            raw = msgspec.json.encode({k: v for k, v in value.items() if k != "cache_control"})
            return {"type": "text", "text": f"[image {hashlib.sha256(raw).hexdigest()[:16]}]"}
        return {key: _without_images(item) for key, item in value.items()}
    return [_without_images(item) for item in value] if isinstance(value, list) else value


def count_images(request: Any) -> int:
    if isinstance(request, dict):
        kind = request.get("type")
        if isinstance(kind, str) and kind in _IMAGES:
            return 1
        request = list(request.values())
    return sum(map(count_images, request)) if isinstance(request, list) else 0


def differences_without_effect(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of differences between two requests that do not change their prompts.

    These are fields that are not rendered, `cache_control`, and `the form of messages` if these
    differ only in the way they are written, such as a text and a list with one text.
    """
    keys = sorted({*one, *other} - _RENDERED - _TEMPLATE_ARGS)
    found = [key for key in keys if one.get(key) != other.get(key)]
    return found + _differences_in_form(one, other)


def _differences_in_form(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    pairs = [(_head(one), _head(other))]
    pairs += list(zip(_messages(one), _messages(other), strict=False))
    found: list[str] = []
    for first, second in pairs:
        if first == second:
            continue
        unmarked = _plain(first, marks_only=True), _plain(second, marks_only=True)
        if unmarked[0] == unmarked[1]:
            found.append("cache_control")
        elif _plain(first) == _plain(second):
            found.append("the form of messages")
            if _has_mark(first) != _has_mark(second):
                found.append("cache_control")
    return sorted(set(found))


def _head(request: dict[str, Any]) -> dict[str, Any]:
    return {key: request.get(key) for key in ("system", "instructions", "tools")}


def _messages(request: dict[str, Any]) -> list[Any]:
    found = request["input"] if is_responses(request) else request["messages"]
    return [found] if isinstance(found, str) else list(found)


def _has_mark(value: Any) -> bool:
    return b'"cache_control"' in msgspec.json.encode(value)


def _plain(value: Any, *, marks_only: bool = False) -> Any:
    """Return a part of a request without `cache_control`, spelled in one way for comparison."""
    if isinstance(value, list):
        items = [_plain(item, marks_only=marks_only) for item in value]
        texts = [i.get("text") for i in items if isinstance(i, dict) and i.get("type") == "text"]
        if not marks_only and len(items) == len(texts) == 1:
            return texts[0]
        return items
    if not isinstance(value, dict):
        return value
    made = {k: _plain(v, marks_only=marks_only) for k, v in value.items() if k != "cache_control"}
    arguments = made.get("arguments")
    if not marks_only and isinstance(arguments, str):
        with suppress(msgspec.DecodeError):
            made["arguments"] = msgspec.json.decode(arguments)
    return made
