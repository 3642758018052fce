"""Whatever the body, the answer is a reply or a clear error: never a 500."""

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


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """`good` values, and anything at all one time in three."""
    return st.one_of(good, good, values)


kinds = st.sampled_from(
    [
        "text",
        "image",
        "image_url",
        "tool_use",
        "tool_result",
        "thinking",
        "tool_reference",
        "refusal",
    ]
)
parts = st.fixed_dictionaries(
    {"type": mostly(kinds)},
    optional={
        "text": mostly(texts),
        "refusal": values,
        "thinking": mostly(texts),
        "signature": values,
        "id": mostly(texts),
        "name": mostly(texts),
        "input": values,
        "tool_use_id": mostly(texts),
        "content": values,
        "source": values,
        "cache_control": values,
    },
)
contents = mostly(st.one_of(texts, st.lists(mostly(parts), max_size=3)))
calls = st.fixed_dictionaries(
    {"id": mostly(texts), "type": st.just("function")},
    optional={
        "function": mostly(
            st.fixed_dictionaries({"name": mostly(texts)}, optional={"arguments": mostly(texts)})
        )
    },
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])
messages = st.fixed_dictionaries(
    {"role": mostly(roles), "content": contents},
    optional={
        "name": mostly(texts),
        "tool_calls": mostly(st.lists(mostly(calls), max_size=2)),
        "tool_call_id": mostly(texts),
        "reasoning_content": mostly(texts),
        "function_call": values,
    },
)
tools = st.fixed_dictionaries(
    {},
    optional={
        "type": mostly(st.sampled_from(["function", "custom"])),
        "function": mostly(st.fixed_dictionaries({"name": texts}, optional={"parameters": values})),
        "name": mostly(texts),
        "description": mostly(texts),
        "input_schema": values,
        "defer_loading": values,
    },
)
bodies = st.fixed_dictionaries(
    {
        "messages": mostly(st.lists(mostly(messages), max_size=4)),
        "max_tokens": mostly(st.integers(1, 9)),
        "model": mostly(st.just("m")),
    },
    optional={
        "prompt": mostly(st.one_of(texts, st.lists(mostly(st.integers(0, 9)), max_size=3))),
        "system": contents,
        "stream": mostly(st.booleans()),
        "tools": mostly(st.lists(mostly(tools), max_size=2)),
        "tool_choice": mostly(st.sampled_from(["auto", "none", {"type": "auto"}])),
        "stop": mostly(st.lists(texts, max_size=2)),
        "stop_sequences": mostly(st.lists(texts, max_size=2)),
        "temperature": mostly(st.floats(0, 2)),
        "top_p": mostly(st.floats(0, 1)),
        "top_k": mostly(st.integers(0, 9)),
        "seed": mostly(st.integers()),
        "logit_bias": mostly(st.dictionaries(st.integers(0, 99).map(str), st.floats(-9, 9))),
        "logprobs": values,
        "n": values,
        "metadata": values,
        "thinking": values,
        "stream_options": values,
        "chat_template_kwargs": values,
        "response_format": values,
        "context_management": values,
        "output_config": values,
    },
)


def post(path: str, content: bytes) -> httpx.Response:
    """One request to an application of its own."""
    app = create_app(FakeEngine())  # type: ignore[arg-type]

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=content)

    return asyncio.run(send())


def check(path: str, content: bytes) -> None:
    """A reply, or a 400 in the shape of the API that the path is of."""
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
@given(bodies)
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
