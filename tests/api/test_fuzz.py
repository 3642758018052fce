"""Any body gets a reply or a 400, never a 500."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.api.app import create_app
from mlxcache.types import ToolCall
from tests.api.fake import FakeEngine, OneModel, reply
from tests.api.test_responses import FakeBook
from tests.wire.anthropic_bodies import FORMAT, MARK, assistant, result, text, tool, use, user

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PATHS = (CHAT, TEXT, MESSAGES, COUNT, RESPONSES)
HI = [{"role": "user", "content": [{"type": "text", "text": "Hi \ud83d\ude00"}]}]
GOOD = {"model": "m", "max_tokens": 5, "prompt": "Hi", "messages": HI}

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
DOCUMENT = {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}}
ADDED = {"type": "tool_definition", "definition": tool("New")}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}

PARTS: dict[str, list[Any]] = {
    CHAT: [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [text("a"), text("b")], "name": "ann"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "why",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{"}},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ],
    MESSAGES: [
        user("a", text("b", **MARK)),
        user(result([text("r")], is_error=True), "go on"),
        user(result([{"type": "tool_reference", "tool_name": "Memo"}])),
        user(
            DOCUMENT, {"type": "search_result", "title": "T", "source": "u", "content": [text("x")]}
        ),
        user({"type": "document", "source": {"type": "content", "content": [text("x")]}}),
        user({"type": "image", "source": {"type": "base64", "data": "eA=="}}),
        assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, "So.", use(path="x")),
        assistant({"type": "redacted_thinking", "data": "x"}, text("b", citations=[{"a": 1}])),
        assistant(
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "T"}]},
            {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {"a": []}},
            {"type": "compaction", "content": "short"},
            {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        ),
        {"role": "system", "content": [{"type": "tool_addition", "tool": ADDED}]},
        {
            "role": "system",
            "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "A"}}],
            "clear_at": "next_user_message",
            "output_config": {"effort": "low"},
        },
    ],
    RESPONSES: [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "reasoning", "summary": [{"text": "x"}], "content": [{"text": "Hm."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "function_call", "call_id": "1", "name": "read", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "spawn", "namespace": "agents"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text"}]},
        {"type": "custom_tool_call", "call_id": "3", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "ok"},
        {"type": "local_shell_call", "call_id": "4", "action": {"command": ["ls"]}},
        {"type": "web_search_call", "id": "ws"},
    ],
}
"""Messages or items of which a body has some."""

FIELDS: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "stream": [True],
        "stream_options": [{"include_usage": True}],
        "tools": [[FUNCTION], []],
        "tool_choice": ["auto", "none", "required", {"type": "auto"}],
        "stop": [["."], "."],
        "temperature": [0.5],
        "top_p": [0.5],
        "top_k": [5],
        "seed": [7],
        "n": [1, 2],
        "logit_bias": [{"5": 1.5}],
        "logprobs": [True],
        "thinking": [{"type": "disabled"}],
        "reasoning": [{"effort": "low"}],
        "chat_template_kwargs": [{"enable_thinking": True}],
        "response_format": [
            {"type": "text"},
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        ],
        "structured_outputs": [{"regex": "a"}, {"choice": ["a"]}, {"json": "{}"}],
    },
    MESSAGES: {
        "stream": [True],
        "system": ["S", [text("x", **MARK)]],
        "tools": [
            [tool("A", input_examples=[{"path": "a"}]), tool("Memo", defer_loading=True)],
            [{"type": "bash_20250124", "name": "bash"}, tool("B", allowed_callers=["direct"])],
        ],
        "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "A"}],
        "thinking": [{"type": "adaptive", "display": "omitted"}, {"type": "between_tools"}],
        "output_config": [{"effort": "low"}, {"format": FORMAT}],
        "output_format": [FORMAT],
        "context_management": [{"edits": [{"type": "clear_tool_uses_20250919"}]}],
        "stop_sequences": [["."]],
        "cache_control": [{"type": "ephemeral"}],
        "metadata": [{"user_id": "x"}],
        "max_tokens": [0, 1],
    },
    RESPONSES: {
        "stream": [True],
        "instructions": ["Be brief."],
        "tools": [
            [
                {"type": "function", "name": "read", "parameters": SCHEMA, "strict": True},
                {
                    "type": "namespace",
                    "name": "agents",
                    "tools": [{"type": "function", "name": "s"}],
                },
                {"type": "custom", "name": "patch", "description": "P.", "format": LARK},
                {"type": "web_search"},
            ],
        ],
        "tool_choice": ["auto", "none", "required", {"type": "function", "name": "read"}],
        "text": [{"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}],
        "reasoning": [{"effort": "low", "summary": "auto"}],
        "include": [["reasoning.encrypted_content"]],
        "metadata": [{"a": "b"}],
        "truncation": ["auto"],
        "max_output_tokens": [5, -1],
        "previous_response_id": [None, ""],
    },
}
"""Valid values of further fields."""

texts = st.text(max_size=8)
numbers = st.integers() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, width=32)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers.filter(lambda n: abs(n) != float("inf")) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """List every container in `value` with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    here = [(value, key) for key, _ in pairs]
    children = [value[key] for _, key in here]
    return here + [p for c in children if isinstance(c, dict | list) for p in places(c)]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """Draw a body of valid parts; at most three values are replaced, moved or removed."""
    kind = {TEXT: CHAT, COUNT: MESSAGES}.get(path, path)
    parts = draw(st.lists(st.sampled_from(PARTS[kind]), min_size=1, max_size=4))
    more = {name: st.sampled_from(found) for name, found in FIELDS[kind].items()}
    body = {"model": "m", "max_tokens": 3} | draw(st.fixed_dictionaries({}, optional=more))
    if path == TEXT:
        body["prompt"] = draw(st.sampled_from(["a b", [1, 2], ["a", "b"], [[1], [2]]]))
    body["store" if kind == RESPONSES else "user"] = False if kind == RESPONSES else "x"
    body["input" if kind == RESPONSES else "messages"] = parts
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(0, 3))):
        if not (targets := places(body)):
            break
        container, key = draw(st.sampled_from(targets))
        other, at = draw(st.sampled_from(targets))
        change = draw(st.sampled_from(["replace", "move", "remove"]))
        if change == "remove":
            del container[key]
        else:
            container[key] = copy.deepcopy(other[at]) if change == "move" else draw(values)
    return body


def good(path: str) -> dict[str, Any]:
    return {"model": "m", "input": "Hi \ud83d\ude00"} if path == RESPONSES else GOOD


def post(path: str, content: bytes) -> httpx.Response:
    """Send one request to a new application."""
    engine = FakeEngine()
    engine.book = engine.sessions = FakeBook()
    engine.script = reply("Hi", ToolCall(0, "call_1", "patch", '{"input": "x"}'))
    app = create_app(OneModel(engine))  # type: ignore[arg-type]

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=content)

    return asyncio.run(send())


def check(path: str, content: bytes) -> None:
    """Check for a whole reply, or a 400 in the shape of the path's API."""
    response = post(path, content)
    assert response.headers["x-mlxcache-request"].startswith("req_")
    assert response.status_code in (200, 400), (response.text, content)
    if response.status_code == 200:
        for failure in ('"server_error"', '"api_error"', "response.failed"):
            assert failure not in response.text
        return
    error = response.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert ("param" in error) == (not path.startswith(MESSAGES))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_body_that_is_nearly_right(path: str, data: st.DataObject) -> None:
    check(path, json.dumps(data.draw(bodies(path))).encode())


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, deadline=None)
@given(values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=64))
def test_anything_at_all(path: str, content: bytes) -> None:
    check(path, content)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_one_wrong_byte_in_a_good_body(path: str, at: int, byte: int) -> None:
    body = bytearray(json.dumps(good(path)).encode())
    body[at % len(body)] = byte
    check(path, bytes(body))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model":"m","max_tokens":1e999,"messages":[]}',
        b'{"model":"m","max_tokens":1' + b"0" * 5000 + b',"messages":[]}',
        b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","max_tokens":NaN,"messages":[{"role":"user","content":"a"}]}',
        b'\xef\xbb\xbf{"model":"m"}',
    ],
    ids=lambda content: repr(content[:16]),
)
def test_what_cannot_be_right_is_a_400(path: str, content: bytes) -> None:
    assert post(path, content).status_code == 400
    check(path, content)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_id_of_five_thousand_digits_is_a_400(path: str) -> None:
    assert post(path, json.dumps(GOOD | {"logit_bias": {"9" * 5000: 1}}).encode()).is_client_error


@pytest.mark.parametrize("path", PATHS)
def test_half_an_emoji_is_served(path: str) -> None:
    """JavaScript clients send it where they cut a text inside one."""
    body = json.dumps(good(path)).replace("\\ude00", "")
    assert "\\ud83d" in body
    assert post(path, body.encode()).status_code == 200
