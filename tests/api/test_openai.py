"""OpenAI's endpoints: failures, and the server's default limit."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from mlxcache.api.http import ApiSettings
from mlxcache.errors import ContextLengthExceeded, GenerationFailed
from tests.api.conftest import FakeEngine, reply
from tests.api.openai_bodies import USER, chat, events


class TestFailures:
    async def test_the_sdk_raises_its_own_error_for_a_prompt_that_is_too_long(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.submit_error = ContextLengthExceeded("9000 tokens are more than 8192.")
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await openai_sdk.chat.completions.create(model="m", messages=USER, stream=stream)
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.param == "messages"

    async def test_a_reply_that_fails_whole_is_a_500_of_the_right_shape(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = [*reply("Hi")[:2], GenerationFailed("The model raised.")]
        response = await chat(client)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "The model raised."
        assert engine.streams[0].closed.is_set()

    async def test_a_reply_that_fails_late_ends_with_an_error_event(
        self, openai_sdk: openai.AsyncOpenAI, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = [*reply("Hi")[:2], GenerationFailed("The model raised.")]
        sent = events((await chat(client, stream=True)).text)
        assert sent[1]["choices"][0]["delta"]["content"] == "Hi"
        assert sent[-1]["error"]["message"] == "The model raised."
        assert engine.streams[0].closed.is_set()
        stream: Any = await openai_sdk.chat.completions.create(
            model="m", messages=USER, stream=True
        )
        with pytest.raises(openai.APIError, match=r"The model raised\."):
            _ = [chunk async for chunk in stream]

    async def test_a_bug_in_a_stream_is_an_error_event_that_tells_no_details(
        self, client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.script = [*reply("Hi")[:2], RuntimeError("secret")]
        sent = events((await chat(client, stream=True)).text)
        assert sent[-1]["error"]["type"] == "server_error"
        assert "secret" not in sent[-1]["error"]["message"]
        assert "RuntimeError: secret" in caplog.text

    async def test_a_reply_cut_short_is_never_passed_off_as_whole(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply("Hi", reason="cancelled")
        assert (await chat(client)).status_code == 503
        assert "error" in events((await chat(client, stream=True)).text)[-1]


class TestDefaultLimit:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(default_max_tokens=77)

    async def test_the_servers_limit_holds_where_the_client_names_none(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await chat(client)
        await client.post("/v1/completions", json={"prompt": "a"})
        await chat(client, max_tokens=5)
        assert [job.max_tokens for job in engine.jobs] == [77, 77, 5]
