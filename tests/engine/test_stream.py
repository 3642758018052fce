"""A stream's queue: order, bounds, stalled readers, errors."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import pytest

from mlxcache.engine.requests import BACKLOG, Stream
from mlxcache.errors import GenerationFailed
from mlxcache.prompt.canonical.uuids import ReplyRestorer
from mlxcache.types import Admitted, Event, Finished, RequestRecord, Text, Thinking, ToolCall

DONE = Finished("stop", 3, 0, 0, 1)


def make(stall_s: float = 30.0) -> tuple[Stream, list[str]]:
    cancels: list[str] = []
    record = RequestRecord("r", None, "test", None, "queued", 0.0)
    return Stream(record, lambda: cancels.append("cancel"), stall_s), cancels


async def test_events_come_in_order_and_end_with_finished() -> None:
    stream, cancels = make()
    events: list[Event] = [Admitted(3, 0), Text("a"), ToolCall(0, "c", "f", "{}"), DONE]
    deque(map(stream.put, events))
    assert [e async for e in stream] == events
    await stream.aclose()
    assert cancels == []


async def test_an_unread_stream_joins_texts_and_loses_none() -> None:
    stream, _ = make()
    texts = [str(i) for i in range(BACKLOG * 4)]
    for text in texts:
        stream.put(Text(text))
    stream.put(Thinking("x"))
    stream.put(DONE)
    await asyncio.sleep(0)
    read = [e async for e in stream]
    assert len(read) <= BACKLOG + 2
    assert "".join(e.text for e in read if isinstance(e, Text)) == "".join(texts)
    assert read[-2:] == [Thinking("x"), DONE]


async def test_a_backlog_is_read_in_turns_with_the_event_loop() -> None:
    """Else a connection that is lost meanwhile is written to until its end."""
    stream, _ = make()
    for number in range(BACKLOG):
        stream.put(Text(str(number)))
    stream.put(DONE)
    lost = asyncio.Event()
    asyncio.get_running_loop().call_soon(lost.set)
    read = 0
    async for _ in stream:
        read += 1
        if lost.is_set():
            break
    assert read <= 2


async def test_a_reader_that_stalls_is_cancelled() -> None:
    stream, cancels = make(stall_s=0.05)
    cancelled, inner = asyncio.Event(), stream._cancel

    def cancel() -> None:
        inner()
        cancelled.set()

    stream._cancel = cancel
    stream.put(Text("a"))
    await asyncio.sleep(0.1)
    stream.put(Text("b"))
    await asyncio.wait_for(cancelled.wait(), 30)
    assert cancels == ["cancel"]


async def test_a_reader_that_was_stopped_with_the_process_is_not_cancelled() -> None:
    """SIGSTOP, then SIGCONT: the clock has gone on, and nobody could read meanwhile."""
    stream, cancels = make(stall_s=0.2)
    stream.put(Text("a"))
    await asyncio.sleep(0)
    stream._read_at -= 60.0
    stream.put(Text("b"))
    read = [event.text async for event in _first(stream, 2) if isinstance(event, Text)]
    assert read == ["a", "b"]
    await asyncio.sleep(0.5)
    assert cancels == []


async def _first(stream: Stream, count: int) -> AsyncIterator[object]:
    events = aiter(stream)
    for _ in range(count):
        yield await anext(events)


async def test_admission_is_awaited_with_a_bound() -> None:
    stream, _ = make()
    assert await stream.admitted(0.01) is None
    stream.put(Admitted(5, 2))
    assert await stream.admitted(1) == Admitted(5, 2)


async def test_an_error_reaches_whoever_waits() -> None:
    stream, _ = make()
    stream.put(GenerationFailed("no"))
    with pytest.raises(GenerationFailed):
        await stream.admitted(1)
    with pytest.raises(GenerationFailed):
        [e async for e in stream]


async def test_leaving_the_context_cancels_what_runs() -> None:
    stream, cancels = make()
    async with stream:
        stream.put(Text("a"))
    assert cancels == ["cancel"]


async def test_what_was_held_back_comes_before_an_error() -> None:
    """A reply that fails in the middle of a name loses nothing of what was said."""
    record = RequestRecord("r", None, "test", None, "queued", 0.0)
    stream = Stream(record, lambda: None, 30.0, ReplyRestorer({"stable": "own"}))
    for event in (Text("a sta"), Text("ble st"), GenerationFailed("broke")):
        stream.put(event)
    read = []

    async def read_on() -> None:
        async for event in stream:
            read.append(event)

    with pytest.raises(GenerationFailed):
        await read_on()
    assert read == [Text("a "), Text("own "), Text("st")]
