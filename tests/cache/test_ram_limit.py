"""`--ram` is a hard limit: what MLX itself holds, sampled by an outside thread, stays below it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.errors import ContextLengthExceeded, ModelError, QueueFull
from mlxcache.types import Finished, Job, Prompt, token_ids
from tests.memory import rounding_bytes
from tests.sampler import Sampler

LIMIT = 24_000_000


def held() -> int:
    """What MLX holds, active and in its pool."""
    return mx.get_active_memory() + mx.get_cache_memory()


async def ask(engine: Engine, ids: list[int], tokens: int, name: str) -> Finished:
    prompt = Prompt(token_ids(ids), (len(ids) - 4,))
    job = Job(name, prompt, max_tokens=tokens, session=name)
    async with await engine.submit(job) as stream:
        events = [event async for event in stream]
    assert isinstance(events[-1], Finished)
    return events[-1]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.slow),
        "qwen3_5",
    ],
)
async def test_growing_conversations_stay_within_the_limit(
    toy_paths: dict[str, Path], family: str
) -> None:
    before = mx.get_active_memory()
    engine = Engine(Settings(model=str(toy_paths[family]), ram=LIMIT, queue=64))
    await engine.start()
    weights = mx.get_active_memory() - before
    rng = np.random.default_rng(5)
    chats = [rng.integers(10, 400, 300).tolist() for _ in range(12)]
    with Sampler(held, 0.002) as sampler:
        for turn in range(3):
            replies = await asyncio.gather(
                *(ask(engine, ids, 8, f"{turn}-{i}") for i, ids in enumerate(chats))
            )
            assert all(reply.reason in ("length", "stop") for reply in replies)
            chats = [ids + rng.integers(10, 400, 300).tolist() for ids in chats]
    figures = engine.figures()
    await engine.stop()
    pages = rounding_bytes(figures["ram"]["buffers"])
    assert sampler.most - before - weights <= LIMIT + pages
    assert figures["ram"]["high_water_bytes"] <= LIMIT
    assert sum(figures["evictions"].values()) > 0


async def test_a_prompt_that_can_never_fit_is_refused_at_once(toy_paths: dict[str, Path]) -> None:
    engine = Engine(Settings(model=str(toy_paths["llama"]), ram=LIMIT))
    await engine.start()
    with pytest.raises(ContextLengthExceeded, match="--ram"):
        await ask(engine, [20] * 60_000, 8, "huge")
    assert engine.requests()[0].status == "rejected"
    assert engine.info is not None
    longest = engine.info.context_length - 1
    with pytest.raises(ContextLengthExceeded, match=f"{longest + 1} tokens > {longest} maximum"):
        await ask(engine, [20] * (longest + 1), 8, "longer")
    assert (await ask(engine, [20] * 50, 8, "small")).reason == "length"
    await engine.stop()


def long_job(name: str) -> Job:
    """No two of these ask the same."""
    seed = int.from_bytes(name.encode(), "big") % 1000
    ids = token_ids(np.random.default_rng(seed).integers(10, 400, 390, np.int32))
    return Job(name, Prompt(ids), max_tokens=200)


@pytest.mark.slow
async def test_a_full_queue_says_so(toy_paths: dict[str, Path]) -> None:
    engine = Engine(Settings(model=str(toy_paths["llama"]), concurrency=1, queue=2))
    await engine.start()
    streams = [await engine.submit(long_job(name)) for name in ("first", "second")]
    with pytest.raises(QueueFull) as caught:
        await engine.submit(long_job("one too many"))
    assert caught.value.retry_after > 0
    for stream in streams:
        await stream.aclose()
    await engine.stop()


async def test_a_budget_without_room_for_a_prompt_is_refused_at_start(
    toy_paths: dict[str, Path],
) -> None:
    engine = Engine(Settings(model=str(toy_paths["llama"]), ram=100_000))
    with pytest.raises(ModelError, match="--ram 100000"):
        await engine.start()
