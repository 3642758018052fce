"""Computing a prefix ahead of use: a whole chat request, or tools and system prompt alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from mlxcache.api.http import new_request_id
from mlxcache.api.sse import finished_or_raise
from mlxcache.errors import BadRequest
from mlxcache.types import WARMING, Chat, Finished, Job, Prompt
from mlxcache.wire import anthropic_request, anthropic_types, openai_request
from mlxcache.wire.decode import decode
from mlxcache.wire.openai_types import ChatRequest

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine

_OPENINGS = ("0", "x")
"""Two first messages that share no character: what their prompts share is the head."""

_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


async def warm(engine: Engine, body: bytes, id: str | None = None) -> dict[str, Any]:
    """Compute the prefix that `body` describes, and say what that took.

    A chat request of either API is computed to where the reply begins, one without a message of a
    person up to where that would stand. What is no JSON object is a system prompt. Counts are in
    tokens. Raises BadRequest for a body that is neither, and what `Engine.submit` raises.
    """
    began = time.perf_counter()
    prompts = [await engine.render(chat) for chat in chats_of(body)]
    prompt = prompts[0] if len(prompts) == 1 else _shared(*prompts)
    job = Job(id or new_request_id(), prompt, max_tokens=1, raw=True, api=WARMING)
    stream = await engine.submit(job)
    last: Finished | None = None
    try:
        async for event in stream:
            last = event if isinstance(event, Finished) else last
    finally:
        await stream.aclose()
    last = finished_or_raise(last)
    return {
        "object": "cache.warmed",
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": last.cached_tokens,
        "restored_tokens": last.restored_tokens,
        "fed_tokens": last.prompt_tokens - last.cached_tokens,
        "seconds": round(time.perf_counter() - began, 3),
    }


def chats_of(body: bytes) -> list[Chat]:
    """The conversation of a request; two that differ in the first message where there is none.

    Raises BadRequest.
    """
    if not body.lstrip().startswith(b"{"):
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"A system prompt must be UTF-8: {error}.") from error
        if not text.strip():
            raise BadRequest("There is nothing to warm: the body is empty.")
        request: dict[str, Any] = {"messages": [{"role": "system", "content": text}]}
    else:
        request = decode(dict[str, Any], body)
    messages = request.get("messages") or []
    if not isinstance(messages, list):
        raise BadRequest("`messages` must be a list.", param="messages")
    if any(isinstance(m, dict) and m.get("role") not in ("system", "developer") for m in messages):
        return [_chat(request)]
    if not (messages or request.get("system") or request.get("tools")):
        raise BadRequest("There is nothing to warm: no messages, system prompt or tools.")
    return [
        _chat({**request, "messages": [*messages, {"role": "user", "content": opening}]})
        for opening in _OPENINGS
    ]


def _chat(request: dict[str, Any]) -> Chat:
    body = msgspec.json.encode(request)
    if is_anthropic(request):
        body = msgspec.json.encode({"model": "any", **request})
        return anthropic_request.to_chat(decode(anthropic_types.Conversation, body), strict=False)[
            0
        ]
    chat = decode(ChatRequest, body)
    openai_request.check(chat)
    return openai_request.to_chat(chat)


def is_anthropic(request: dict[str, Any]) -> bool:
    """Whether a chat request is one of Anthropic's API, where it can be told from OpenAI's."""
    tools = request.get("tools") or []
    if "system" in request or any(isinstance(t, dict) and "function" not in t for t in tools):
        return True
    contents = (m.get("content") for m in request["messages"] if isinstance(m, dict))
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    return any(isinstance(b, dict) and b.get("type") in _ANTHROPIC_BLOCKS for b in blocks)


def _shared(one: Prompt, other: Prompt) -> Prompt:
    """What two prompts begin with in common. Raises BadRequest where that is nothing."""
    size = min(len(one.ids), len(other.ids))
    differ = np.flatnonzero(one.ids[:size] != other.ids[:size])
    length = int(differ[0]) if len(differ) else size
    if not length:
        raise BadRequest("There is nothing to warm: the prompt has no beginning of its own.")
    return Prompt(one.ids[:length], tuple(mark for mark in one.marks if mark < length))
