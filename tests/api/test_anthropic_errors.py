"""Errors and queueing in Anthropic's shape, before a stream and inside it."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from mlxcache.api.http import ApiSettings
from mlxcache.errors import ContextLengthExceeded, GenerationFailed, QueueFull
from mlxcache.types import Text, Thinking
from tests.api.conftest import FakeEngine, reply
from tests.api.messages import HELLO, events, post

OMITTED: Any = {"type": "adaptive", "display": "omitted"}


class TestErrors:
    @pytest.mark.parametrize("field", ["model", "max_tokens", "messages"])
    async def test_a_missing_field_is_named(self, client: httpx.AsyncClient, field: str) -> None:
        body = {"model": "m", "max_tokens": 1, "messages": HELLO}
        del body[field]
        response = await client.post("/v1/messages", json=body)
        assert response.status_code == 400
        assert field in response.json()["error"]["message"]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_what_the_engine_refuses_has_its_status_before_any_stream(
        self, sdk: anthropic.AsyncAnthropic, engine: FakeEngine, stream: bool
    ) -> None:
        asked: Any = {"model": "m", "max_tokens": 9, "messages": HELLO, "stream": stream}
        engine.submit_error = ContextLengthExceeded("5 tokens of 4.")
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await sdk.messages.create(**asked)
        engine.submit_error = QueueFull("Busy.", retry_after=3)
        with pytest.raises(anthropic.APIStatusError) as busy:
            await sdk.messages.create(**asked)
        assert busy.value.status_code == 503
        assert busy.value.response.headers["retry-after"] == "3"

    async def test_a_failure_in_a_whole_reply_is_a_500(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = [Text("a"), GenerationFailed("It broke.")]
        response = await post(client)
        assert response.status_code == 500
        assert response.json()["error"] == {"type": "api_error", "message": "It broke."}

    async def test_a_failure_in_a_stream_is_its_last_event(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = [Text("a"), GenerationFailed("It broke.")]
        name, data = events((await post(client, stream=True)).text)[-1]
        assert name == "error"
        assert data["error"] == {"type": "api_error", "message": "It broke."}

    @pytest.mark.parametrize("reason", ["cancelled", "error"])
    async def test_a_reply_that_was_cut_short_never_claims_its_end(
        self, client: httpx.AsyncClient, engine: FakeEngine, reason: Any
    ) -> None:
        engine.script = reply("half a sen", reason=reason)
        assert (await post(client)).status_code >= 500
        found = events((await post(client, stream=True)).text)
        assert found[-1][0] == "error"
        assert "message_stop" not in dict(found)


class TestWaiting:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(ping_seconds=0.1, queue_grace=0.05)

    async def test_a_stream_that_waits_begins_and_pings(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.queue_s, engine.cached_tokens = 1.2, 1  # twelve pings; fewer on a busy machine
        found = events((await post(client, stream=True)).text)
        names = [name for name, _ in found]
        assert names[0] == "message_start"
        assert names[: names.index("content_block_start")].count("ping") >= 3
        begun = found[0][1]["message"]["usage"]
        assert (begun["input_tokens"], begun["cache_read_input_tokens"]) == (4, 0)
        ended = dict(found)["message_delta"]["usage"]
        assert (ended["input_tokens"], ended["cache_read_input_tokens"]) == (3, 1)

    async def test_reasoning_that_is_not_shown_is_filled_with_pings(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = [Thinking("a"), 0.15, Thinking("b"), 0.15, *reply("Yes")]
        found = events((await post(client, stream=True, thinking=OMITTED)).text)
        names = [name for name, _ in found]
        assert (
            "ping" in names[names.index("content_block_start") : names.index("content_block_delta")]
        )
