"""Each owner may have a limited number of live streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mlxcache.api import cache, live
from mlxcache.api.http import ApiSettings, Deps
from mlxcache.api.live import Feed, LiveReaders, LiveStream
from mlxcache.errors import TooMany
from mlxcache.owner import OWNER
from tests.api.conftest import FakeEngine
from tests.api.fake import OneModel


@pytest.fixture
def owner() -> Iterator[None]:
    token = OWNER.set("one")
    yield
    OWNER.reset(token)


async def opened(watched: LiveReaders, deps: Deps) -> Any:
    request: Any = SimpleNamespace(query_params={"parts": "server"})
    return await live.live(watched, deps, request)


async def test_streams_that_have_not_begun_count_and_another_owners_do_not(
    engine: FakeEngine, owner: None
) -> None:
    deps = Deps(engine, ApiSettings(), OneModel(engine))  # type: ignore[arg-type]
    watched = LiveReaders(deps.models)
    streams = [await opened(watched, deps) for _ in range(live.MAX_READERS)]
    with pytest.raises(TooMany):
        await opened(watched, deps)
    OWNER.set("another")
    assert isinstance(await opened(watched, deps), LiveStream)
    OWNER.set("one")
    engine.state = "stopped"
    await streams[0](
        {"type": "http", "method": "GET", "path": "/v1/live", "headers": []}, _nothing, _anything
    )
    streams[0] = await opened(watched, deps)
    with pytest.raises(TooMany):
        await opened(watched, deps)


async def _nothing() -> Any:
    """Receive nothing: the client stays connected."""
    await asyncio.Event().wait()


async def _anything(message: Any) -> None:
    """Send nowhere."""


async def test_a_disk_that_answers_nothing_holds_up_nobody(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither other parts of the feed nor other requests wait: figures are read in a thread."""
    monkeypatch.setattr(live, "FIRST_FIGURES_S", 0.01)
    answers, plain = threading.Event(), engine.figures

    def figures() -> dict[str, Any]:
        assert answers.wait(30), "the event loop waits for the disk"
        return plain()

    monkeypatch.setattr(engine, "figures", figures)
    models: Any = OneModel(engine)
    request: Any = None
    deps = Deps(models.default, ApiSettings(), models)
    asked = asyncio.create_task(cache.read_figures(deps, request))
    watched = Feed(models, None).watch(["server", "cache"])
    part, _ = await asyncio.wait_for(anext(watched), 20)
    assert part == "server"
    assert not asked.done()
    answers.set()
    part, _ = await asyncio.wait_for(anext(watched), 20)
    assert part == "cache"
    assert (await asked).status_code == 200
    await watched.aclose()
