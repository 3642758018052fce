"""A pass that checks a guess fails: the reply goes on without guesses, or fails as any other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.bench.device_faults import FailingDevice
from mlxcache.errors import GenerationFailed
from mlxcache.scheduling import decoder
from mlxcache.scheduling.decoder import NonFiniteOutput
from mlxcache.scheduling.task import Task
from mlxcache.scheduling.verifier import Verifier
from mlxcache.types import Finished, Sampling
from tests.conftest import ToyMaker
from tests.scheduled import Bench, prompt
from tests.scheduling.failing_device import Judge, Once, Unlucky, last, text
from tests.scheduling.faults import Fault, FaultyModel, faulty, uncomputable
from tests.scheduling.guesses import Foretold, speculating
from tests.scheduling.test_device_errors import live
from tests.scheduling.test_faults import at_rest, error
from tests.scheduling.test_verifier import check_kept, guessing

SEEDED = Sampling(temperature=0.9, seed=3, repetition_penalty=1.2)
STOPPED = "no further guesses in this reply"
FAILING = ("llama", "gemma3", "qwen3_5", "deepseek_v3")
RUNS = int(os.environ.get("MLXCACHE_DEVICE_RUNS", "0"))
FAMILIES = ("llama", pytest.param("gemma3", marks=pytest.mark.slow), "qwen3_5")


def prepared(path: Path, rng: np.random.Generator) -> tuple[Bench, FaultyModel, list[int], Task]:
    """A bench that guesses right, its model, a prompt, and the reply to it without guesses."""
    bench, ids = Bench(path), prompt(rng, 60)
    model = faulty(bench)
    plain = bench.twin().ask(ids, tokens=60, sampling=SEEDED)
    return guessing(bench, [plain], wrong=0.2), model, ids, plain


def over_guesses(bench: Bench, after: int) -> Callable[[mx.array], bool]:
    """True for passes over guesses once replies have `after` tokens."""
    return lambda fed: (
        fed.shape[1] > 8 and len(bench.scheduler.lanes) > 0 and decoded(bench) >= after
    )


def decoded(bench: Bench) -> int:
    return sum(len(task.out) for lane in bench.scheduler.lanes.all for task in lane.tasks)


def check_goes_on(bench: Bench, ids: list[int], plain: Task) -> None:
    """The reply is that without guesses, and so is all that is kept; nothing more was guessed."""
    task = bench.ask(ids, tokens=60, sampling=SEEDED)
    assert task.out == plain.out
    assert task.record.accepted_tokens < 40
    check_kept(bench, task)
    at_rest(bench)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_raises_is_made_again_without_its_guess(
    toy_paths: dict[str, Path],
    rng: np.random.Generator,
    family: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of its layers had been given the guess."""
    fast, model, ids, plain = prepared(toy_paths[family], rng)
    model.when = over_guesses(fast, 10)
    check_goes_on(fast, ids, plain)
    assert sum(STOPPED in message for message in caplog.messages) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_draw_that_cannot_be_evaluated_is_made_again_without_its_guess(
    toy_paths: dict[str, Path],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    late: bool,
) -> None:
    """As it is launched, or `late`, when its tokens are read; the KV is right."""
    fast, _, ids, plain = prepared(toy_paths[family], rng)
    left, normalised, async_eval = [45], decoder.normalised, mx.async_eval

    def spoilt(logits: mx.array) -> tuple[mx.array, mx.array]:
        left[0] -= 1
        values, finite = normalised(logits)
        return (values + uncomputable() if left[0] == 0 else values), finite

    def lazy(*arrays: Any) -> None:
        if not (late and left[0] <= 0):
            async_eval(*arrays)

    monkeypatch.setattr("mlxcache.scheduling.proposer.normalised", spoilt)
    monkeypatch.setattr(mx, "async_eval", lazy)
    check_goes_on(fast, ids, plain)
    assert left[0] <= 0


def test_keys_that_cannot_be_computed_fail_the_request(
    toy_paths: dict[str, Path], rng: np.random.Generator
) -> None:
    """As in a pass without a guess: what was committed is kept, and is right."""
    fast, model, ids, plain = prepared(toy_paths["llama"], rng)
    model.late = over_guesses(fast, 10)
    task = fast.put(ids, tokens=60, sampling=SEEDED)
    fast.run()
    assert isinstance(error(task), GenerationFailed)
    assert 0 < len(task.out) < 60
    assert task.out == plain.out[: len(task.out)]
    model.late = lambda fed: False
    longer = [*ids, *task.out, 5, 6, 7]
    assert fast.ask(longer).out == fast.cold(longer)
    at_rest(fast)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_numbers_that_are_not_finite_end_the_reply_where_they_do_without_guesses(
    toy_paths: dict[str, Path], rng: np.random.Generator, family: str
) -> None:
    """With the same tokens before them."""
    bench, ids = Bench(toy_paths[family]), prompt(rng, 60)
    model = faulty(bench)
    plain = bench.twin().ask(ids, tokens=60, sampling=SEEDED)
    poison = plain.out[30]
    model.poison = lambda fed: [0] if poison in np.asarray(fed).ravel().tolist() else []
    first = plain.out.index(poison)
    replies = []
    for one in (bench.twin(), speculating(bench, Foretold({60: plain.out[: first + 1]}, wrong=0))):
        task = one.put(ids, tokens=60, sampling=SEEDED)
        one.run()
        assert isinstance(error(task), NonFiniteOutput)
        replies.append(task.out)
        at_rest(one)
    assert replies[1] == plain.out[: len(replies[1])]
    assert len(replies[1]) <= len(replies[0]) == first + 1


def test_an_error_behind_a_wrong_guess_is_not_the_replys(
    toy_paths: dict[str, Path], rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """A processor that raises for a token that the model never draws, and one that it draws."""
    bench, ids = Bench(toy_paths["llama"]), prompt(rng, 60)
    plain = bench.twin().ask(ids, tokens=40)
    never = next(token for token in range(10, 400) if token not in {*ids, *plain.out})
    prepare = Bench.prepare_output

    def forbidding(token: int) -> Task:
        def process(context: mx.array, logits: mx.array) -> mx.array:
            if token in np.asarray(context[-1:]).tolist():
                raise Fault("a token that must not be")
            return logits

        def prepared(task: Task) -> Any:
            output = prepare(fast, task)
            output.row.processors = [process]
            output.row.set_context(mx.array(task.ids[:-1]))
            return output

        wrong = [t if n % 4 else never for n, t in enumerate(plain.out)]
        fast = speculating(bench, Foretold({60: wrong}, wrong=0))
        fast.prepare_output = prepared  # type: ignore[method-assign]
        task = fast.put(ids, tokens=40)
        fast.run()
        at_rest(fast)
        return task

    task = forbidding(never)
    assert task.out == plain.out
    assert task.record.accepted_tokens > 9
    assert "request failed" not in caplog.text
    failed = forbidding(plain.out[20])
    assert isinstance(error(failed), GenerationFailed)
    assert failed.out == plain.out[: len(failed.out)]
    assert plain.out.index(plain.out[20]) < len(failed.out) <= plain.out.index(plain.out[20]) + 2
    assert f"{failed.record.id}: request failed: unexpected exception" in caplog.text


# -- a device that fails in silence ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(RUNS // len(FAILING) or 2))
@pytest.mark.parametrize("family", FAILING)
def test_a_random_life_on_a_failing_device(
    toy: ToyMaker, judges: Callable[[str], Judge], tmp_path: Path, family: str, seed: int
) -> None:
    """`MLXCACHE_DEVICE_RUNS=500` runs so many in all."""
    live(toy(family), judges(family), seed, tmp_path, speculation=Foretold({}, wrong=0.3))


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("family", FAILING)
def test_a_guess_whose_pass_fails_in_silence_is_computed_again(
    toy: ToyMaker, judges: Callable[[str], Judge], family: str, delay: int
) -> None:
    """The client gets the very reply, and no token of the failed pass."""
    ids, once = prompt(np.random.default_rng(3), 100), Once()
    reply = judges(family).bench.twin().ask(ids, tokens=60).out
    guesses = Foretold({len(ids): reply}, wrong=0.2)
    unlucky = Unlucky(
        toy(family), on := FailingDevice(once, delay=delay), None, speculation=guesses.alone
    )
    once.when = lambda: checking(unlucky.bench, 10)
    task = unlucky.bench.put(ids, tokens=60)
    unlucky.run([task])
    assert on.failures == 1
    assert task.restarts == 1
    assert isinstance(last(task), Finished)
    assert text(task) == task.out == reply


def checking(bench: Bench, after: int) -> bool:
    """True while a pass over a guess is launched in a reply of `after` tokens or more."""
    lanes = [lane for lane in bench.scheduler.lanes.all if len(lane.tasks[0].out) >= after]
    decoders = [lane.decoder for lane in lanes]
    return any(isinstance(one, Verifier) and one.proposed > 4 for one in decoders)
