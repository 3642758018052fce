"""Guides while rows join and leave, are drafted, tried again, restored, and begun again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.bench.device_faults import FailingDevice
from mlxcache.errors import GenerationFailed
from mlxcache.model.guidance.guide import Bitmask, Grammars, Guide
from mlxcache.model.sampling import make_processors
from mlxcache.scheduling.task import Task
from mlxcache.types import Finished, Sampling
from tests.conftest import ToyMaker
from tests.scheduled import Bench, finished
from tests.scheduling.drafts import KINDS, Kind, make_draft
from tests.scheduling.failing_device import Once, Unlucky, decoding, last, text, tokens
from tests.scheduling.faults import FaultyModel, faulty
from tests.scheduling.test_scarce import NO_MEMORY, at_passes

LIVES = int(os.environ.get("MLXCACHE_DEVICE_RUNS", "0")) // 10 or 3

GRAMMARS = (
    r"start: /([a-z]{1,6}[0-9]{2} ?)+/",
    r'start: ("[" /[a-f]+/ "," /[0-9]+/ "]")+',
    r"start: /([A-Z][a-z]?-)+/",
    r'start: ("(" inner ")")+' + '\ninner: "x" | "y" inner',
)
"""Grammars of replies without an end, on any vocabulary that has single bytes."""

SAMPLINGS = (
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.2, seed=4, top_p=0.9, presence_penalty=0.4),
    Sampling(temperature=1.0, seed=5, logit_bias=((300, 20.0), (301, 20.0))),
    Sampling(temperature=0.7, seed=6, top_k=5, repetition_penalty=1.2),
)


def guides(bench: Bench) -> list[Guide]:
    """A guide for each of GRAMMARS."""
    grammars = Grammars(bench.tokenizer, bench.kv.layout.vocab_size)
    return [grammars.guide(grammar) for grammar in GRAMMARS]


def check(task: Task) -> None:
    """The reply follows its grammar to its last token."""
    assert task.guide is not None
    guide = task.guide.copy()
    for token in task.out:
        guide.accept(token)


def each(bench: Bench, count: int = 16, rows: int = 4, length: int = 60) -> list[Task]:
    """Queue a guided request for each of the grammars, of prompts of different lengths."""
    rng = np.random.default_rng(2)
    return [
        bench.put(tokens(rng, length + 5 * i), tokens=count, sampling=sampling, guide=guide)
        for i, (guide, sampling) in enumerate(zip(guides(bench)[:rows], SAMPLINGS, strict=False))
    ]


def alone(bench: Bench, task: Task) -> list[int]:
    """The same reply, computed by a scheduler that has nothing else to do."""
    ids, sampling = task.job.prompt.ids.tolist(), task.job.sampling
    tokens = task.job.max_tokens or 0
    return bench.twin().ask(ids, tokens=tokens, sampling=sampling, guide=task.guide).out


def test_rows_that_join_and_leave_keep_their_guides(bench: Bench) -> None:
    """One is free, one leaves, one comes later: each gets the reply that it gets alone."""
    tasks = each(bench, rows=3)
    free = bench.put(tokens(np.random.default_rng(3), 65), tokens=20, sampling=SAMPLINGS[0])
    bench.run(until=lambda: all(len(task.out) >= 5 for task in tasks))
    bench.scheduler.cancel(tasks[1])
    (late,) = each(bench, rows=1, length=70)
    bench.run()
    for task in (tasks[0], tasks[2], late, free):
        assert finished(task).reason == "length"
        assert task.out == alone(bench, task)
    assert alone(bench, tasks[1])[: len(tasks[1].out)] == tasks[1].out
    for task in (*tasks, late):
        check(task)


def test_cold_warm_and_restored_are_the_same(bench: Bench, tmp_path: Path) -> None:
    disk = bench.open_disk(tmp_path)
    cold = each(bench, length=140)
    bench.run()
    warm = each(bench, length=140)
    bench.run()
    assert disk.write_behind.drain(20.0) == 0
    bench.kv.close(5.0)
    bench.open_disk(tmp_path)
    restored = each(bench, length=140)
    bench.run()
    for one, two, three in zip(cold, warm, restored, strict=True):
        assert one.out == two.out == three.out == alone(bench, one)
        assert finished(one).cached_tokens == 0
        check(one)
    assert all(finished(task).cached_tokens > 60 for task in warm)
    assert any(finished(task).restored_tokens > 60 for task in restored)
    bench.kv.close(1.0)


@pytest.mark.parametrize(
    "kind",
    [k if k == "alike" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS],
)
def test_a_draft_changes_no_token(toy_llama: Path, tmp_path: Path, kind: Kind) -> None:
    drafted = Bench(toy_llama, draft=make_draft(toy_llama, tmp_path / "draft", kind))
    plain = Bench(toy_llama)
    tasks = each(drafted)
    drafted.run()
    for task in tasks:
        assert task.out == alone(plain, task)
        check(task)
        assert task.record.drafted_tokens > 0
    if kind == "same":
        assert all(t.record.accepted_tokens == t.record.drafted_tokens for t in tasks)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_step_without_memory_is_tried_again(toy_llama: Path, rows: int) -> None:
    """The guides have accepted the pending tokens by then, and accept them no second time."""
    bench = Bench(toy_llama)
    tasks = each(bench.twin(), rows=rows)
    expected = [alone(bench, task) for task in tasks]
    model = faulty(bench)
    model.error = NO_MEMORY
    model.when = at_passes(9) if rows == 1 else lambda fed: fed.shape[0] == rows
    tasks = each(bench, rows=rows)
    bench.run()
    assert [task.out for task in tasks] == expected


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draw_without_memory_is_tried_again(
    toy_llama: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The masks of that step are computed again, and are the same."""
    from mlxcache.scheduling import decoder

    bench = Bench(toy_llama)
    expected = [alone(bench, task) for task in each(bench.twin(), rows=rows)]
    left = [7]
    normalised = decoder.normalised

    def fail_once(logits: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise NO_MEMORY
        return normalised(logits)

    monkeypatch.setattr(decoder, "normalised", fail_once)
    tasks = each(bench, rows=rows)
    bench.run()
    assert left[0] < 0
    assert [task.out for task in tasks] == expected


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_reply_that_begins_again_goes_on_where_it_was(
    toy_llama: Path, rows: int, delay: int
) -> None:
    """The device lost a pass: the guide is brought to the last token that was delivered."""
    once = Once()
    unlucky = Unlucky(toy_llama, on := FailingDevice(once, delay=delay), None)
    once.when = lambda: decoding(unlucky.bench, rows, 6)
    tasks = each(unlucky.bench, rows=rows)
    unlucky.run(tasks)
    assert on.failures == 1
    plain = Bench(toy_llama)
    for task in tasks:
        assert isinstance(last(task), Finished)
        assert text(task) == task.out == alone(plain, task)


@pytest.mark.parametrize("seed", range(LIVES))
@pytest.mark.parametrize("drafted", [False, True])
def test_random_failures_of_the_device(
    toy: ToyMaker, tmp_path: Path, drafted: bool, seed: int
) -> None:
    """`MLXCACHE_DEVICE_RUNS=500` runs 50 of each kind."""
    rng = np.random.default_rng(seed)
    picked = {int(n) for n in rng.integers(1, 60, rng.integers(1, 4))}
    on = FailingDevice(picked.__contains__, delay=seed % 2, nan=seed % 3 == 2)
    draft = make_draft(toy("llama"), tmp_path / "draft", "alike") if drafted else None
    unlucky = Unlucky(toy("llama"), on, None, draft=draft)
    tasks = each(unlucky.bench, rows=int(rng.integers(1, 5)))
    unlucky.run(tasks)
    plain = Bench(toy("llama"))
    for task in tasks:
        sent = text(task)
        assert alone(plain, task)[: len(sent)] == sent
        if isinstance(last(task), Finished):
            assert len(sent) == task.limit
        else:
            assert unlucky.died or "again and again" in str(last(task))


class Failing:
    """A guide that allows all, and raises after some tokens, in `method`."""

    def __init__(self, after: int, method: str):
        self.after, self.method = after, method

    def accept(self, token: int) -> None:
        self.after -= 1
        self._fail("accept")

    def mask(self) -> Bitmask | None:
        self._fail("mask")
        return None

    def copy(self) -> Failing:
        return Failing(self.after, self.method)

    def _fail(self, method: str) -> None:
        if self.after <= 0 and method == self.method:
            raise ValueError("a guide that is broken")


@pytest.mark.parametrize("method", ["accept", "mask"])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_guide_that_raises_fails_its_own_row(
    toy_llama: Path, tmp_path: Path, method: str, drafted: bool
) -> None:
    draft = make_draft(toy_llama, tmp_path / "draft", "same") if drafted else None
    bench = Bench(toy_llama, draft=draft)
    ids = tokens(np.random.default_rng(4), 64)
    broken = bench.put(ids, tokens=40, guide=Failing(9, method))
    tasks = each(bench, rows=2)
    bench.run()
    error = last(broken)
    assert isinstance(error, GenerationFailed)
    assert "a guide that is broken" in str(error)
    for task in tasks:
        assert finished(task).reason == "length"
        check(task)
        assert task.out == alone(bench, task)


def test_output_that_is_not_finite_is_reported_as_such(toy_llama: Path) -> None:
    """Not as a token that the grammar forbids."""
    bench = Bench(toy_llama)
    model: FaultyModel = faulty(bench)
    passes: Callable[[Any], bool] = at_passes(8)
    model.poison = lambda fed: [0] if passes(fed) else []
    (task,) = each(bench, rows=1)
    bench.run()
    error = last(task)
    assert isinstance(error, GenerationFailed)
    assert "NaN" in str(error)


def test_a_bias_cannot_allow_what_the_grammar_forbids(toy_llama: Path) -> None:
    bench = Bench(toy_llama)
    sampling = Sampling(logit_bias=tuple((token, 100.0) for token in range(300, 310)))
    assert make_processors(sampling, 0)
    guide = guides(bench)[1]
    check(bench.ask(tokens(np.random.default_rng(4), 50), sampling=sampling, guide=guide))
