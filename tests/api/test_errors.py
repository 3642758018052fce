"""Every error has a status and a shape in each API."""

from __future__ import annotations

import inspect
from typing import Any

import httpx
import pytest

from mlxcache import errors
from mlxcache.api.errors import SHAPES, build_anthropic_error, build_openai_error, find_shape
from tests.api.conftest import FakeEngine

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.MlxcacheError)
]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = CHAT | {"model": "m", "max_tokens": 5}


def openai_shaped(response: httpx.Response) -> dict[str, Any]:
    """Return the error, which must have OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def anthropic_shaped(response: httpx.Response) -> dict[str, Any]:
    """Return the error, which must have Anthropic's shape."""
    body = response.json()
    assert body["type"] == "error"
    error: dict[str, Any] = body["error"]
    assert set(error) == {"type", "message"}
    assert error["message"]
    return error


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_is_mapped_by_name(cls: type[errors.MlxcacheError]) -> None:
    assert cls in SHAPES
    shape = find_shape(cls("It failed."))
    assert 400 <= shape.status < 600
    assert build_openai_error(cls("It failed."))["error"]["message"] == "It failed."
    assert build_anthropic_error(cls("It failed."))["error"]["type"] == shape.anthropic


def test_nothing_is_mapped_that_does_not_exist() -> None:
    assert set(SHAPES) == set(CLASSES)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.BadRequest("x"), (400, "invalid_request_error", "invalid_request_error")),
        (errors.QueueFull("x"), (503, "server_error", "overloaded_error")),
        (errors.NotReady("x"), (503, "server_error", "overloaded_error")),
        (errors.GenerationFailed("x"), (500, "server_error", "api_error")),
        (errors.TooLarge("x"), (413, "invalid_request_error", "request_too_large")),
        (errors.Unauthorized("x"), (401, "authentication_error", "authentication_error")),
    ],
)
async def test_an_error_of_the_engine_has_the_shape_of_the_api_that_asked(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    error: Exception,
    expected: tuple[int, str, str],
) -> None:
    engine.submit_error = error
    status, openai, anthropic = expected
    for stream in (False, True):
        response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert response.status_code == status
        assert openai_shaped(response)["type"] == openai
        response = await client.post("/v1/messages", json=MESSAGE | {"stream": stream})
        assert response.status_code == status
        assert anthropic_shaped(response)["type"] == anthropic
        assert response.json()["request_id"] == response.headers["x-mlxcache-request"]


async def test_busy_says_when_to_come_again_in_whole_seconds(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.submit_error = errors.QueueFull("x", retry_after=0.2)
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.headers["retry-after"] == "1"


def test_a_prompt_that_does_not_fit_says_the_words_that_anthropics_clients_look_for() -> None:
    plain = errors.ContextLengthExceeded("9000 tokens > 8192 maximum")
    assert build_anthropic_error(plain)["error"]["message"].startswith("prompt is too long: 9000")
    full = errors.ContextLengthExceeded("prompt is too long: 9 tokens > 8 maximum")
    assert build_anthropic_error(full)["error"]["message"] == str(full)
    assert build_openai_error(plain)["error"]["code"] == "context_length_exceeded"


async def test_unknown_paths_and_methods_have_the_shape_of_their_api(
    client: httpx.AsyncClient,
) -> None:
    response = await client.get("/v1/nothing")
    assert response.status_code == 404
    assert openai_shaped(response)["code"] == "not_found"
    response = await client.post("/v1/messages/nothing")
    assert response.status_code == 404
    assert anthropic_shaped(response)["type"] == "not_found_error"
    for path in ("/v1/messages/batches", "/v1/messages/batches/msgbatch_1/cancel"):
        response = await client.post(path, json={"requests": []})
        assert response.status_code == 404
        assert "is not supported: this server has" in anthropic_shaped(response)["message"]
    response = await client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert openai_shaped(response)["code"] == "method_not_allowed"
    response = await client.put("/v1/sessions/ses_1")
    assert (response.status_code, response.headers["allow"]) == (405, "DELETE, GET, HEAD, PATCH")
    response = await client.get("/v1/models/org/one/load")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    response = await client.get("/v1/messages")
    assert response.status_code == 405
    assert anthropic_shaped(response)["type"] == "invalid_request_error"


async def test_anthropics_clients_get_their_shape_also_on_shared_paths(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.state = "loading"
    headers = {"anthropic-version": "2023-06-01"}
    response = await client.get("/v1/models", headers=headers)
    assert response.status_code == 503
    assert anthropic_shaped(response)["type"] == "overloaded_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_that_tells_no_details_and_is_logged_with_its_traceback(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    engine.render_error = RuntimeError("secret")
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert response.status_code == 500
    assert "secret" not in openai_shaped(response)["message"]
    assert response.headers["x-mlxcache-request"] in caplog.text
    assert "Traceback" in caplog.text
    assert "RuntimeError: secret" in caplog.text
    response = await client.post("/v1/messages", json=MESSAGE | {"stream": stream})
    assert anthropic_shaped(response)["type"] == "api_error"


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [("loading", 503, "loading"), ("stopped", 503, "stopping"), ("failed", 500, "log")],
)
async def test_before_and_after_serving_every_endpoint_says_so(
    client: httpx.AsyncClient, engine: FakeEngine, state: Any, status: int, words: str
) -> None:
    engine.state = state
    for path, body in [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", MESSAGE),
        ("/v1/messages/count_tokens", MESSAGE),
    ]:
        response = await client.post(path, json=body)
        assert response.status_code == status
        assert words in response.json()["error"]["message"]
        assert ("retry-after" in response.headers) == (status == 503)
    assert engine.jobs == []
