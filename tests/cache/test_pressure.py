"""The cache gives memory up while the machine is short of it, and takes it back afterwards."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.pressure import (
    CALM_S,
    PARTS,
    STEP_S,
    TRIM_S,
    Brake,
    Pressure,
)
from mlxcache.cache.ram import BufferCount
from mlxcache.cache.shared_ram import WITHHELD
from mlxcache.config.memory import NO_PRESSURE, MemoryPressure, PressureLevel
from mlxcache.tree.budget import Budget
from tests.scheduled import Bench
from tests.scheduling.test_prefill import Clock

RAM = 40_000_000
SHORT = MemoryPressure(PressureLevel.WARNING, "somebody says so")


def filled(path: Path, conversations: int = 12, ram: int = RAM) -> Bench:
    """A bench whose tree holds some conversations."""
    bench = Bench(path)
    bench.use(KVCache.open(bench.kv.layout, Budget(ram)))
    rng = np.random.default_rng(5)
    for _ in range(conversations):
        bench.ask(rng.integers(10, 400, 300).tolist(), tokens=4)
    return bench


def test_it_goes_down_in_steps_and_comes_back_later() -> None:
    brake, now, said = Brake(), 0.0, []
    while now < 3 * STEP_S:
        said.append(brake.update(PressureLevel.WARNING, now))
        now += 1
    assert said == [1] * 5 + [2] * 5 + [3] * 5
    assert [brake.update(PressureLevel.NORMAL, now + i) for i in range(int(CALM_S) - 2)] == [3] * 28
    assert brake.update(PressureLevel.NORMAL, now + CALM_S) == 2
    assert brake.update(PressureLevel.NORMAL, now + CALM_S + 1) == 2
    assert brake.update(PressureLevel.NORMAL, now + 2 * CALM_S) == 1


def test_what_comes_and_goes_holds_it_down() -> None:
    """Or the cache would breathe with every wave."""
    brake = Brake()
    waves = [brake.update(PressureLevel(int(now) % 20 == 0), now) for now in np.arange(0.0, 300.0)]
    assert waves == sorted(waves)
    assert waves[-1] == PARTS // 2


def test_a_critical_machine_leaves_an_eighth() -> None:
    brake = Brake()
    assert max(brake.update(PressureLevel.CRITICAL, now) for now in np.arange(0.0, 60.0)) == 7


def test_the_cache_shrinks_at_once_and_grows_again(
    toy_paths: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    bench = filled(toy_paths["llama"])
    budget, room, clock = bench.kv.budget, bench.kv.ram.shared, Clock()
    strain = SHORT
    watch = Pressure(
        room, lambda action: action(), base=0, weights=0, look=lambda: strain, measure=lambda: 1,
        clock=clock,
    )  # fmt: skip
    caplog.set_level(logging.INFO, "mlxcache.engine")
    for _ in range(60):
        clock.wait(1.0)
        watch.step()
        bench.check()
    withheld = budget.by_kind()[WITHHELD]
    assert withheld == RAM // 2
    assert budget.used <= RAM
    assert len(caplog.messages) == 4
    assert all("somebody says so" in message for message in caplog.messages)
    assert watch.figures()["level"] == "warning"
    bench.ask(range(20, 220), tokens=4)
    strain = NO_PRESSURE
    for _ in range(int(5 * CALM_S)):
        clock.wait(1.0)
        watch.step()
    assert budget.by_kind()[WITHHELD] == 0
    assert watch.figures()["level"] == "normal"
    assert len(caplog.messages) == 8


def test_a_process_that_takes_more_than_it_may_gives_some_up(toy_paths: dict[str, Path]) -> None:
    bench = Bench(toy_paths["llama"])
    taken, clock = 10**9, Clock()
    watch = Pressure(
        bench.kv.ram.shared, lambda action: action(), base=10**9, weights=10**9,
        look=lambda: NO_PRESSURE, measure=lambda: taken, clock=clock,
    )  # fmt: skip
    watch.step()
    before = watch.seen.level
    taken = watch.seen.expected + 300 * 2**20
    watch.step()
    assert (before, watch.seen.level) == (PressureLevel.NORMAL, PressureLevel.WARNING)
    assert bench.kv.budget.by_kind()[WITHHELD] > 0


def test_what_nothing_uses_goes_back_to_the_system(toy_paths: dict[str, Path]) -> None:
    """Now and then, whether memory is short or not."""
    bench, clock = Bench(toy_paths["llama"]), Clock()
    given: list[float] = []
    watch = Pressure(
        bench.kv.ram.shared, lambda action: action(), base=0, weights=0, look=lambda: NO_PRESSURE,
        measure=lambda: 1, trim=lambda: given.append(clock()), clock=clock,
    )  # fmt: skip
    for _ in range(95):
        clock.wait(1.0)
        watch.step()
    assert len(given) == 3
    assert given[2] - given[1] == given[1] - given[0] == TRIM_S


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_what_is_in_use_stays(toy_paths: dict[str, Path], family: str) -> None:
    """A reply goes on to its end, with the tokens that it would have had."""
    bench = filled(toy_paths[family], 4)
    ids = np.random.default_rng(6).integers(10, 400, 500).tolist()
    task = bench.put(ids, tokens=40)
    bench.run(until=lambda: len(task.out) > 5)
    bench.kv.ram.shared.withhold(RAM)
    bench.check()
    assert bench.kv.budget.free == 0
    bench.kv.ram.shared.withhold(RAM // 2)
    bench.run()
    assert task.out == bench.cold(ids, 40)


def test_a_reply_that_ends_under_pressure_leaves_its_checkpoint(toy_paths: dict[str, Path]) -> None:
    """The next turn continues from there; no more memory is used than before the reply ended."""
    bench = Bench(toy_paths["qwen3_5"])
    ids = np.random.default_rng(6).integers(10, 400, 500).tolist()
    task = bench.put(ids, tokens=40)
    bench.run(until=lambda: len(task.out) > 5)
    bench.kv.ram.shared.withhold(bench.kv.budget.limit)
    assert bench.kv.budget.free == 0
    bench.run()
    assert bench.kv.budget.free >= bench.kv.layout.running_bytes - bench.kv.layout.checkpoint_bytes
    following = bench.ask([*ids, *task.out, *ids[:20]], tokens=4)
    assert following.record.cached_tokens >= len(ids) + 39
    assert following.out == bench.cold(following.ids.tolist(), 4)


def test_a_request_that_needs_it_has_it(toy_paths: dict[str, Path]) -> None:
    """Better a slow machine than a prompt that is refused for good."""
    bench = filled(toy_paths["llama"], 2)
    bench.kv.ram.shared.withhold(RAM)
    ids = list(range(20, 300))
    assert bench.ask(ids, tokens=6).out == bench.cold(ids, 6)


def test_a_request_that_needs_it_keeps_its_own_prefix(toy_paths: dict[str, Path]) -> None:
    """Memory that was withheld is used before KV is evicted."""
    bench = Bench(toy_paths["llama"])
    ids = np.random.default_rng(9).integers(10, 400, 900).tolist()
    bench.ask(ids[:300], tokens=2)
    bench.kv.ram.shared.withhold(bench.kv.budget.free)
    assert bench.kv.budget.free == 0
    task = bench.ask(ids, tokens=4)
    assert task.record.cached_tokens >= 300
    assert task.out == bench.cold(ids, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_buffers_are_bounded_as_bytes_are(toy_paths: dict[str, Path], family: str) -> None:
    bench = Bench(toy_paths[family])
    room = bench.kv.ram
    one = BufferCount(bench.kv.layout, None)
    room.buffers = BufferCount(bench.kv.layout, 40 * one.per_lineage)
    assert room.buffers.limit is not None
    rng = np.random.default_rng(8)
    for _ in range(40):
        ids = rng.integers(10, 400, 90).tolist()
        task = bench.ask(ids, tokens=3)
        assert room.count_buffers() <= room.buffers.limit + one.per_lineage
    assert room.dropped > 0
    assert task.out == bench.cold(ids, 3)
    again = bench.ask([*ids, *task.out, 5, 6], tokens=3)
    assert again.record.cached_tokens > 0
