"""What many requests leave behind is what a tenth of them leaves behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from mlxcache.config import Settings
from mlxcache.config.memory import read_footprint
from mlxcache.config.models import ModelEntry
from mlxcache.engine.engine import Engine
from mlxcache.engine.models import Models
from mlxcache.types import Finished, Job, Prompt, token_ids
from tests.conftest import ToyMaker
from tests.engine.running import started

TALKS = 30
"""More conversations than the budget holds, so that it is full from the first round on."""

RAM = {"llama": 10_000_000, "gemma3": 12_000_000, "qwen3_5": 12_000_000}


async def turn(engine: Engine, number: int) -> None:
    """One of the conversations goes on, or begins again once it is long."""
    talk, step = number % TALKS, number // TALKS % 3
    rng = np.random.default_rng((talk, 1))
    ids = token_ids(rng.integers(10, 400, 140 + 30 * step).astype(np.int32))
    stream = await engine.submit(Job(f"t{number}", Prompt(ids), max_tokens=4, session=f"s{talk}"))
    if number % 7 == 3:
        await stream.aclose()
    async for event in stream:
        if isinstance(event, Finished):
            return


async def figures(engine: Engine) -> dict[str, Any]:
    """What is held, once nothing is on its way anywhere."""

    def settled(core: Any) -> dict[str, Any]:
        mx.clear_cache()
        budget = core.kv.budget.by_kind()
        assert budget["states"] == 0
        assert not core.kv.ram.busy
        assert core.kv.budget.used <= core.kv.budget.limit
        room, tree = core.kv.ram, core.kv.tree
        assert {id(value) for value in tree.values()} == set(room.idle), "held without a use"
        assert budget["kv"] == sum(lineage.nbytes for lineage in room.idle.values())
        assert budget["checkpoints"] == tree.checkpoint_bytes
        return {"mlx": mx.get_active_memory(), "evicted": room.dropped + room.spilled}

    found = await engine.call(settled)
    gc.collect()
    process = psutil.Process()
    return found | {
        "files": process.num_fds(),
        "threads": threading.active_count(),
        "live": len(engine._requests),
        "process": read_footprint(),
    }


async def compared(path: Path, tmp_path: Path, few: int, many: int, slack: int) -> None:
    """Compare what is held after `few` requests with what is held after `many`.

    The number of buffers swings by a third around its mean as short ends of conversations come and
    go: a budget holds more of them than of long ones. So means over a third of the requests are
    compared, which is about one cycle of the conversations and of those that are cancelled.
    """
    ram = RAM[path.name]
    third = (many - few) // 3
    buffers: list[int] = []
    gc.collect()  # what earlier tests held
    async with started(path, tmp_path, ram=ram) as engine:
        for number in range(few):
            await turn(engine, number)
        before = await figures(engine)
        for number in range(few, many):
            await turn(engine, number)
            buffers.append(await engine.call(lambda core: core.kv.ram.count_buffers()))
        after = await figures(engine)
        assert len(engine.requests()) == min(many, 1000)
    assert before["evicted"] > 0, "the budget was not full"
    assert abs(after["mlx"] - before["mlx"]) < ram // 8, (before, after)
    first, last = fmean(buffers[:third]), fmean(buffers[-third:])
    assert abs(last - first) <= first / 5 + 16
    assert after["files"] <= before["files"] + 2
    assert after["threads"] <= before["threads"] + 2
    assert after["live"] == before["live"] == 0
    assert after["process"] - before["process"] < slack, (before, after)


@pytest.mark.parametrize("family", ["llama"])
async def test_after_300_requests_no_more_is_held_than_after_60(
    toy_paths: dict[str, Path], tmp_path: Path, family: str
) -> None:
    await compared(toy_paths[family], tmp_path, 60, 300, 40 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
async def test_after_2000_requests_no_more_is_held_than_after_200(
    toy_paths: dict[str, Path], tmp_path: Path, family: str
) -> None:
    await compared(toy_paths[family], tmp_path, 200, 2000, 60 << 20)


IDLE_S = 0.05


async def unloaded(models: Models) -> dict[str, Any]:
    """What is held once all models are unloaded and their KV is on disk alone."""
    end = time.monotonic() + 60
    while any(one["state"] != "unloaded" for one in models.describe()) or any(
        [await engine.call(lambda core: core.kv.ram.idle_bytes) for engine in models.engines]
    ):
        assert time.monotonic() < end, models.describe()
        await asyncio.sleep(0.02)
    gc.collect()
    process = psutil.Process()
    return {
        "mlx": await models.default.call(lambda core: mx.get_active_memory()),
        "cached": await models.default.call(lambda core: mx.get_cache_memory()),
        "budget": models.figures().get("memory", {}).get("used_bytes", 0),
        "files": process.num_fds(),
        "threads": threading.active_count(),
        "process": read_footprint(),
    }


async def reloaded(paths: list[Path], folder: Path, few: int, many: int, slack: int) -> None:
    """Compare what is held after `few` unloads of each model with that after `many`."""
    entries = tuple(ModelEntry(str(path), name=path.parent.name) for path in paths)
    settings = Settings(
        models=entries if len(entries) > 1 else (),
        model=entries[0].model,
        ram=400_000_000,
        idle_unload=IDLE_S,
        cache_dir=folder,
    )
    models, found = Models(settings), []
    await models.start()
    try:
        talks = {entry.label: list(range(100, 400)) for entry in entries}
        for number in range(many):
            for label, ids in talks.items():
                engine = await models.of(label)
                prompt = Prompt(token_ids(ids))
                stream = await engine.submit(Job(f"{label}{number}", prompt, max_tokens=4))
                ended = [event async for event in stream if isinstance(event, Finished)]
                assert ended
                record = engine.requests()[0]
                assert record.id == f"{label}{number}"
                if number:
                    assert record.fed_tokens <= 5 + 64, record
                    assert record.restored_tokens >= len(ids) - 5 - 64, record
                ids += [10 + number, 11, 12, 13]
            found.append(await unloaded(models))
        assert all(one["unloads"] >= many for one in models.describe())
    finally:
        await models.stop()
    after, before = found[-1], found[few]
    print(f"\n{len(paths)} models, after {few} and {many} unloads: {before} {after}")
    assert abs(after["mlx"] - before["mlx"]) < 1_000_000, (before, after)
    assert after["cached"] <= before["cached"] + 1_000_000, (before, after)
    assert after["budget"] == before["budget"]
    assert after["files"] <= before["files"] + 2
    assert after["threads"] <= before["threads"] + 2
    assert after["process"] - before["process"] < slack, (before, after)


@pytest.mark.slow
@pytest.mark.parametrize("families", [("llama",), ("llama", "qwen3_5")])
async def test_fifty_unloads_and_reloads_leak_nothing(
    toy: ToyMaker, tmp_path: Path, families: tuple[str, ...]
) -> None:
    """With 30 MB of weights each, so that one copy that stays would be seen."""
    paths = [toy(family, intermediate=10_000) for family in families]
    await reloaded(paths, tmp_path, 10, 50, 30 << 20)
