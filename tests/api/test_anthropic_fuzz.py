"""Valid and almost valid Messages bodies get a reply or a 400, never a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.api.app import create_app
from tests.api.conftest import FakeEngine
from tests.api.fake import OneModel

WORDS = st.text(max_size=6)
JUNK = st.none() | st.booleans() | st.integers() | WORDS | st.lists(st.integers(), max_size=2)
KINDS = [
    "text",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "tool_reference",
    "document",
    "search_result",
    "server_tool_use",
    "web_search_tool_result",
    "tool_search_tool_result",
    "compaction",
    "tool_addition",
    "tool_removal",
    "fallback",
    "image",
]
REFERENCE = st.fixed_dictionaries({"type": st.just("tool_reference"), "tool_name": WORDS})


def block_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"type": st.sampled_from(KINDS)},
        optional={
            "text": WORDS | JUNK,
            "thinking": WORDS | JUNK,
            "signature": WORDS | JUNK,
            "id": WORDS,
            "name": WORDS | JUNK,
            "input": st.dictionaries(WORDS, JUNK, max_size=2) | JUNK,
            "tool_use_id": WORDS,
            "tool_name": WORDS | JUNK,
            "content": WORDS | st.lists(inner, max_size=3) | JUNK,
            "source": st.fixed_dictionaries(
                {"type": st.sampled_from(["text", "content", "url"])},
                optional={"data": WORDS, "content": st.lists(inner, max_size=2)},
            ),
            "title": WORDS | JUNK,
            "tool": st.fixed_dictionaries({}, optional={"name": WORDS, "definition": JUNK}),
            "is_error": st.booleans() | JUNK,
            "citations": st.fixed_dictionaries({}, optional={"enabled": st.booleans()}) | JUNK,
            "cache_control": st.just({"type": "ephemeral"}) | JUNK,
        },
    )


BLOCKS = st.recursive(REFERENCE, block_of, max_leaves=4) | block_of(REFERENCE)
EFFORTS = st.sampled_from(["low", "medium", "high", "xhigh", "max", None])
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": WORDS | st.lists(BLOCKS, max_size=4),
    },
    optional={
        "clear_at": st.sampled_from(["next_user_message", "never"]),
        "output_config": st.fixed_dictionaries({}, optional={"effort": EFFORTS}),
    },
)
TOOLS = st.fixed_dictionaries(
    {},
    optional={
        "name": WORDS,
        "type": st.sampled_from(["custom", "bash_20250124", "memory_20250818", "web_search_1"]),
        "input_schema": st.just({"type": "object"}) | JUNK,
        "input_examples": st.lists(st.dictionaries(WORDS, JUNK, max_size=2), max_size=2) | JUNK,
        "allowed_callers": st.lists(st.just("direct") | WORDS, max_size=2),
        "defer_loading": st.booleans(),
        "cache_control": JUNK,
    },
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=4)},
    optional={
        "system": WORDS | st.lists(BLOCKS, max_size=2),
        "tools": st.lists(TOOLS, max_size=3),
        "thinking": st.fixed_dictionaries(
            {"type": st.sampled_from(["adaptive", "disabled", "between_tools"]) | WORDS},
            optional={"display": st.just("omitted") | WORDS},
        )
        | JUNK,
        "output_config": st.fixed_dictionaries({}, optional={"effort": EFFORTS | WORDS}),
        "context_management": st.fixed_dictionaries({}, optional={"edits": JUNK}) | JUNK,
        "max_tokens": st.integers(-1, 2),
        "tool_choice": st.fixed_dictionaries(
            {"type": st.sampled_from(["auto", "none", "any", "tool"])}, optional={"name": WORDS}
        ),
        "output_format": st.fixed_dictionaries(
            {"type": st.just("json_schema") | WORDS}, optional={"schema": JUNK}
        ),
        "stream": st.booleans(),
        "cache_control": JUNK,
        "metadata": st.dictionaries(st.just("user_id"), JUNK) | JUNK,
    },
)


@settings(max_examples=300, deadline=None)
@given(BODIES)
def test_a_body_of_real_shapes_is_answered_or_refused(body: dict[str, Any]) -> None:
    app = create_app(OneModel(FakeEngine()))  # type: ignore[arg-type]

    async def send(path: str, content: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=json.dumps(content))

    whole = {"model": "m", "max_tokens": 3} | body
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = asyncio.run(send(path, whole))
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert "event: error" not in response.text
