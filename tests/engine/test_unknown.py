"""A model whose cache class nobody knows is served, uncached, and its class is named."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from mlxcache.engine.engine import Engine
from mlxcache.types import Finished, Job, Prompt, Text, token_ids
from tests.engine.running import started


class StrangeCache(KVCache):
    """Does what a `KVCache` does; that cannot be known."""


async def reply(engine: Engine, name: str, ids: list[int]) -> tuple[str, int]:
    """A whole reply's text, and how many tokens of its prompt were cached."""
    job = Job(name, Prompt(token_ids(ids), (100,)), max_tokens=12, raw=True)
    text = ""
    async for event in await engine.submit(job):
        if isinstance(event, Text):
            text += event.text
        if isinstance(event, Finished):
            assert (event.prompt_tokens, event.generated_tokens) == (len(ids), 12)
            return text, event.cached_tokens
    raise AssertionError("it did not finish")


async def test_an_unknown_class_is_served_uncached_and_named(
    toy_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In RAM and on disk nothing is kept of it; replies are as ever."""
    ids = np.random.default_rng(1).integers(100, 400, 300).tolist()
    done = []
    for unknown in (False, True):
        if unknown:
            monkeypatch.setattr(
                llama.Model, "make_cache", lambda self: [StrangeCache() for _ in self.layers]
            )
        caplog.clear()
        caplog.set_level(logging.WARNING)
        async with started(toy_llama, tmp_path / str(unknown), disk="1GB") as engine:
            named = [r.getMessage() for r in caplog.records if "StrangeCache" in r.getMessage()]
            assert len(named) == unknown
            at_once = asyncio.gather(*(reply(engine, f"{i}", [*ids, i + 100]) for i in range(3)))
            again = [await reply(engine, f"r{i}", ids) for i in range(2)]
            done.append([*again, *await at_once])
            figures = engine.figures()
    cached, uncached = done
    assert [text for text, _ in uncached] == [text for text, _ in cached]
    assert cached[1][1] == 299
    assert [count for _, count in uncached] == [0] * 5
    assert (figures["segments"], figures["disk"]["used_bytes"]) == (0, 0)
