"""Warm equals cold, token for token, whatever was reused and whoever ran beside."""

from __future__ import annotations

import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.tree.budget import Budget
from tests.scheduled import Bench, admitted, prompt


def test_a_cancelled_reply_is_kept(bench: Bench, rng: np.random.Generator) -> None:
    ids = prompt(rng, 100)
    task = bench.put(ids, tokens=500)
    bench.run(until=lambda: len(task.out) >= 30)
    bench.scheduler.cancel(task)
    longer = ids + task.out + prompt(rng, 5)
    again = bench.ask(longer)
    assert admitted(again).cached_tokens == len(ids) + len(task.out)
    assert again.out == bench.cold(longer)


def test_a_shared_prefix_is_held_once(bench: Bench, rng: np.random.Generator) -> None:
    head = prompt(rng, 512)
    for _ in range(8):
        bench.ask(head + prompt(rng, 30), marks=[512], tokens=5)
    assert bench.kv.tree.tokens == 512 + 8 * 35


def test_two_requests_at_once_compute_their_common_head_once(
    bench: Bench, rng: np.random.Generator
) -> None:
    head = prompt(rng, 512)
    tasks = [bench.put(head + prompt(rng, 30), marks=[512]) for _ in range(3)]
    bench.run()
    assert [admitted(t).cached_tokens >= 448 for t in tasks] == [False, True, True]
    for task in tasks:
        assert task.out == bench.cold(task.ids.tolist())


@pytest.mark.parametrize("ram_tokens", [700, 1100])
def test_a_small_budget_is_never_exceeded(
    bench: Bench, rng: np.random.Generator, ram_tokens: int
) -> None:
    layout = bench.kv.layout
    ram = ram_tokens * layout.bytes_per_token + 40 * layout.checkpoint_bytes
    small = bench.twin()
    small.use(KVCache.open(layout, Budget(ram)))
    chats = [prompt(rng, 50) for _ in range(5)]
    for _ in range(4):
        tasks = [small.put(c, tokens=8, marks=[len(c) - 4]) for c in chats]
        small.run()
        for i, task in enumerate(tasks):
            assert task.out == small.cold(chats[i], 8)
            chats[i] = chats[i] + task.out + prompt(rng, 12)
    assert small.kv.budget.high_water <= ram


def test_figures_are_updated_seldom_while_a_reply_is_decoded_and_at_its_end(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxcache.scheduling.scheduler.PUBLISH_S", 3600.0)
    seen: list[int] = []
    cache = KVCache.open(bench.kv.layout, Budget(1 << 30))
    bench.use(cache, on_tick=lambda: seen.append(len(bench.scheduler.lanes)))
    ticks = bench.ask(prompt(rng, 50), tokens=40)
    assert len(ticks.out) == 40
    assert seen.count(1) == 1
    assert seen[-1] == 0
