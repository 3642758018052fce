"""Streams send pings in silences, and close the engine's stream however they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from sse_starlette.event import ServerSentEvent

from mlxcache.api.http import ApiSettings
from mlxcache.api.openai import ReplyProgress
from mlxcache.api.sse import EventStream, make_comment, make_event, make_raw_event
from mlxcache.types import Admitted, Event, Job, Progress, Prompt, Text, Thinking, token_ids
from tests.api.conftest import FakeEngine, FakeStream, reply, soon

SETTINGS = ApiSettings()
JOB = Job("req_1", Prompt(token_ids(range(3))))


async def opened(engine: FakeEngine) -> FakeStream:
    return await engine.submit(JOB)


def response(stream: FakeStream, settings: ApiSettings = SETTINGS) -> EventStream:
    async def events() -> AsyncGenerator[ServerSentEvent, None]:
        async for item in stream:
            if isinstance(item, Text):
                yield make_raw_event(item.text)

    return EventStream(
        events(),
        settings,
        id=stream.record.id,
        ping=lambda: make_comment("ping"),
        close=stream.aclose,
    )


class Wire:
    """The client's end of a connection: what it got, its disconnect, its reading speed."""

    def __init__(self, *, read_s: float = 0.0, fail_start: bool = False):
        self.body = b""
        self.gone = asyncio.Event()
        self.ended = False
        self._read_s = read_s
        self._fail_start = fail_start

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if self._fail_start:
                raise OSError("gone")
            return
        await asyncio.sleep(self._read_s)
        self.body += message["body"]
        self.ended = not message["more_body"]


async def play(answer: EventStream, wire: Wire) -> None:
    await answer({"type": "http", "method": "POST"}, wire.receive, wire.send)


async def test_a_stream_is_sent_and_closed(engine: FakeEngine) -> None:
    stream, wire = await opened(engine), Wire()
    await play(response(stream), wire)
    assert wire.body == b"data: Hello\n\ndata: , \n\ndata: world\n\n"
    assert wire.ended
    assert stream.closed.is_set()
    assert not stream.cancelled


async def test_silence_is_filled_with_pings(engine: FakeEngine) -> None:
    engine.script = [0.5, *reply("Hi")]
    wire = Wire()
    await play(response(await opened(engine), ApiSettings(ping_seconds=0.1)), wire)
    before = wire.body.partition(b"data:")[0]
    assert before.count(b": ping\n\n") >= 2


async def test_a_client_that_leaves_cancels_its_stream(engine: FakeEngine) -> None:
    engine.script = [*reply("Hi")[:2], 60.0, *reply("there")]
    stream, wire = await opened(engine), Wire()
    task = asyncio.create_task(play(response(stream), wire))
    await soon(lambda: b"Hi" in wire.body)
    wire.gone.set()
    await asyncio.wait_for(task, 2)
    assert stream.cancelled


async def test_a_client_that_left_before_the_first_event_cancels_too(engine: FakeEngine) -> None:
    stream = await opened(engine)
    with pytest.raises(OSError, match="gone"):
        await play(response(stream), Wire(fail_start=True))
    assert stream.cancelled


async def test_a_reader_that_stalls_is_cancelled(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stream, wire = await opened(engine), Wire(read_s=60.0)
    await asyncio.wait_for(play(response(stream, ApiSettings(send_timeout=0.1)), wire), 2)
    assert stream.cancelled
    assert "the client stopped reading for 0.1 s" in caplog.text


async def test_a_stream_is_closed_when_its_task_is_cancelled(engine: FakeEngine) -> None:
    engine.script = [60.0]
    stream = await opened(engine)
    task = asyncio.create_task(play(response(stream), Wire()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.cancelled


async def test_when_the_server_stops_the_engines_stream_is_ended(engine: FakeEngine) -> None:
    engine.script = [*reply("Hi")[:2], 60.0, *reply("there")]
    stream, wire = await opened(engine), Wire()
    answer = response(stream)
    task = asyncio.create_task(play(answer, wire))
    await soon(lambda: b"Hi" in wire.body)
    answer.stopping.set()
    await asyncio.wait_for(task, 2)
    assert wire.ended
    assert stream.cancelled


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(queue_grace=0.05)


async def test_a_stream_begins_with_the_cached_tokens_or_after_a_while(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """The first event of a request that is still in the queue does not know them."""
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "m", "max_tokens": 9, "messages": messages, "stream": True}
    engine.cached_tokens, found = 2, []
    for engine.queue_s in (0.0, 0.2):
        lines = (await client.post("/v1/messages", json=body)).text.splitlines()
        start = json.loads(lines[1].removeprefix("data: "))
        found.append(start["message"]["usage"]["cache_read_input_tokens"])
    assert found == [2, 0]


def test_a_pulse_tells_how_far_the_reply_is() -> None:
    progress = ReplyProgress()
    assert progress.to_comment().encode() == b": queued\n\n"
    steps: list[tuple[Event, bytes]] = [
        (Admitted(18500, 512), b": prefill 512/18500\n\n"),
        (Progress(1024, 18500), b": prefill 1024/18500\n\n"),
        (Thinking("Hm"), b": decode\n\n"),
    ]
    for seen, words in steps:
        progress.update(seen)
        assert progress.to_comment().encode() == words


def test_events_are_one_line_of_json_each() -> None:
    assert make_event({"a": "é\n"}).encode() == 'data: {"a":"é\\n"}\n\n'.encode()
    ends = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    (line,) = make_event({"a": f"1{ends}2"}).encode().decode().splitlines()[:-1]
    assert json.loads(line.removeprefix("data: ")) == {"a": f"1{ends}2"}
    assert make_event({}, name="ping").encode() == b"event: ping\ndata: {}\n\n"
