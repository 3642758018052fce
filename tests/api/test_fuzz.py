"""Any body gets a reply or a 400, never a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.api.app import create_app
from tests.api.conftest import FakeEngine
from tests.api.fake import OneModel

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"]

texts = st.text(max_size=8)
numbers = st.one_of(
    st.integers(),
    st.integers(min_value=-(10**40), max_value=10**40),
    st.floats(allow_nan=False, allow_infinity=False),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


cache_control = st.just({"type": "ephemeral"})
parts = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.fixed_dictionaries(
        {"type": st.just("text"), "text": texts}, optional={"cache_control": cache_control}
    ),
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.just({"url": "x"})}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts, "signature": texts}),
    st.fixed_dictionaries(
        {
            "type": st.just("tool_use"),
            "id": texts,
            "name": texts,
            "input": st.dictionaries(texts, scalars, max_size=2),
        }
    ),
    st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": texts, "content": texts}),
)
calls = st.fixed_dictionaries(
    {
        "id": texts,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.just("f"), "arguments": texts}),
    }
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "user", "assistant", "system", "tool"]),
        "content": st.one_of(texts, st.lists(parts, min_size=1, max_size=3)),
    },
    optional={
        "name": texts,
        "tool_calls": st.lists(calls, max_size=2),
        "tool_call_id": texts,
        "reasoning_content": texts,
    },
)
schema = st.fixed_dictionaries(
    {"type": st.just("object")}, optional={"properties": st.dictionaries(texts, values)}
)
openai_tools = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.just("f")}, optional={"parameters": schema}),
    }
)
anthropic_tools = st.fixed_dictionaries(
    {"name": st.just("f"), "input_schema": schema},
    optional={"description": texts, "defer_loading": st.booleans()},
)
good_bodies = st.fixed_dictionaries(
    {
        "messages": st.lists(messages, min_size=1, max_size=4),
        "max_tokens": st.integers(1, 9),
        "model": st.just("m"),
        "prompt": st.one_of(st.just("a b"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    },
    optional={
        "system": st.one_of(texts, st.just([{"type": "text", "text": "x"}])),
        "stream": st.booleans(),
        "tools": st.lists(st.one_of(openai_tools, anthropic_tools), max_size=2),
        "tool_choice": st.sampled_from(["auto", "none", {"type": "auto"}, {"type": "any"}]),
        "stop": st.lists(st.just("."), max_size=2),
        "stop_sequences": st.lists(st.just("."), max_size=2),
        "temperature": st.floats(0, 1),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(0, 9),
        "seed": st.integers(),
        "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-9, 9)),
        "n": st.just(1),
        "metadata": st.fixed_dictionaries({"user_id": texts}),
        "thinking": st.just({"type": "disabled"}),
        "stream_options": st.just({"include_usage": True}),
        "chat_template_kwargs": st.just({"enable_thinking": True}),
        "response_format": st.one_of(
            st.just({"type": "text"}),
            schema.map(lambda s: {"type": "json_schema", "json_schema": {"schema": s}}),
        ),
        "structured_outputs": st.sampled_from([{"regex": "a"}, {"choice": ["a"]}, {"json": "{}"}]),
        "context_management": values,
        "output_config": st.one_of(
            st.just({"effort": "low"}),
            schema.map(lambda s: {"format": {"type": "json_schema", "schema": s}}),
        ),
    },
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """List every container in `value` with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    here = [(value, key) for key, _ in pairs]
    children = [value[key] for _, key in here]
    return here + [p for c in children if isinstance(c, dict | list) for p in places(c)]


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """Draw a valid body with at most two values replaced or removed."""
    body = json.loads(json.dumps(draw(good_bodies)))
    for _ in range(draw(st.integers(0, 2))):
        if not (targets := places(body)):
            break
        container, key = draw(st.sampled_from(targets))
        if draw(st.booleans()):
            container[key] = draw(values)
        else:
            del container[key]
    return body


def post(path: str, content: bytes) -> httpx.Response:
    """Send one request to a new application."""
    app = create_app(OneModel(FakeEngine()))  # type: ignore[arg-type]

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=content)

    return asyncio.run(send())


def check(path: str, content: bytes) -> None:
    """Check for a reply, or a 400 in the shape of the path's API."""
    response = post(path, content)
    assert response.headers["x-mlxcache-request"].startswith("req_")
    assert response.status_code in (200, 400), (response.text, content)
    if response.status_code == 200:
        assert '"server_error"' not in response.text
        assert '"api_error"' not in response.text
        return
    body = response.json()
    assert body["error"]["message"]
    assert ("param" in body["error"]) == (not path.startswith("/v1/messages"))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=120, deadline=None)
@given(bodies())
def test_a_body_that_is_nearly_right(path: str, body: dict[str, Any]) -> None:
    check(path, json.dumps(body).encode())


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=25, deadline=None)
@given(values)
def test_any_json_value(path: str, value: Any) -> None:
    check(path, json.dumps(value).encode())


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=64))
def test_binary_garbage(path: str, content: bytes) -> None:
    check(path, content)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_one_wrong_byte_in_a_good_body(path: str, at: int, byte: int) -> None:
    body = bytearray(json.dumps(GOOD).encode())
    body[at % len(body)] = byte
    check(path, bytes(body))


GOOD = {
    "model": "m",
    "max_tokens": 5,
    "prompt": "Hi",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi \ud83d\ude00"}]}],
}


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


@pytest.mark.parametrize("path", PATHS)
def test_half_an_emoji_is_served(path: str) -> None:
    body = json.dumps(GOOD).replace("\\ude00", "")
    assert "\\ud83d" in body
    assert post(path, body.encode()).status_code == 200
