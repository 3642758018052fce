"""What raises fails its own request and nothing else; what was committed stays right."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.errors import GenerationFailed
from mlxcache.scheduling.task import Task
from mlxcache.types import Sampling, token_ids
from tests.memory import rounding_bytes
from tests.scheduled import Bench, admitted, finished, prompt
from tests.scheduling.faults import FaultyParser, faulty, raise_at, uncomputable

SEEDED = Sampling(temperature=0.9, seed=5, frequency_penalty=0.4)


def error(task: Task) -> BaseException | None:
    """The error that ended a task, if one did."""
    last = task.events[-1]  # type: ignore[attr-defined]
    return last if isinstance(last, BaseException) else None


def at_rest(bench: Bench) -> None:
    """Nothing is in use any more, and dropping all that is kept leaves nothing."""
    bench.check()
    assert bench.scheduler.idle
    assert not bench.kv.ram.busy
    bench.kv.ram.clear()
    assert bench.kv.budget.used == 0
    assert not bench.kv.ram.idle


def test_a_prefill_that_raises_keeps_what_it_had_committed(
    bench: Bench, rng: np.random.Generator
) -> None:
    model, ids = faulty(bench), prompt(rng, 300)
    known = token_ids(ids)
    beside = bench.put(prompt(rng, 40), tokens=30)
    bench.run(until=lambda: len(beside.out) > 2)
    model.when = lambda tokens: tokens.shape[1] > 1 and bench.kv.tree.match(known).length >= 192
    task = bench.put(ids, marks=[192])
    bench.run()
    model.when = lambda tokens: False
    assert isinstance(error(task), GenerationFailed)
    assert beside.out == bench.cold(beside.ids.tolist(), 30)
    again = bench.ask(ids, marks=[192])
    assert admitted(again).cached_tokens == 192
    assert again.out == bench.cold(ids)
    at_rest(bench)


def test_kv_of_fewer_tokens_than_were_fed_is_not_committed(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache class that grows in another way would give every later prompt wrong KV."""
    ids, feed = prompt(rng, 300), type(bench.model).__call__

    def one_fewer(model: Any, tokens: mx.array, **named: Any) -> Any:
        return feed(model, tokens[:, 1:] if tokens.shape[1] > 1 else tokens, **named)

    with monkeypatch.context() as patch:
        patch.setattr(type(bench.model), "__call__", one_fewer)
        task = bench.put(ids, marks=[192])
        bench.run()
    assert "did not grow by the number of tokens fed" in str(error(task))
    assert bench.kv.tree.match(token_ids(ids)).length == 0
    again = bench.ask(ids)
    assert admitted(again).cached_tokens == 0
    assert again.out == bench.cold(ids)
    at_rest(bench)


def test_a_prefill_that_raises_in_a_branch_leaves_the_other_branch_right(
    bench: Bench, rng: np.random.Generator
) -> None:
    """The failed pass wrote into buffers that the first conversation was in."""
    model, head = faulty(bench), prompt(rng, 200)
    first = bench.ask(head, tokens=20, marks=[100])
    model.when = lambda tokens: tokens.shape[1] > 1
    assert isinstance(error(_failed(bench, head[:150] + prompt(rng, 100))), GenerationFailed)
    model.when = lambda tokens: False
    ids = head + first.out + prompt(rng, 10)
    again = bench.ask(ids)
    assert admitted(again).cached_tokens >= 100
    assert again.out == bench.cold(ids)
    at_rest(bench)


def _failed(bench: Bench, ids: list[int], **kwargs: Any) -> Task:
    task = bench.put(ids, **kwargs)
    bench.run()
    return task


def test_a_lone_reply_that_raises_keeps_its_prompt(bench: Bench, rng: np.random.Generator) -> None:
    model, ids = faulty(bench), prompt(rng, 150)
    model.when = lambda tokens: model.passes > 12
    task = _failed(bench, ids, tokens=50, marks=[140])
    assert isinstance(error(task), GenerationFailed)
    assert len(task.out) > 2
    model.when = lambda tokens: False
    longer = ids + task.out + prompt(rng, 5)
    again = bench.ask(longer)
    assert admitted(again).cached_tokens >= 140
    assert again.out == bench.cold(longer)
    at_rest(bench)


@pytest.mark.parametrize(
    ("moment", "how"),
    [(3, "when"), pytest.param(40, "when", marks=pytest.mark.slow), (75, "when"), (40, "late")],
)
def test_rows_go_on_alone_where_their_batch_raises(
    bench: Bench, rng: np.random.Generator, moment: int, how: str
) -> None:
    """Before the first sync into the rows' lineages, and after; as it is built, or evaluated."""
    model = faulty(bench)
    prompts = [prompt(rng, n) for n in (100, 105, 110)]
    samplings = [Sampling(), SEEDED, Sampling(repetition_penalty=1.3)]
    asked = list(zip(prompts, samplings, strict=True))
    alone = [bench.twin().ask(ids, tokens=90, sampling=drawn).out for ids, drawn in asked]
    passes = iter(range(1, 1 << 30))
    setattr(model, how, lambda tokens: tokens.shape[0] == 3 and next(passes) == moment)
    tasks = [bench.put(ids, tokens=90, sampling=drawn) for ids, drawn in asked]
    bench.run()
    assert next(passes) > moment
    for task, expected in zip(tasks, alone, strict=True):
        assert finished(task).reason == "length"
        assert task.out == expected
    longer = prompts[0] + tasks[0].out + prompt(rng, 5)
    assert bench.ask(longer).out == bench.cold(longer)
    at_rest(bench)


def test_one_row_that_always_raises_fails_alone(
    bench: Bench, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """Found out by letting each row of the batch try again by itself. The log names the request."""
    model = faulty(bench)
    prompts = [prompt(rng, n) for n in (100, 105, 110)]
    poison = bench.twin().ask(prompts[1], tokens=20).out[15]
    tasks = [bench.put(ids, tokens=40) for ids in prompts]
    bad = tasks[1]
    model.when = lambda tokens: (
        tokens.shape[1] == 1
        and len(bad.out) >= 14
        and poison in (np.asarray(tokens).ravel().tolist())
    )
    bench.run()
    model.when = lambda tokens: False
    assert isinstance(error(bad), GenerationFailed)
    ids = ", ".join(task.record.id for task in tasks)
    assert f"a step of a batch failed, its requests go on alone: {ids}" in caplog.text
    assert f"{bad.record.id}: request failed: unexpected exception" in caplog.text
    for i in (0, 2):
        if error(tasks[i]) is None:
            assert tasks[i].out == bench.cold(prompts[i], 40)
    assert any(error(tasks[i]) is None for i in (0, 2))
    longer = prompts[1] + bad.out + prompt(rng, 5)
    assert bench.ask(longer).out == bench.cold(longer)
    at_rest(bench)


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_sampler_that_raises_fails_its_own_request(
    bench: Bench,
    rng: np.random.Generator,
    rows: int,
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [prompt(rng, 100 + n) for n in range(rows)]
    tasks = [bench.put(ids, tokens=20, sampling=SEEDED if i else Sampling()) for i, ids in
             enumerate(prompts)]  # fmt: skip
    alone = [bench.twin().ask(ids, tokens=20, sampling=SEEDED).out for ids in prompts[1:]]
    bench.run(until=lambda: all(task.out for task in tasks))
    drawn = len(tasks[0].out)
    raise_at(tasks[0], count)
    bench.run()
    assert isinstance(error(tasks[0]), GenerationFailed)
    assert "no choice" in str(error(tasks[0]))
    assert f"{tasks[0].record.id}: request failed: unexpected exception" in caplog.text
    assert len(tasks[0].out) == drawn + count
    for task, expected in zip(tasks[1:], alone, strict=True):
        assert task.out == expected
    longer = prompts[0] + tasks[0].out + prompt(rng, 5)
    again = bench.ask(longer)
    assert admitted(again).cached_tokens == len(longer) - 5  # the KV was right, and was kept
    assert again.out == bench.cold(longer)
    at_rest(bench)


@pytest.mark.parametrize("at", [1, 6, None])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_parser_that_raises_fails_its_own_request(
    bench: Bench, rng: np.random.Generator, rows: int, at: int | None
) -> None:
    """At its first token, later, and when the reply is over."""
    prompts = [prompt(rng, 100 + n) for n in range(rows)]
    tasks = [bench.put(ids, tokens=20) for ids in prompts]
    bench.run(until=lambda: all(task.output for task in tasks))
    assert tasks[0].output is not None
    tasks[0].output = replace(tasks[0].output, parser=FaultyParser(at))
    bench.run()
    assert isinstance(error(tasks[0]), GenerationFailed)
    for ids, task in zip(prompts[1:], tasks[1:], strict=True):
        assert finished(task).reason == "length"
        assert task.out == bench.cold(ids, 20)
    longer = prompts[0] + tasks[0].out + prompt(rng, 5)
    assert bench.ask(longer).out == bench.cold(longer)
    at_rest(bench)


def test_a_request_that_cannot_be_dressed_fails_before_it_computes(
    bench: Bench, rng: np.random.Generator
) -> None:
    ids = prompt(rng, 100)
    bench.ask(ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "prepare_output", _undressable)
        task = _failed(bench, ids + prompt(rng, 20))
    assert isinstance(error(task), GenerationFailed)
    assert task.record.cached_tokens >= len(ids) - 1
    assert task.record.fed_tokens == 0
    assert bench.ask(ids, tokens=20).out == bench.cold(ids, 20)
    at_rest(bench)


def _undressable(task: Task) -> None:
    raise ValueError("no such thing")


def test_buffers_that_cannot_be_computed_are_dropped_and_what_hung_on_them_is_refilled(
    bench: Bench, rng: np.random.Generator
) -> None:
    """Evaluation itself fails: nothing that the lineage holds is trusted any more."""
    head = prompt(rng, 200)
    bench.ask(head, tokens=4, marks=[150])
    branch = head[:150] + prompt(rng, 60)
    bench.ask(branch, tokens=4, marks=[150])
    task = bench.put(head + prompt(rng, 80), tokens=40)
    bench.run(until=lambda: len(task.out) > 3)
    slots = task.held.lineage.linear
    slots[0].keys = slots[0].keys + uncomputable()
    bench.run()
    assert isinstance(error(task), GenerationFailed)
    lost = [v for v in bench.kv.tree.values() if v.lost]
    assert len(lost) == 1
    for ids in (head, branch, head + prompt(rng, 30)):
        assert bench.ask(ids, marks=[150]).out == bench.cold(ids)
    warm = bench.ask(branch + prompt(rng, 3))
    assert admitted(warm).cached_tokens >= 150
    at_rest(bench)


def test_a_failed_request_leaves_nothing_in_mlx(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that its stream keeps holds no frames, and so no arrays."""
    monkeypatch.setattr(logging.getLogger("mlxcache.engine"), "disabled", True)  # pytest keeps all
    model = faulty(bench)
    bench.ask(prompt(rng, 50), tokens=2)
    bench.kv.ram.clear()
    gc.collect()
    before = mx.get_active_memory()
    model.when = lambda tokens: tokens.shape[1] == 1 and model.passes > 9
    errors = [error(_failed(bench, prompt(rng, 300), tokens=5)) for _ in range(3)]
    assert all(isinstance(e, GenerationFailed) for e in errors)
    bench.kv.ram.clear()
    gc.collect()
    assert mx.get_active_memory() - before < 64_000 + rounding_bytes(4)
