"""Warm equals cold, token for token, whatever was reused and whoever ran beside."""

from __future__ import annotations

import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.tree.budget import Budget
from tests.scheduled import Bench, admitted, finished


def prompt(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(10, 400, n)]


def test_a_cold_reply_is_mlx_lms(bench: Bench, rng: np.random.Generator) -> None:
    ids = prompt(rng, 301)
    assert bench.ask(ids).out == bench.cold(ids)


def test_the_next_turn_feeds_only_what_is_new(bench: Bench, rng: np.random.Generator) -> None:
    ids = prompt(rng, 300)
    first = bench.ask(ids, marks=[100, 296])
    for _ in range(3):
        ids = ids + first.out + prompt(rng, 40)
        last = len(ids) - 4
        task = bench.ask(ids, marks=[100, last - 36, last])
        assert admitted(task).cached_tokens >= len(ids) - 40 - len(first.out)
        assert task.out == bench.cold(ids)
        first = task


def test_an_edited_message_keeps_what_came_before_it(
    bench: Bench, rng: np.random.Generator
) -> None:
    head, a, b = prompt(rng, 200), prompt(rng, 60), prompt(rng, 60)
    bench.ask(head + a, marks=[200])
    task = bench.ask(head + b, marks=[200])
    assert admitted(task).cached_tokens == 200
    assert task.out == bench.cold(head + b)
    again = bench.ask(head + a, marks=[200])
    assert admitted(again).cached_tokens >= (259 if not bench.kv.layout.opaque else 200)
    assert again.out == bench.cold(head + a)


def test_the_same_prompt_again_leaves_one_token_to_feed(
    bench: Bench, rng: np.random.Generator
) -> None:
    ids = prompt(rng, 150)
    first = bench.ask(ids, marks=[140])
    task = bench.ask(ids, marks=[140])
    assert task.out == first.out
    assert admitted(task).cached_tokens == (140 if bench.kv.layout.opaque else 149)


def test_rows_batched_together_equal_themselves_alone(
    bench: Bench, rng: np.random.Generator
) -> None:
    prompts = [prompt(rng, n) for n in (180, 190, 200, 205, 60)]
    tasks = [bench.put(ids, tokens=40 + 7 * i) for i, ids in enumerate(prompts)]
    batched = 0
    while bench.scheduler.waiting or bench.scheduler.prefilling or len(bench.scheduler.lanes):
        bench.tick()
        bench.check()
        batched = max([batched, *(len(ln.tasks) for ln in bench.scheduler.lanes.all)])
    assert batched >= 3
    for i, (ids, task) in enumerate(zip(prompts, tasks, strict=True)):
        assert finished(task).reason == "length"
        assert task.out == bench.cold(ids, 40 + 7 * i)
        longer = ids + task.out + prompt(rng, 10)
        assert bench.ask(longer).out == bench.cold(longer)


def test_a_cancelled_prefill_is_continued_by_the_retry(
    bench: Bench, rng: np.random.Generator
) -> None:
    ids = prompt(rng, 400)
    task = bench.put(ids)
    bench.run(until=lambda: bool(task.lease and task.lease.lineage.length >= 192))
    bench.scheduler.cancel(task)
    assert finished(task).reason == "cancelled"
    retry = bench.ask(ids)
    assert admitted(retry).cached_tokens >= 192
    assert retry.out == bench.cold(ids)


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
    small = Bench.__new__(Bench)
    small.__dict__ |= bench.__dict__
    from mlxcache.cache.kv_cache import KVCache
    from mlxcache.tree.budget import Budget

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
