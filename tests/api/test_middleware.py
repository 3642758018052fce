"""Headers of every response, and the API key."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from mlxcache.api.http import ApiSettings
from tests.api.conftest import FakeEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
MESSAGE: dict[str, Any] = CHAT | {"model": "m", "max_tokens": 5}
CHAT_PATH, MESSAGE_PATH = "/v1/chat/completions", "/v1/messages"
BOTH = pytest.mark.parametrize(
    ("path", "body"), [(CHAT_PATH, CHAT), (MESSAGE_PATH, MESSAGE)], ids=["openai", "anthropic"]
)
ID = re.compile(r"req_[0-9a-f]{24}")


class TestEveryResponse:
    @pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", "/v1/requests/x"])
    async def test_carries_the_requests_id(self, client: httpx.AsyncClient, path: str) -> None:
        ids = {(await client.get(path)).headers["x-mlxcache-request"] for _ in range(2)}
        assert len(ids) == 2
        assert all(ID.fullmatch(id) for id in ids)

    @BOTH
    async def test_carries_the_id_that_the_engine_knows(
        self, client: httpx.AsyncClient, engine: FakeEngine, path: str, body: Any
    ) -> None:
        for stream in (False, True):
            response = await client.post(path, json=body | {"stream": stream})
            assert response.status_code == 200
            assert response.headers["x-mlxcache-request"] == engine.jobs[-1].id

    async def test_lets_no_other_origin_in(self, client: httpx.AsyncClient) -> None:
        headers = {"origin": "https://example.com", "access-control-request-method": "POST"}
        for response in (
            await client.post(CHAT_PATH, json=CHAT | {"stream": True}, headers=headers),
            await client.options(CHAT_PATH, headers=headers),
        ):
            assert not [name for name in response.headers if name.startswith("access-control")]


class TestKey:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(api_key="clé")

    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": "Bearer clé"},
            {"authorization": "bearer  clé"},
            {"x-api-key": "clé"},
            {"x-api-key": "clé", "authorization": "Bearer other"},
            {"x-api-key": "other", "authorization": "Bearer clé"},
        ],
    )
    async def test_the_right_key_opens(
        self, client: httpx.AsyncClient, headers: dict[str, str]
    ) -> None:
        given = {name.encode(): value.encode() for name, value in headers.items()}
        assert (await client.post(CHAT_PATH, json=CHAT, headers=given)).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer"},
            {"authorization": "Basic clé"},
            {"authorization": "clé"},
            {"x-api-key": ""},
            {"x-api-key": "clé2"},
        ],
    )
    async def test_any_other_does_not(
        self, client: httpx.AsyncClient, engine: FakeEngine, headers: dict[str, str]
    ) -> None:
        given = {name.encode(): value.encode() for name, value in headers.items()}
        for path in (CHAT_PATH, MESSAGE_PATH):
            response = await client.post(path, json=MESSAGE, headers=given)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
            assert ID.fullmatch(response.headers["x-mlxcache-request"])
        assert engine.jobs == []

    async def test_only_health_is_open(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        for path in ("/v1/models", "/v1/cache", "/v1/requests", "/nothing", "/health/"):
            assert (await client.get(path)).status_code in (401, 307)
