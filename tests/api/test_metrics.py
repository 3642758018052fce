"""GET /metrics while the model loads, and with keys."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import parser

from mlxcache.api.http import ApiSettings
from mlxcache.errors import Vanished
from tests.api.conftest import FakeEngine

COMMON, MINE, THEIRS = "swordfish-0002", "mine-0001", "theirs-0001"


async def test_what_is_not_known_yet_has_a_name_and_no_value(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """A scrape shows that the model loads."""
    engine.state, engine.info = "loading", None
    text = (await client.get("/metrics")).text
    found = {one.name: one.samples for one in parser.text_string_to_metric_families(text)}
    assert [x.value for x in found["mlxcache_ready"]] == [0.0]
    assert found["mlxcache_cached_tokens"] == found["mlxcache_cache_bytes"] == []


async def test_a_word_of_the_model_is_escaped(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """It may be the name of any folder."""
    assert engine.info is not None
    name = 'a "quoted"\\ name\nof two lines'
    engine.info = type(engine.info)(name, 10, 10, 0, "llama", False, False)
    text = (await client.get("/metrics")).text
    found = {one.name: one.samples for one in parser.text_string_to_metric_families(text)}
    assert found["mlxcache_build_info"][0].labels["model"] == name


class TestKeys:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(api_key=COMMON)

    async def test_the_key_is_asked_for(self, client: httpx.AsyncClient) -> None:
        """As `Authorization: Bearer`, as Prometheus sends it."""
        assert (await client.get("/metrics")).status_code == 401
        headers = {"Authorization": f"Bearer {COMMON}"}
        assert (await client.get("/metrics", headers=headers)).status_code == 200


class TestOwners:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(owned_keys=(MINE, THEIRS))

    async def test_any_key_reads_the_whole_servers_figures(self, client: httpx.AsyncClient) -> None:
        """Every key gets the same metrics, without data of an owner."""
        assert (await client.get("/metrics")).status_code == 401
        texts = [
            (await client.get("/metrics", headers={"X-Api-Key": key})).text
            for key in (MINE, THEIRS)
        ]
        assert texts[0] == texts[1]
        assert not any(word in texts[0] for word in ("session=", "owner=", "client="))


async def test_a_folder_that_is_being_made_again_is_no_fault_of_the_servers(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """503 with Retry-After."""
    engine.submit_error = Vanished("/x was removed.")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    response = await client.post("/v1/chat/completions", json=chat)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")


async def test_other_ranks_are_seen_in_health_and_metrics(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """For a model that is divided among several machines, and for no other."""
    assert "ranks" not in (await client.get("/health")).json()
    others = [
        {
            "rank": 1,
            "silent_s": 0.5,
            "operation_s": 2.0,
            "pressure": "warning",
            "footprint_bytes": 100,
            "disk_used_bytes": 70,
            "disk_limit_bytes": None,
        }
    ]
    engine.ranks = {"mode": "tensor", "size": 2, "others": others}
    assert (await client.get("/health")).json()["ranks"] == others
    text = (await client.get("/metrics")).text
    assert "mlxcache_ranks 2.0" in text
    assert 'mlxcache_rank_silent_seconds{rank="1"} 0.5' in text
    assert 'mlxcache_rank_operation_seconds{rank="1"} 2.0' in text
    assert 'mlxcache_rank_memory_bytes{rank="1"} 100.0' in text
    assert 'mlxcache_rank_disk_bytes{rank="1"} 70.0' in text
    assert "mlxcache_rank_disk_limit_bytes{" not in text
    assert 'mlxcache_rank_memory_pressure{level="warning",rank="1"} 1.0' in text
    assert 'mlxcache_rank_memory_pressure{level="normal",rank="1"} 0.0' in text
