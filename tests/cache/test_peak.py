"""What a turn takes at its worst moment, against the same tokens fed into a cache of one's own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.engine.task import Task
from tests.scheduled import Bench
from tests.toys.toy import make_toy

CHUNK = 128
LENGTH = 2000
NEW = 300
REPLY = 30
RUNS = 5
SHARE = 1.15
"""By how much a turn may exceed a private cache."""

SHAPE: dict[str, Any] = {
    "hidden": 128,
    "layers": 2,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "window": 512,
}


@pytest.fixture(scope="module", params=["llama", "gemma3", "nemotron_h"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Dense, with windows, and with states."""
    path = tmp_path_factory.mktemp(request.param) / "toy"
    bench = Bench(make_toy(path, request.param, **SHAPE), chunk=CHUNK)
    bench.ask(text(1, 500))  # the memory that any first pass takes is there
    return bench.twin()


def text(seed: int, length: int) -> list[int]:
    """Random tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(10, 400, length)]


def above(action: Callable[[], Any]) -> int:
    """By how many bytes MLX's peak during `action` is above what was resident before."""
    gc.collect()
    mx.clear_cache()
    resident = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    return mx.get_peak_memory() - resident


def feed(model: Any, cache: list[Any], ids: Sequence[int]) -> mx.array:
    """Feed a private cache in chunks; the logits of the last token."""
    for start in range(0, len(ids), CHUNK):
        logits = model(mx.array([ids[start : start + CHUNK]]), cache=cache)[:, -1]
        mx.eval([c.state for c in cache])
    return logits


def private(bench: Bench, known: Sequence[int], new: Sequence[int], reply: int) -> int:
    """The peak of feeding `new` and drawing a reply, above a private cache that has `known`.

    The median of several: MLX allocates ahead of the thread that computes, by more or less.
    """
    return int(median(_private(bench, known, new, reply) for _ in range(RUNS)))


def _private(bench: Bench, known: Sequence[int], new: Sequence[int], reply: int) -> int:
    cache = make_prompt_cache(bench.model)
    feed(bench.model, cache, known)

    def turn() -> None:
        feed(bench.model, cache, new[:-1])
        token = mx.array([[new[-1]]])
        for _ in range(reply):
            token = mx.argmax(bench.model(token, cache=cache)[:, -1:], axis=-1)
            mx.eval(token)

    return above(turn)


def measured(bench: Bench, ids: list[int]) -> tuple[Task, int, int]:
    """A request, its peak, and the peak of a private cache that has what it had."""
    tasks: list[Task] = []
    marks = (LENGTH // 2, len(ids) - 3)
    ours = above(lambda: tasks.append(bench.ask(ids, tokens=REPLY, marks=marks)))
    (task,) = tasks
    cached = task.record.cached_tokens
    return task, ours, private(bench, ids[:cached], ids[cached:], REPLY)


@pytest.mark.slow
def test_turns_and_branches_take_little_more_than_a_private_cache(bench: Bench) -> None:
    ids = text(2, LENGTH)
    task = bench.ask(ids, tokens=REPLY, marks=(LENGTH // 2, LENGTH - 3))
    for turn in range(2):
        following = [*task.ids.tolist(), *task.out, *text(3 + turn, NEW)]
        task, ours, theirs = measured(bench, following)
        assert task.record.fed_tokens <= NEW + 1
        assert ours <= SHARE * theirs
    for seed in (21, 22):
        branch, ours, theirs = measured(bench, [*ids[: LENGTH // 2], *text(seed, NEW)])
        assert branch.record.cached_tokens == LENGTH // 2
        copy = branch.record.cached_tokens * bench.kv.layout.bytes_per_token
        assert ours <= SHARE * theirs + copy
