"""The live feed sends the present state, then each change, then its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from mlxcache.api import live
from mlxcache.api.live import Feed
from mlxcache.api.status import measure_progress
from mlxcache.types import RequestRecord
from tests.api.conftest import FakeEngine
from tests.api.fake import OneModel


def record(id: str, status: Any = "queued", **fields: Any) -> RequestRecord:
    return RequestRecord(id, None, "chat", None, status, time.time(), **fields)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUSY_S", "IDLE_S", "FIGURES_S"):
        monkeypatch.setattr(live, name, 0.01)


@asynccontextmanager
async def watching(
    engine: FakeEngine, *parts: str, on: Feed | None = None
) -> AsyncIterator[Callable[[], Any]]:
    """Watch `parts`; `await soon()` returns the next item."""
    found = on or Feed(OneModel(engine), None)  # type: ignore[arg-type]
    watched = found.watch(parts)

    async def soon() -> Any:
        return await asyncio.wait_for(anext(watched), 20)

    try:
        yield soon
    finally:
        await watched.aclose()


async def test_what_is_now_comes_at_once_and_then_what_changes(engine: FakeEngine) -> None:
    engine.records = [
        record("b", "prefill", prompt_tokens=100, cached_tokens=40),
        record("a", "done"),
    ]
    async with watching(engine, "requests", "cache", "server") as soon:
        first = [await soon() for _ in range(3)]
        assert [part for part, _ in first] == ["server", "cache", "requests"]
        assert first[0][1]["model"]["id"] == "org/model-4bit"
        assert [row["id"] for row in first[2][1]["data"]] == ["b", "a"]
        engine.records[0].fed_tokens = 20
        part, body = await soon()
        assert part == "requests"
        (row,) = body["data"]
        assert row["progress"] == {
            "phase": "prefill", "done_tokens": 60, "total_tokens": 100, "tokens_per_s": None,
            "left_s": 0.4,
        }  # fmt: skip
        engine.records[0].status = "done"
        (row,) = (await soon())[1]["data"]
        assert (row["id"], row["progress"]) == ("b", None)


async def test_a_late_reader_is_told_what_is(engine: FakeEngine) -> None:
    engine.records = [record("a", "done")]
    one = Feed(OneModel(engine), None)  # type: ignore[arg-type]
    async with watching(engine, "requests", on=one) as first:
        await first()
        engine.records.insert(0, record("b", "done"))
        await first()
        async with watching(engine, "requests", on=one) as second:
            _, body = await second()
            assert [row["id"] for row in body["data"]] == ["b", "a"]


async def test_nobody_watches_nothing_is_looked_at(engine: FakeEngine) -> None:
    before = asyncio.all_tasks()
    async with watching(engine, "cache") as soon:
        await soon()
        assert len(asyncio.all_tasks()) > len(before)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


async def test_many_readers_cost_one_look(engine: FakeEngine, monkeypatch: Any) -> None:
    asked = 0
    plain = engine.figures

    def figures() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return plain() | {"asked": asked}

    monkeypatch.setattr(engine, "figures", figures)
    one = Feed(OneModel(engine), None)  # type: ignore[arg-type]
    readers = [one.watch(["cache"]) for _ in range(20)]
    for _ in range(5):
        told = [await asyncio.wait_for(anext(reader), 20) for reader in readers]
        assert len(told) == 20
    assert asked < 20
    for reader in readers:
        await reader.aclose()


async def test_it_ends_when_the_server_stops(engine: FakeEngine) -> None:
    async with watching(engine, "cache") as soon:
        await soon()
        engine.state = "stopped"
        assert await soon() == ("end", {"reason": "stopped"})
        with pytest.raises(StopAsyncIteration):
            await soon()


async def test_a_look_that_fails_ends_it_for_all(engine: FakeEngine, monkeypatch: Any) -> None:
    async with watching(engine, "requests") as soon:
        await soon()
        monkeypatch.setattr(engine, "requests", lambda: 1 / 0)
        assert await soon() == ("end", {"reason": "failed"})


async def test_sessions_that_cannot_be_read_end_it_for_all(engine: FakeEngine) -> None:
    """Here the engine of the test has no book of sessions at all."""
    async with watching(engine, "sessions") as soon:
        assert await soon() == ("end", {"reason": "failed"})


async def test_few_requests_are_told_of_and_all_that_run(engine: FakeEngine) -> None:
    engine.records = [record(f"r{i}", "done") for i in range(500)] + [record("old", "decode")]
    async with watching(engine, "requests") as soon:
        _, body = await soon()
        assert len(body["data"]) == live.RECENT_REQUESTS + 1
        assert body["data"][-1]["id"] == "old"


async def test_over_http(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.state = "stopped"  # so that it ends
    response = await client.get("/v1/live?parts=server,cache")
    assert response.headers["content-type"].startswith("text/event-stream")
    names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    assert names == ["server", "cache", "end"]


async def test_what_cannot_be_watched(client: httpx.AsyncClient, monkeypatch: Any) -> None:
    refused = await client.get("/v1/live?parts=cache,secrets")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "parts")
    monkeypatch.setattr(live, "MAX_READERS", 0)
    full = await client.get("/v1/live")
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) > 0


def test_how_far_a_request_is() -> None:
    one = record("a", prompt_tokens=10)
    assert measure_progress(one) == {
        "phase": "queued", "done_tokens": 0, "total_tokens": 10, "tokens_per_s": None,
        "left_s": None,
    }  # fmt: skip
    one.status, one.generated_tokens = "decode", 41
    one.timing = {"first_token_s": 3.0, "render_s": 1.0}
    assert measure_progress(one, now=one.created_at + 12.0) == {
        "phase": "decode", "done_tokens": 41, "total_tokens": None, "tokens_per_s": 4.0,
        "left_s": None,
    }  # fmt: skip
    one.status = "cancelled"
    assert measure_progress(one) is None
