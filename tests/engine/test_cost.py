"""What forward passes cost, and in how long ones a prompt is fed therefore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlxcache.engine import cost
from mlxcache.engine.cost import SHORT, Cost, measure
from mlxcache.model import kv
from tests.conftest import ToyMaker
from tests.scheduled import Bench


class Timed:
    """A model that says how long each forward pass took."""

    def __init__(self, model: Any, seconds: Callable[[int], float]):
        self.model, self.seconds = model, seconds
        self.layers = model.layers
        self.now = 0.0

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.now += self.seconds(tokens.shape[1])
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


def test_what_takes_long_counts_at_once() -> None:
    learnt = Cost(64.0, 0.0, 0.0, 10_000.0)
    for tokens, seconds in ((1000, 10.0), (8, 99.0)):  # so few say nothing
        learnt.observe(tokens, seconds, 0)
        assert learnt.rate == pytest.approx(1 / (0.7e-4 + 0.3e-2))
