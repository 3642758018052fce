"""The engine's part in a request: its readers, and the accounts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mlxcache.engine.engine import Engine
from mlxcache.engine.metrics import Records
from mlxcache.types import Finished, Job, Prompt, RequestRecord, Text, token_ids
from tests.engine.running import started


async def test_a_reply_ends_though_accounting_for_it_fails(toy, tmp_path: Path) -> None:
    seen = []

    def fail(record: RequestRecord) -> None:
        seen.append(record.id)
        raise OSError("no space left on device")

    async with started(
        toy("llama"), tmp_path, make=partial(Engine, records=Records(fail))
    ) as engine:
        prompt = Prompt(token_ids(range(10, 50)))
        events = [event async for event in await engine.submit(Job("r", prompt, max_tokens=2))]
    assert isinstance(events[-1], Finished)
    assert seen == ["r"]


async def test_a_reply_that_has_begun_shows_all_that_was_fed(toy, tmp_path: Path) -> None:
    """Cached and fed tokens add up to the prompt, also where it was one chunk."""
    async with started(toy("llama"), tmp_path) as engine:
        prompt = Prompt(token_ids(range(10, 150)))
        stream = await engine.submit(Job("r", prompt, max_tokens=400))
        async for event in stream:
            if isinstance(event, Text):
                break
        record = await engine.request("r")
        assert record is not None
        assert record.cached_tokens + record.fed_tokens == record.prompt_tokens == 140
        await stream.aclose()
