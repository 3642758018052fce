"""Memory that MLX does not get: room is made, and the pass is tried once more."""

from __future__ import annotations

import re
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.model.device import is_out_of_memory
from mlxcache.scheduling.task import Task
from mlxcache.types import Text, token_ids
from tests.scheduled import Bench, admitted, finished, prompt
from tests.scheduling.faults import FaultyModel, faulty
from tests.scheduling.test_faults import SEEDED, at_rest, error

NO_MEMORY = RuntimeError("[malloc] Unable to allocate 17179869184 bytes.")


@pytest.fixture(params=("gemma3", "llama"))
def bench(request: pytest.FixtureRequest, toy_paths: dict[str, Path]) -> Bench:
    return Bench(toy_paths[request.param])


@pytest.fixture
def model(bench: Bench) -> FaultyModel:
    model = faulty(bench)
    model.error = NO_MEMORY
    return model


def at_passes(*chosen: int):
    """Raise in these passes, counted from 1."""
    passes = count(1)
    return lambda tokens: next(passes) in chosen


def test_a_prefill_goes_on_once_others_cache_was_evicted(
    bench: Bench, model: FaultyModel, rng: np.random.Generator
) -> None:
    """Its client is told nothing; what was used least recently has gone."""
    old = [prompt(rng, 200) for _ in range(4)]
    for ids in old:
        bench.ask(ids, tokens=2)
    held = bench.kv.budget.used
    ids = prompt(rng, 300)
    model.when = at_passes(3)
    task = bench.ask(ids)
    assert task.out == bench.cold(ids)
    assert sum(event == admitted(task) for event in task.events) == 1  # type: ignore[attr-defined]
    newest = [*bench.kv.ram.idle.values()][-1]
    assert bench.kv.budget.used - newest.nbytes < held
    assert bench.kv.tree.match(token_ids(old[-1]), touch=False).length == 200
    at_rest(bench)


@pytest.mark.parametrize("passes", [(9,), (9, 12, 20)])
def test_a_reply_goes_on_with_the_tokens_it_would_have_had(
    bench: Bench, model: FaultyModel, rng: np.random.Generator, passes: tuple[int, ...]
) -> None:
    ids = prompt(rng, 100)
    expected = bench.twin().ask(ids, tokens=30, sampling=SEEDED).out
    model.when = at_passes(*passes)
    task = bench.ask(ids, tokens=30, sampling=SEEDED)
    assert finished(task).reason == "length"
    assert task.out == expected
    at_rest(bench)


def texts(task: Task) -> list[int]:
    """The tokens that the client has got."""
    return [int(e.text) for e in task.events if isinstance(e, Text)]  # type: ignore[attr-defined]


def test_a_first_token_is_handed_out_before_the_next_pass_and_once(
    bench: Bench, model: FaultyModel, rng: np.random.Generator
) -> None:
    """That pass finds no memory here; a reply that is over then has no pass after it."""
    ids = prompt(rng, 100)
    expected = bench.twin().ask(ids, sampling=SEEDED).out
    before: list[list[int]] = []

    def fails(fed: mx.array) -> bool:
        """Whether this is the pass after that over the prompt's last token, which begins a lane."""
        now = [texts(lane.tasks[0]) for lane in bench.scheduler.lanes.all]
        before.extend(now)
        return bool(now) and len(before) == 1

    for tokens in (12, 1):
        before.clear()
        model.when = fails
        task = bench.put(ids, tokens=tokens, sampling=SEEDED)
        bench.run()
        assert before[0] == expected[:1]
        assert task.out == texts(task) == expected[:tokens]
        assert finished(task).reason == "length"
    at_rest(bench)


def test_a_batch_without_memory_goes_on_row_by_row(
    bench: Bench, model: FaultyModel, rng: np.random.Generator
) -> None:
    prompts = [prompt(rng, 100 + i) for i in range(3)]
    model.when = lambda tokens: tokens.shape[0] == 3
    tasks = [bench.put(ids, tokens=20) for ids in prompts]
    bench.run()
    for ids, task in zip(prompts, tasks, strict=True):
        assert task.out == bench.cold(ids, 20)
    at_rest(bench)


def test_who_finds_no_memory_twice_is_refused(
    bench: Bench, model: FaultyModel, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """With what MLX said; what was committed stays, and the next request is served."""
    ids = prompt(rng, 100)
    model.when = lambda tokens: len(bench.scheduler.lanes) > 0
    task = bench.put(ids, tokens=20)
    bench.run()
    assert re.search("Unable to allocate", str(error(task)))
    message = next(one for one in caplog.messages if "evicting and retrying" in one)
    assert message.startswith(f"{task.record.id}: out of memory at token ")
    model.when = lambda tokens: False
    assert bench.ask(ids).out == bench.cold(ids)
    at_rest(bench)


class NoRoom:
    """MLX that cannot allocate in the `at`-th evaluation of a lineage's buffers, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int):
        self._left = at
        self._eval = mx.eval
        monkeypatch.setattr("mlxcache.model.lineage.mx", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def eval(self, *arrays: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise copy(NO_MEMORY)
        self._eval(*arrays)

    @property
    def over(self) -> bool:
        """Whether it has raised."""
        return self._left <= 0


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_buffer_that_cannot_be_made_is_charged_to_nobody(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A first buffer, one that grows, a branch's copy, what is set aside for it: at any array."""
    first, other = prompt(rng, 300), prompt(rng, 40)
    asked = [
        (prompt(rng, 120), 2),
        (first, 2),
        ([*first, *prompt(rng, 700)], 2),
        ([*first[:150], *other], 2),
        ([*first[:150], *other, *prompt(rng, 90)], 300),
    ]
    failed = 0
    for ids, tokens in asked:
        fault = NoRoom(monkeypatch, at)
        task = bench.put(ids, tokens=tokens)
        bench.run()
        failed += isinstance(task.events[-1], Exception)  # type: ignore[attr-defined]
        bench.check()
        monkeypatch.undo()
        again = bench.ask(ids, tokens=tokens)
        assert again.out == bench.cold(ids, tokens)
        at_rest(bench)
        assert fault.over or at > 2
    assert failed or at > 2


@pytest.mark.parametrize("at", [1, 3])
def test_an_idle_buffer_that_cannot_be_made_smaller_is_dropped(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    ids = prompt(rng, 900)
    bench.ask(ids, tokens=2)
    (lineage,) = bench.kv.ram.idle.values()
    fault = NoRoom(monkeypatch, at)
    freed = bench.kv.ram.shrink(lineage, force=True)
    assert fault.over == lineage.lost
    assert freed > 0
    bench.check()
    monkeypatch.undo()
    assert bench.ask(ids).out == bench.cold(ids)
    at_rest(bench)


@pytest.mark.parametrize(
    "words",
    [
        "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum",
        "[metal::malloc] Resource limit (499000) exceeded.",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU)",
        "[malloc] Unable to allocate 99 bytes.",
        "cudaMallocAsync failed: out of memory",
    ],
)
def test_what_mlx_says_where_it_cannot_allocate(words: str) -> None:
    """MLX for CPUs says nothing: the process dies there, and is started again by who watches it."""
    assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(ValueError(words))


def test_other_errors_are_not_for_lack_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("There is no Stream(gpu, 0) in current thread."))
