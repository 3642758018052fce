"""A retry joins what is running; others that ask the same have a reply of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.engine.engine import Engine
from mlxcache.engine.requests import Stream
from mlxcache.errors import DeadlineExceeded, QueueFull, TooMany
from mlxcache.types import (
    Finished,
    Job,
    OutputFormat,
    Prompt,
    Sampling,
    Text,
    Tokens,
    ToolChoice,
    token_ids,
)
from tests.engine.running import started

IDS = token_ids(np.random.default_rng(4).integers(10, 400, 300, np.int32))


@pytest.fixture
async def engine(toy_paths: dict[str, Path], tmp_path: Path) -> AsyncIterator[Engine]:
    async with started(toy_paths["llama"], tmp_path, concurrency=2, queue=4) as engine:
        yield engine


def job(name: str, ids: Tokens = IDS, **kwargs: Any) -> Job:
    return Job(name, Prompt(ids), **{"max_tokens": 40, "session": "s", **kwargs})


async def read(stream: Stream) -> tuple[str, Finished]:
    text, last = "", None
    async for event in stream:
        if isinstance(event, Text):
            text += event.text
        elif isinstance(event, Finished):
            last = event
    assert last is not None
    return text, last


async def test_who_asks_again_gets_all_of_the_one_reply(engine: Engine) -> None:
    first = await engine.submit(job("a"))
    events = aiter(first)
    async for event in events:  # it has begun to answer
        if isinstance(event, Text):
            break
    assert isinstance(event, Text)
    begun = event.text
    again = await engine.submit(job("b"))
    (text, end), (rest, _) = await asyncio.gather(read(again), read(first))
    assert text == begun + rest
    assert end.generated_tokens == 40
    record = await engine.request("b")
    assert record is not None
    assert (record.joined, record.status, record.id) == ("a", "done", "b")
    assert (record.prompt_tokens, record.generated_tokens) == (300, 40)
    assert engine.figures()["requests"]["total"] == 1


async def test_the_first_leaves_and_the_second_has_it_all(engine: Engine) -> None:
    first = await engine.submit(job("a"))
    second = await engine.submit(job("b"))
    await first.aclose()
    assert (await read(second))[1].generated_tokens == 40
    assert {r.id: r.status for r in engine.requests()} == {"a": "cancelled", "b": "done"}
    assert engine.figures()["tokens"]["prompt"] == 300


async def test_one_that_joined_leaves_and_the_first_goes_on(engine: Engine) -> None:
    first = await engine.submit(job("a"))
    second = await engine.submit(job("b"))
    await second.aclose()
    assert (await read(second))[1].reason == "cancelled"
    assert (await read(first))[1].generated_tokens == 40
    assert {r.id: r.status for r in engine.requests()} == {"a": "done", "b": "cancelled"}
    outcomes = {status: n for (_, status), n in engine.tally.outcomes.items() if n}
    assert (outcomes, engine.tally.joined) == ({"done": 1, "cancelled": 1}, 1)


async def test_when_all_have_left_it_is_cancelled_and_kept(engine: Engine) -> None:
    both = [await engine.submit(job(name, max_tokens=4000)) for name in "ab"]
    assert await both[0].admitted(60) is not None
    for stream in both:
        await stream.aclose()
    reasons = {(await read(stream))[1].reason for stream in both}
    assert reasons == {"cancelled"}
    again = await engine.submit(job("c"))
    assert (await engine.request("c")).joined is None  # type: ignore[union-attr]
    assert (await read(again))[1].generated_tokens == 40


@pytest.mark.parametrize(
    "other",
    [{"session": "t"}, {"client": "curl"}, {"max_tokens": 41}, {"stop": ("x",)},
     {"sampling": Sampling(temperature=1.0)}, {"format": OutputFormat("json_object")},
     {"tool_choice": ToolChoice(required=True)}, {"thinking_budget": 9}],
    ids=str,
)  # fmt: skip
async def test_what_differs_is_computed_apart(engine: Engine, other: dict[str, Any]) -> None:
    first, second = await engine.submit(job("a")), await engine.submit(job("b", **other))
    ends = await asyncio.gather(read(first), read(second))
    assert engine.figures()["requests"]["total"] == 2
    assert sum(end.prompt_tokens - end.cached_tokens for _, end in ends) == 301  # one prefill


async def test_a_random_reply_is_shared_only_with_who_tries_again(engine: Engine) -> None:
    drawn: dict[str, Any] = {"sampling": Sampling(temperature=1.0), "max_tokens": 200}
    streams = [await engine.submit(job(name, **drawn)) for name in "ab"]
    streams.append(await engine.submit(job("c", **drawn, retry=True)))
    texts = [text for text, _ in await asyncio.gather(*map(read, streams))]
    assert texts[0] != texts[1]
    assert texts[2] == texts[0]
    assert engine.figures()["requests"]["total"] == 2


@pytest.mark.parametrize("length", [300, 2])
async def test_choices_of_one_request_share_one_prefill_however_short(
    engine: Engine, length: int
) -> None:
    """Two run at once, and the others wait; a queue of four does not refuse them."""
    ids = IDS[:length]
    streams = [
        await engine.submit(
            job(f"c{i}", ids, sampling=Sampling(1.0, seed=i), choice=i, max_tokens=8)
        )
        for i in range(7)
    ]
    replies = await asyncio.gather(*map(read, streams))
    assert len({text for text, _ in replies}) == 7
    assert replies[0][1].cached_tokens == 0
    assert {end.cached_tokens for _, end in replies[1:]} == {length - 1}


async def test_a_retry_of_several_samples_joins_each_of_them(engine: Engine) -> None:
    drawn: dict[str, Any] = {"sampling": Sampling(temperature=1.0), "max_tokens": 200}
    streams = [await engine.submit(job(f"a{i}", **drawn, choice=i)) for i in range(2)]
    streams += [await engine.submit(job(f"b{i}", **drawn, choice=i, retry=True)) for i in range(2)]
    texts = [text for text, _ in await asyncio.gather(*map(read, streams))]
    assert texts[0] != texts[1]
    assert texts[2:] == texts[:2]


async def test_choices_of_other_requests_are_samples_of_their_own(engine: Engine) -> None:
    """The second choice of a request of seed 5 has the seed of another's first choice."""
    seeded: dict[str, Any] = {"sampling": Sampling(temperature=1.0, seed=6)}
    streams = [await engine.submit(job("a", **seeded, choice=1))]
    streams += [await engine.submit(job("b", **seeded))]
    texts = [text for text, _ in await asyncio.gather(*map(read, streams))]
    assert texts[0] == texts[1]
    assert engine.figures()["requests"]["total"] == 2


async def test_a_request_whose_time_is_over_fails_and_is_kept(engine: Engine) -> None:
    stream = await engine.submit(job("a", max_tokens=60_000, timeout_s=0.4))
    with pytest.raises(DeadlineExceeded, match=r"0\.4 s"):
        await read(stream)
    again = await engine.submit(job("b"))
    assert (await read(again))[1].cached_tokens >= 299
    record = await engine.request("a")
    assert record is not None
    assert (record.status, record.finish_reason) == ("failed", "error")
    assert record.error is not None
    assert "0.4 s" in record.error


@pytest.mark.parametrize("early", ["a", "b"], ids=["first", "joined"])
async def test_one_readers_time_is_not_the_others(engine: Engine, early: str) -> None:
    def asked(name: str) -> Job:
        return job(name, max_tokens=400, timeout_s=0.01 if name == early else None)

    streams = {name: await engine.submit(asked(name)) for name in "ab"}
    with pytest.raises(DeadlineExceeded):
        await read(streams.pop(early))
    ((other, stream),) = streams.items()
    assert (await read(stream))[1].generated_tokens == 400
    records = {name: await engine.request(name) for name in "ab"}
    ends = {name: (r.status, r.finish_reason, r.error) for name, r in records.items() if r}
    assert ends[other] == ("done", "length", None)
    assert ends[early][:2] == ("failed", "error")
    assert "0.01 s" in (ends[early][2] or "")
    outcomes = {status: n for (_, status), n in engine.tally.outcomes.items() if n}
    assert (outcomes, engine.tally.joined) == ({"done": 1, "failed": 1}, 1)


async def test_the_servers_own_limit_holds_too(engine: Engine) -> None:
    engine.settings = replace(engine.settings, request_timeout=0.3)
    stream = await engine.submit(job("a", max_tokens=60_000, timeout_s=100.0))
    with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
        await read(stream)


async def test_a_session_has_half_of_the_queue(engine: Engine) -> None:
    def apart(name: str, session: str | None) -> Job:
        ids = np.random.default_rng(list(name.encode())).integers(10, 400, 60, np.int32)
        return job(name, token_ids(ids), max_tokens=30_000, session=session)

    held: list[Stream] = []
    for i in range(2):
        held.append(await engine.submit(apart(f"run{i}", f"run{i}")))
        assert await held[-1].admitted(60) is not None
    held += [await engine.submit(apart(f"wait{i}", "many")) for i in range(2)]
    with pytest.raises(TooMany) as refused:
        await engine.submit(apart("more", "many"))
    assert refused.value.retry_after >= 1
    held += [await engine.submit(apart(f"own{i}", f"own{i}")) for i in range(2)]
    with pytest.raises(QueueFull):
        await engine.submit(apart("last", "last"))
    for stream in held:
        await stream.aclose()
