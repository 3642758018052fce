"""What forward passes cost, and in how long ones a prompt is fed therefore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.model import kv
from mlxcache.model.device import DeviceKind
from mlxcache.scheduling import cost
from mlxcache.scheduling.cost import SHORT, Cost, measure
from mlxcache.tree.budget import Budget
from tests.conftest import ToyMaker
from tests.scheduled import Bench


class Timed:
    """A model that says how long each forward pass took; the first of a length takes `first` more.

    `fed`: the lengths of its passes.
    """

    def __init__(self, model: Any, seconds: Callable[[int], float], first: float = 0.0):
        self.model, self.seconds, self.first = model, seconds, first
        self.layers = model.layers
        self.parameters, self.named_modules = model.parameters, model.named_modules
        self.now = 0.0
        self.fed: list[int] = []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        length = tokens.shape[1]
        self.now += self.seconds(length) + (0.0 if length in self.fed else self.first)
        self.fed.append(length)
        logits: mx.array = self.model(tokens, cache=cache)
        return logits

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "longest"),
    [(lambda n: 0.01 * n + n * n / 1e4, SHORT), (lambda n: 1.0 + 0.001 * n, 0)],
    ids=["by pairs", "by passes"],
)
def test_whether_long_passes_are_slow_is_measured(
    toy: ToyMaker,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[int], float],
    longest: int,
) -> None:
    model = Timed(mlx_lm.load(str(toy("llama")))[0], seconds)
    monkeypatch.setattr(cost, "time", model)
    monkeypatch.setattr(cost, "SCORES", -1.0)  # so that it is measured on every machine
    found = measure(model, kv.survey(model), 1 << 22)
    assert found.longest == longest
    assert found.rate == pytest.approx(cost.PROBE / seconds(cost.PROBE))


GPU_ROOM = 1 << 30
SMALL: dict[str, int] = {"layers": 2, "heads": 2, "kv_heads": 1, "hidden": 32}
"""Sizes for `toy`: passes of thousands of tokens take real time, too."""


def on_gpu(
    toy: ToyMaker,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[int], float],
    *,
    first: float = 0.0,
    room: int = GPU_ROOM,
    most: int = 2048,
) -> tuple[Cost, Timed]:
    """The costs of a model on a GPU that takes `seconds` for a pass."""
    model = Timed(mlx_lm.load(str(toy("llama", **SMALL)))[0], seconds, first)
    monkeypatch.setattr(cost, "time", model)
    return measure(model, kv.survey(model), room, kind="gpu", most=most), model


@pytest.mark.parametrize(
    ("seconds", "best", "longest"),
    [
        (lambda n: 0.01 + n * 1e-4, 2048, 0),
        (lambda n: 0.01 + n * 1e-4 + n * n * 2e-7, 512, 512),
        (lambda n: 0.05 + n * 1e-4 + n * n * 5e-8, 1024, 1024),
        (lambda n: 0.001 + n * 1e-4, 2048, 0),
    ],
    ids=["long passes win", "short passes win", "those between win", "all are alike"],
)
def test_passes_on_a_gpu_are_as_long_as_was_measured_fastest(
    toy: ToyMaker,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[int], float],
    best: int,
    longest: int,
) -> None:
    """And not short ones because scores are materialised."""
    found, model = on_gpu(toy, monkeypatch, seconds)
    assert {512, 1024, 2048} <= set(model.fed)
    assert cost.SHORT not in model.fed
    assert found.longest == longest
    assert found.rate == pytest.approx(best / seconds(best))
    chunk = found.chunk(0, bytes_=1 << 40, seconds=1.9 * 1024 / found.rate, most=4096)
    assert chunk == (chunk // longest * longest if longest else int(1.9 * 1024))
    assert found.step(chunk) == (longest or chunk)
    assert found.step(100) == 100


def test_the_time_to_compile_kernels_is_not_taken_for_that_of_a_pass(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(n: int) -> float:
        return 0.01 + n * 1e-4

    found, _ = on_gpu(toy, monkeypatch, seconds, first=0.7)
    assert found.rate == pytest.approx(2048 / seconds(2048))
    assert found.longest == 0
    model = Timed(mlx_lm.load(str(toy("llama")))[0], seconds, 0.7)
    monkeypatch.setattr(cost, "time", model)
    on_cpu = measure(model, kv.survey(model), 1 << 22)
    assert on_cpu.rate == pytest.approx(cost.PROBE / seconds(cost.PROBE))


def test_a_slow_gpu_compares_no_passes_that_would_delay_the_start(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are then limited by their time alone."""
    found, model = on_gpu(toy, monkeypatch, lambda n: n / 100)
    assert max(model.fed) < 512
    assert found.longest == 0
    assert found.rate == pytest.approx(100)
    medium, model = on_gpu(toy, monkeypatch, lambda n: n / 600)
    assert 512 in model.fed
    assert 1024 not in model.fed
    assert medium.longest == 0


@pytest.mark.parametrize(("room", "most"), [(GPU_ROOM, 1024), (1 << 25, 2048)])
def test_passes_that_memory_or_the_longest_chunk_rule_out_are_not_compared(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch, room: int, most: int
) -> None:
    found, model = on_gpu(toy, monkeypatch, lambda n: 0.01 + n * 1e-4, room=room, most=most)
    assert 512 in model.fed
    assert max(model.fed) <= 1024
    assert found.transient(max(model.fed), 0) <= room


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_no_pass_is_longer_than_mlx_computes_rightly(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch, kind: DeviceKind
) -> None:
    """Whatever the longest chunk is, also while passes are measured."""
    model = Timed(mlx_lm.load(str(toy("llama")))[0], lambda n: 0.01)
    monkeypatch.setattr(cost, "time", model)
    monkeypatch.setattr(cost, "longest_pass", lambda model: 600)
    found = measure(model, kv.survey(model), 1 << 30, kind=kind, most=8192)
    assert max(model.fed) <= 600
    assert found.step(8192) <= 600


def test_on_a_gpu_rows_share_the_weights_that_a_step_reads(
    bench: Bench, rng: np.random.Generator
) -> None:
    """Rows of other lengths too, while their padding is less than the weights."""
    prompts = [rng.integers(10, 400, n).tolist() for n in (40, 400)]
    expected = [bench.cold(ids) for ids in prompts]
    row = bench.kv.layout.row_bytes
    padding = row(420) - row(30)
    for shared, rows in ((0, 1), (padding // 4, 1), (padding, 2)):
        bench.cost.shared_bytes = shared
        bench.use(KVCache.open(bench.kv.layout, Budget(1 << 30)))
        tasks = [bench.put(ids) for ids in prompts]
        most = 0
        while not all(task.over for task in tasks):
            bench.tick()
            most = max([most, *(len(lane.tasks) for lane in bench.scheduler.lanes.all)])
        assert most == rows
        assert [task.out for task in tasks] == expected


def test_a_row_that_would_pad_the_others_does_not_join_on_their_account(
    bench: Bench, rng: np.random.Generator
) -> None:
    """Many short rows save weights together, which one long row must not use up."""
    prompts = [rng.integers(10, 400, n).tolist() for n in (40, 40, 40, 40, 40, 400)]
    row = bench.kv.layout.row_bytes
    bench.cost.shared_bytes = 2 * (row(420) - row(30))
    bench.use(KVCache.open(bench.kv.layout, Budget(1 << 30)))
    tasks = [bench.put(ids) for ids in prompts]
    most = 0
    while not all(task.over for task in tasks):
        bench.tick()
        most = max([most, *(len(lane.tasks) for lane in bench.scheduler.lanes.all)])
    assert most == 5


def test_passes_are_even_and_none_is_too_long() -> None:
    short = Cost(64.0, 0.0, 0.0, 1e6, longest=192)
    for size in (1, 150, 192, 193, 400, 767, 2048):
        step = short.step(size)
        assert step <= 192
        assert size / step > -(-size // 192) - 1
    assert short.step(200) == 100
    assert Cost(64.0, 0.0, 0.0, 1e6).step(2048) == 2048


def test_a_chunk_in_short_passes_needs_no_more_room_than_its_last_one() -> None:
    whole = Cost(0.0, 4.0, 0.0, 1e6)
    short = Cost(0.0, 4.0, 0.0, 1e6, longest=128)
    room = whole.transient(512, 1000)
    assert whole.chunk(1000, bytes_=room, seconds=9.0, most=2048) == 512
    assert short.chunk(1000, bytes_=room, seconds=9.0, most=2048) == 2048
    assert short.peak(2048, 1000) == whole.transient(128, 1000 + 1920)


def test_a_prompt_fed_in_short_passes_is_continued_the_same(
    bench: Bench, rng: np.random.Generator
) -> None:
    prompt = rng.integers(10, 400, 150).tolist()
    lengths: list[int] = []
    model = bench.scheduler.prefill.model

    def watched(tokens: mx.array, cache: Any) -> mx.array:
        lengths.append(tokens.shape[1])
        logits: mx.array = model(tokens, cache=cache)
        return logits

    bench.cost.longest = 24
    bench.scheduler.prefill.model = watched
    assert bench.ask(prompt).out == bench.cold(prompt)
    assert max(lengths) <= 24


def test_a_chunk_far_into_a_prompt_is_as_short_as_tokens_are_slow_there() -> None:
    """Also after many short prompts, whose tokens take a fortieth of the time."""
    learnt = Cost(64.0, 0.0, 0.0, 10_000.0)

    def chunk(cached: int) -> int:
        return learnt.chunk(cached, bytes_=1 << 40, seconds=0.4, most=2048)

    assert chunk(0) == 2048
    at = 0
    while at < 40_000:
        size = chunk(at)
        seconds = size * (1e-4 + (at + size / 2) * 1e-7)
        assert seconds < 2 * 0.4
        learnt.observe(size, seconds, at)
        at += size
        for _ in range(20):
            learnt.observe(200, 0.02, 0)
    assert chunk(0) == 2048
    assert 60 < chunk(40_000) < 200


def test_the_time_that_is_left_follows_the_speed_at_each_position() -> None:
    """After one chunk from the growth measured when the model was loaded, later from the prompt."""

    def true(start: float, stop: float) -> float:
        return 1e-4 * (stop - start) * (1 + 1e-4 * (start + stop) / 2)

    learnt = Cost(64.0, 0.0, 0.0, 10_000.0, growth=1e-4)
    assert learnt.seconds(0, 30_000) == pytest.approx(true(0, 30_000), rel=0.1)
    assert learnt.seconds(20_000, 30_000) == pytest.approx(true(20_000, 30_000), rel=0.15)
    slower = 3.0  # than it was when the model was loaded
    for at in range(0, 8192, 1024):
        learnt.observe(1024, slower * true(at, at + 1024), at)
    expected = slower * true(8192, 30_000)
    assert learnt.seconds(8192, 30_000) == pytest.approx(expected, rel=0.2)
    assert learnt.seconds(5_000, 5_000) == 0.0


def test_what_takes_long_counts_at_once() -> None:
    learnt = Cost(64.0, 0.0, 0.0, 10_000.0)
    for tokens, seconds in ((1000, 10.0), (8, 99.0)):  # so few say nothing
        learnt.observe(tokens, seconds, 0)
        assert learnt.rate == pytest.approx(1 / (0.7e-4 + 0.3e-2))
