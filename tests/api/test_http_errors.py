"""Error responses of all paths are counted by status."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import parser

from mlxcache.api.http import ApiSettings
from mlxcache.errors import QueueFull
from tests.api.conftest import FakeEngine

KEY = "swordfish-0004"
CHAT = "/v1/chat/completions"
MESSAGE = {"messages": [{"role": "user", "content": "Hi"}]}


async def counted(client: httpx.AsyncClient) -> dict[int, float]:
    """Read the counts by status, without zeros."""
    text = (await client.get("/metrics", headers={"X-Api-Key": KEY})).text
    (family,) = (
        one
        for one in parser.text_string_to_metric_families(text)
        if one.name == "mlxcache_http_errors"
    )
    return {int(one.labels["status"]): one.value for one in family.samples if one.value}


class TestKey:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(api_key=KEY, max_body_bytes=200)

    async def test_who_is_not_let_in_is_counted(self, client: httpx.AsyncClient) -> None:
        """Each refusal counts; accepted requests do not."""
        assert await counted(client) == {}
        for headers in ({}, {"X-Api-Key": "wrong"}):
            assert (await client.post(CHAT, json=MESSAGE, headers=headers)).status_code == 401
        assert (await client.post(CHAT, json=MESSAGE, headers={"X-Api-Key": KEY})).is_success
        assert await counted(client) == {401: 2}

    async def test_what_is_no_request_is_counted(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """An invalid or too large body, an unknown path, a full queue."""
        client.headers["X-Api-Key"] = KEY
        for body in (b"{", b"[]", b'{"messages": 3}'):
            assert (await client.post(CHAT, content=body)).status_code == 400
            assert (await client.post("/v1/messages", content=body)).status_code == 400
        assert (await client.post(CHAT, content=b" " * 201)).status_code == 413
        assert (await client.get("/v1/nothing")).status_code == 404
        engine.submit_error = QueueFull("The queue is full.")
        assert (await client.post(CHAT, json=MESSAGE)).status_code == 503
        assert await counted(client) == {400: 6, 404: 1, 413: 1, 503: 1}


async def test_health_may_be_asked_in_vain(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Clients poll it while the server starts."""
    engine.state = "loading"
    assert (await client.get("/health")).status_code == 503
    assert (await client.get("/v1/models")).status_code == 503
    assert await counted(client) == {503: 1}


async def test_what_never_happened_is_a_zero(client: httpx.AsyncClient) -> None:
    """Prometheus then sees the first 401 as an increase."""
    text = (await client.get("/metrics")).text
    assert 'mlxcache_http_errors_total{status="401"} 0.0' in text
