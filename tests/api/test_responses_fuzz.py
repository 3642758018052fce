"""Valid and almost valid bodies of the Responses API get a reply or a 400, never a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.api.app import create_app
from mlxcache.types import ToolCall
from mlxcache.wire.responses_types import ITEMS
from tests.api.conftest import FakeEngine, reply
from tests.api.fake import OneModel

WORDS = st.text(max_size=6)
JUNK = st.none() | st.booleans() | st.integers() | WORDS | st.lists(st.integers(), max_size=2)
KINDS = st.sampled_from([*ITEMS, "web_search_call", "item_reference"])
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image"])},
    optional={"text": WORDS | JUNK, "refusal": WORDS | JUNK, "image_url": WORDS | JUNK},
)
TEXT = WORDS | st.lists(PARTS, max_size=3) | JUNK
ITEM = st.fixed_dictionaries(
    {"type": KINDS},
    optional={
        "role": st.sampled_from(["user", "assistant", "developer", "system"]),
        "content": TEXT,
        "summary": TEXT,
        "encrypted_content": WORDS | JUNK,
        "name": st.sampled_from(["read", "patch"]) | JUNK,
        "namespace": WORDS | JUNK,
        "call_id": WORDS | JUNK,
        "arguments": WORDS | JUNK,
        "input": WORDS | JUNK,
        "output": TEXT,
        "action": st.dictionaries(WORDS, JUNK, max_size=2) | JUNK,
        "id": WORDS,
    },
)
GRAMMAR = st.sampled_from(['start: "a"', "start: start", "(", 'start: /[/ "b"', "a|b"]) | WORDS
TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace", "web_search", "mcp"])},
    optional={
        "name": st.sampled_from(["read", "patch", "a"]) | JUNK,
        "description": WORDS | JUNK,
        "parameters": st.just({"type": "object"}) | JUNK,
        "strict": st.booleans() | JUNK,
        "tools": st.lists(st.fixed_dictionaries({"type": WORDS, "name": WORDS}), max_size=2),
        "format": st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "grammar"])},
            optional={"syntax": st.sampled_from(["lark", "regex"]), "definition": GRAMMAR},
        ),
    },
)
BODIES = st.fixed_dictionaries(
    {"input": WORDS | st.lists(ITEM, max_size=5)},
    optional={
        "instructions": WORDS | JUNK,
        "tools": st.lists(TOOL, max_size=3),
        "tool_choice": st.sampled_from(["auto", "none", "required"])
        | st.fixed_dictionaries({"type": WORDS, "name": WORDS})
        | JUNK,
        "text": st.fixed_dictionaries({}, optional={"format": TOOL}) | JUNK,
        "reasoning": st.fixed_dictionaries({}, optional={"effort": WORDS, "summary": JUNK}),
        "include": st.lists(WORDS, max_size=2),
        "metadata": st.dictionaries(WORDS, WORDS, max_size=2) | JUNK,
        "truncation": st.sampled_from(["auto", "disabled"]) | JUNK,
        "max_output_tokens": st.integers(-2, 10) | JUNK,
        "previous_response_id": st.just(None) | st.just(""),
        "stream": st.booleans(),
        "store": st.just(False),
    },
)


@settings(max_examples=100, deadline=None)
@given(body=BODIES)
def test_any_body_gets_a_reply_or_a_400(body: dict[str, Any]) -> None:
    async def post() -> httpx.Response:
        engine = FakeEngine()
        engine.script = reply("Hi", ToolCall(0, "call_1", "patch", '{"input": "x"}'))
        app = create_app(OneModel(engine))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/responses", json={"model": "m", "store": False} | body)

    response = asyncio.run(post())
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]
    elif body.get("stream"):
        last = response.text.strip().splitlines()[-1].removeprefix("data: ")
        assert json.loads(last)["type"] == "response.completed"
    else:
        assert response.json()["status"] == "completed"
