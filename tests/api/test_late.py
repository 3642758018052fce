"""Requests for a model that is being loaded: headers and pings, errors, clients that go."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from mlxcache.api.app import create_app
from mlxcache.api.http import ApiSettings
from mlxcache.errors import BadRequest, MlxcacheError
from mlxcache.types import Arrival, RequestRecord
from tests.api.conftest import FakeEngine, eventually

CHAT: tuple[str, Any] = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Hi there"}]},
)
TEXT: tuple[str, Any] = ("/v1/completions", {"prompt": "Hi there"})
MESSAGES: tuple[str, Any] = (
    "/v1/messages",
    {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi there"}]},
)
RESPONSES: tuple[str, Any] = ("/v1/responses", {"input": "Hi there", "store": False})
ALL = pytest.mark.parametrize("call", [CHAT, TEXT, MESSAGES, RESPONSES], ids=lambda one: one[0])


class Loading:
    """The models of a server, one of which is loaded until `done` is set.

    `arrivals`: the requests that came. `left`: as many went before the model was loaded. `error`:
    raised instead.
    """

    def __init__(self, engine: FakeEngine):
        self.default, self.engines = engine, [engine]
        self.done = threading.Event()
        self.arrivals: list[Arrival] = []
        self.left = 0
        self.error: MlxcacheError | None = None
        engine.state, engine.load_share = "loading", 0.43

    def find(self, model: str | None) -> FakeEngine:
        return self.default

    def of_record(self, record: RequestRecord) -> FakeEngine:
        return self.default

    def requests(self) -> list[RequestRecord]:
        return [one.record for one in self.arrivals if one.record] + self.default.records

    async def of(self, model: str | None, arrival: Arrival | None = None) -> FakeEngine:
        assert arrival is not None
        assert model == "second"
        arrival.note_waiting(RequestRecord(arrival.id, None, arrival.api, None, "queued", 0.0))
        self.arrivals.append(arrival)
        try:
            while not self.done.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            arrival.note_waiting(None)
        if self.error is not None:
            raise self.error
        self.default.state, self.default.load_share = "ready", None
        return self.default


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(ping_seconds=0.1, queue_grace=0.05)


@pytest.fixture
def models(engine: FakeEngine) -> Loading:
    return Loading(engine)


@pytest.fixture
def app(settings: ApiSettings, models: Loading) -> Starlette:
    return create_app(models, settings)  # type: ignore[arg-type]


def body(call: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return call[1] | {"model": "second", "stream": True} | more


@ALL
def test_headers_and_pings_come_while_the_model_is_loaded(
    live: str, models: Loading, engine: FakeEngine, call: tuple[str, Any]
) -> None:
    """Then the reply as ever; meanwhile the request is listed with the progress of the load."""
    path, _ = call
    with httpx.stream("POST", live + path, json=body(call), timeout=10) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        early = [next(lines) for _ in range(8)]
        (one,) = httpx.get(f"{live}/v1/requests").json()["data"]
        assert one["id"] == response.headers["x-mlxcache-request"] == models.arrivals[0].id
        assert (one["progress"]["phase"], one["progress"]["share"]) == ("loading", 0.43)
        models.done.set()
        rest = "\n".join(lines)
    assert "Hello" in rest
    assert "Hello" not in "".join(early)
    ping = {
        "/v1/messages": "event: ping",
        "/v1/responses": "event: response.in_progress",
    }.get(path, ": loading 43%")
    assert early.count(ping) > 1, early
    (job,) = engine.jobs
    assert job.loaded_s > 0.1
    eventually(engine.streams[0].closed.is_set)


@ALL
async def test_a_model_that_is_loaded_soon_is_not_late(
    client: httpx.AsyncClient, models: Loading, call: tuple[str, Any]
) -> None:
    models.done.set()
    response = await client.post(call[0], json=body(call))
    assert response.status_code == 200
    assert "loading" not in response.text
    models.error = BadRequest("It needs 9 GB.", param="model")
    for stream in (True, False):
        response = await client.post(call[0], json=body(call, stream=stream))
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "It needs 9 GB."


@ALL
def test_an_error_of_the_load_ends_the_stream(
    live: str, models: Loading, call: tuple[str, Any]
) -> None:
    models.error = BadRequest("It needs 9 GB.", param="model")
    with httpx.stream("POST", live + call[0], json=body(call), timeout=10) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        models.done.set()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "It needs 9 GB." in json.dumps(events[-1])


@ALL
@pytest.mark.parametrize("when", ["whole", "early", "late"])
def test_a_client_that_goes_while_its_model_is_loaded_is_removed(
    live: str, models: Loading, engine: FakeEngine, call: tuple[str, Any], when: str
) -> None:
    given: dict[str, Any] = {"url": live + call[0], "json": body(call, stream=when != "whole")}
    if when == "late":
        with httpx.stream("POST", **given, timeout=10) as response:
            assert response.status_code == 200
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(**given, timeout=0.04)
    eventually(lambda: models.left == 1)
    assert not engine.jobs
