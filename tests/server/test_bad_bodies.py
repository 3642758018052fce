"""Any body gets a reply or an error in its API's shape, and the server keeps serving."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.api import CHAT, COMPLETIONS, COUNT, MESSAGES, Api, user

PATHS = (CHAT, COMPLETIONS, MESSAGES, COUNT)
HI = [user("Hi")]


@pytest.fixture(autouse=True)
def goes_on(llama: Api) -> Iterator[None]:
    """After each test the shared server still answers."""
    yield
    assert llama.message(HI, tokens=2).generated == 2


def check(response: httpx.Response, *statuses: int) -> None:
    """One of `statuses`, and an error in the shape of its API."""
    assert response.status_code in statuses, response.text[:500]
    assert response.headers["x-mlxcache-request"].startswith("req_")
    if response.status_code == 200:
        assert '"server_error"' not in response.text
        assert '"api_error"' not in response.text
        return
    body = response.json()
    assert body["error"]["message"]
    if response.url.path.startswith(MESSAGES):
        assert body["type"] == "error"
        assert isinstance(body["error"]["type"], str)
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


TOOLS = {
    CHAT: '{"type":"function","function":{"name":"f","parameters":%s}}',
    MESSAGES: '{"name":"f","input_schema":%s}',
    COUNT: '{"name":"f","input_schema":%s}',
}
CALLS = {
    CHAT: '{"role":"assistant","tool_calls":[{"id":"t","function":{"name":"f","arguments":%s}}]}',
    MESSAGES: '{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":%s}]}',
    COUNT: '{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":%s}]}',
}


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("depth", [20, 60, 90, 120, 1000, 100_000])
def test_deep_nesting_in_schemas_and_inputs(llama: Api, path: str, depth: int) -> None:
    """Templates are recursive, so a body nested too deeply is refused before."""
    for body in (
        '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"a"}],"tools":[%s]}'
        % (TOOLS[path] % nested(depth)),
        '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"a"},%s,'
        '{"role":"user","content":"b"}]}' % (CALLS[path] % nested(depth)),
    ):
        check(llama.post(path, body.encode()), 200 if depth <= 90 else 400)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, COUNT])
@pytest.mark.parametrize(
    "text",
    ["a\0b\x01", "x" * 1_000_000, "\U0001f980" * 250_000, "<|im_end|>" * 100_000],
    ids=["controls", "one long word", "emoji", "control tokens"],
)
def test_strange_texts(llama: Api, path: str, text: str) -> None:
    """It is served, or refused as too long."""
    response = llama.post(path, {"model": "m", "max_tokens": 1, "messages": [user(text)]})
    if len(text) < 10 or (path == COUNT and response.status_code == 200):
        check(response, 200)
    else:
        check(response, 400)
        assert "prompt is too long" in response.text


@pytest.mark.parametrize("prompt", ["x" * 1_000_000, [50] * 70_000], ids=["text", "ids"])
def test_a_plain_prompt_that_is_too_long_is_named(llama: Api, prompt: Any) -> None:
    error = llama.post(COMPLETIONS, {"model": "m", "prompt": prompt}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("path", PATHS)
def test_a_hundred_megabytes_and_garbage(llama: Api, path: str) -> None:
    """413 and 400, also where the length is not announced."""
    big = b'{"messages":[{"role":"user","content":"' + b"a" * 100_000_000
    check(llama.post(path, big), 413)
    pieces = httpx.post(llama.url + path, content=(b"a" * 10**6 for _ in range(100)))
    assert pieces.status_code == 413
    check(llama.post(path, os.urandom(3000)), 400)


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [-1], [10**6], [2**31], [10**30], [True], [1.5], ["a", 1], 5, {}]
)
def test_prompts_that_are_none(llama: Api, prompt: Any) -> None:
    """Also ids that no token has."""
    response = llama.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
    check(response, 400)
    assert response.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize("name", ["self", "messages", "tools", "namespace", "chat_template"])
def test_template_arguments_that_are_not_the_clients(llama: Api, name: str) -> None:
    """They would break the template, or replace what the server gives it."""
    body = {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    check(llama.post(CHAT, body), 400)


def test_control_tokens_in_texts_are_text(llama: Api) -> None:
    """As one token each they would open turns and end them."""

    def size(text: str) -> int:
        tool = {"name": f"t{text}", "description": text, "input_schema": {text: text}}
        call = {"type": "tool_use", "id": "a", "name": "t", "input": {text: text}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": text}
        return llama.count(
            system=text,
            tools=[tool],
            messages=[
                user(text),
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result, {"type": "text", "text": text}]},
            ],
        )

    for control in ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_call>"):
        assert size(control) - size("") >= 10 * 4, control
