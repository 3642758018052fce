"""Guesses change how fast a reply comes, and nothing else: not its tokens, not what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.model import kv
from mlxcache.model.lineage import Lineage
from mlxcache.scheduling import scheduler
from mlxcache.scheduling.decoder import Drawn, Row
from mlxcache.scheduling.speculation import Conversations, HistoryProposer
from mlxcache.scheduling.task import Task
from mlxcache.scheduling.verifier import Verifier
from mlxcache.tree.budget import Budget
from mlxcache.types import Sampling, TokenLogprob, join_ids, token_ids
from tests.conftest import ToyMaker
from tests.kinds import CACHE_KINDS
from tests.rounding import rounding
from tests.scheduled import Bench, admitted, finished
from tests.scheduling.faults import faulty
from tests.scheduling.guesses import CHEAP, Foretold, speculating
from tests.scheduling.test_draft import StopsAt, check_kv
from tests.scheduling.test_guided_steps import guides
from tests.scheduling.test_scarce import NO_MEMORY, at_passes

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.1, seed=4, top_p=0.9, min_p=0.02),
    Sampling(temperature=0.8, seed=5, repetition_penalty=1.3, frequency_penalty=0.2),
)


REWOUND = tuple(family for family in CACHE_KINDS if family != "llama4")
"""Families whose caches can be rewound, so that guesses are checked."""


def prompt(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(10, 400, n)]


def foretold(bench: Bench, tasks: Sequence[Task], *, wrong: float = 0.5) -> Foretold:
    """Guesses of the replies of `tasks`, which were computed without guesses."""
    return Foretold({task.prompt_tokens: task.out for task in tasks}, wrong=wrong)


def check_kept(bench: Bench, task: Task) -> None:
    """What is kept of a reply is what a cold model computes, wherever the next prompt goes on."""
    ids = task.tokens().tolist()
    if not bench.kv.layout.opaque:
        check_kv(bench, task, ids)
    longer = [*ids, 11, 12, 13, 14, 15]
    again = bench.ask(longer)
    assert admitted(again).cached_tokens == len(ids)
    assert again.out == bench.cold(longer)


def check_same(bench: Bench, rng: np.random.Generator, samplings: Sequence[Sampling]) -> None:
    for sampling in samplings:
        ids = prompt(rng, 150)
        plain = bench.twin().ask(ids, tokens=90, sampling=sampling)
        guesses = foretold(bench, [plain])
        fast = speculating(bench, guesses)
        task = fast.ask(ids, tokens=90, sampling=sampling)
        assert task.out == plain.out
        assert sum(guesses.proposed) >= task.record.drafted_tokens > task.record.accepted_tokens > 9
        assert task.record.cached_tokens + task.record.fed_tokens == 150
        check_kept(fast, task)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_reply_is_the_one_without_guesses(
    toy_paths: dict[str, Path], rng: np.random.Generator, family: str
) -> None:
    """Token for token, half of the guesses wrong, and so is all that is kept of it."""
    check_same(Bench(toy_paths[family]), rng, SAMPLINGS[3:])


@pytest.mark.slow
@pytest.mark.parametrize("family", CACHE_KINDS)
def test_every_cache_and_every_sampling(
    toy: ToyMaker, rng: np.random.Generator, family: str
) -> None:
    """A model whose cache cannot be rewound guesses nothing."""
    bench = Bench(toy(family))
    if bench.kv.layout.rewinds:
        check_same(bench, rng, SAMPLINGS)
        return
    assert family == "llama4"
    guesses = Foretold({150: [7] * 90})
    ids = prompt(rng, 150)
    task = speculating(bench, guesses).ask(ids, tokens=30)
    assert (task.out, guesses.proposed) == (bench.ask(ids, tokens=30).out, [])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_keys_and_values_are_rewound(
    toy: ToyMaker, rng: np.random.Generator, bits: int
) -> None:
    """The reply is that of the quantised model without guesses."""
    bench = Bench(toy("llama", head_dim=64), kv_bits=bits)
    ids = prompt(rng, 100)
    plain = bench.twin().ask(ids, tokens=50)
    fast = speculating(bench, foretold(bench, [plain]))
    task = fast.ask(ids, tokens=50)
    assert task.out == plain.out
    assert task.record.accepted_tokens > 9


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "falcon_h1", "rwkv7"])
def test_without_its_recurrent_state_put_back_a_reply_differs(
    toy: ToyMaker, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The control of the tests above: they would see a state that is wrong."""
    bench, ids = Bench(toy(family)), prompt(rng, 150)
    plain = bench.twin().ask(ids, tokens=90)
    monkeypatch.setattr(kv, "put_back", lambda slots, state: None)
    fast = speculating(bench, foretold(bench, [plain]))
    assert fast.ask(ids, tokens=90).out != plain.out


@pytest.mark.slow
@pytest.mark.parametrize("family", REWOUND)
def test_guided_replies_follow_their_grammar(
    toy: ToyMaker, rng: np.random.Generator, family: str
) -> None:
    """Guesses that the grammar does not allow are not checked."""
    bench = Bench(toy(family))
    for guide, sampling in zip(guides(bench)[:2], SAMPLINGS[:2], strict=True):
        ids = prompt(rng, 60)
        plain = bench.twin().ask(ids, tokens=40, sampling=sampling, guide=guide.copy())
        fast = speculating(bench, foretold(bench, [plain]))
        task = fast.ask(ids, tokens=40, sampling=sampling, guide=guide.copy())
        assert task.out == plain.out
        assert task.record.accepted_tokens > 5
        check_kept(fast, task)


@pytest.mark.parametrize("how", ["cancel", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_reply_may_end_within_a_guess(
    toy_paths: dict[str, Path], rng: np.random.Generator, how: str
) -> None:
    """Of a recurrent model, whose state is that of its last token."""
    check_end(Bench(toy_paths["qwen3_5"]), rng, how, 5)


def test_a_decoder_that_fed_nothing_leaves_its_lineage_as_it_is(
    toy_paths: dict[str, Path], rng: np.random.Generator
) -> None:
    """If a batch is split for want of memory, its last tokens are not appended to a lineage."""
    bench, ids = Bench(toy_paths["qwen3_5"]), token_ids(prompt(rng, 90))
    lineage = Lineage(bench.kv.layout)
    lineage.grow(len(ids))
    bench.model(mx.array(ids)[None], cache=lineage.caches)
    kv.eval_states(lineage.caches)
    lineage.advance(len(ids))
    task = bench.put(ids.tolist(), tokens=1)
    proposer = HistoryProposer(Conversations(CHEAP), task)
    row = Row(lambda logits: logits, (), None)
    decoder = Verifier(bench.model, row, lineage, proposer)
    decoder.rewind(join_ids(ids, token_ids([5, 6])))
    assert lineage.length == len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["limit", "stop", "cancel"])
@pytest.mark.parametrize("family", REWOUND)
def test_a_reply_may_end_anywhere(
    toy: ToyMaker, rng: np.random.Generator, family: str, how: str
) -> None:
    """By its limit, at a stop within a guess, or cancelled while a guess is being checked."""
    bench = Bench(toy(family))
    for end in (1, 2, 5, 23, 24):
        check_end(bench, rng, how, end)


def check_end(bench: Bench, rng: np.random.Generator, how: str, end: int) -> None:
    ids = prompt(rng, 60)
    plain = bench.twin().ask(ids, tokens=90)
    fast = speculating(bench, foretold(bench, [plain], wrong=0.3))
    task = fast.put(ids, tokens=end if how == "limit" else 90)
    fast.run(until=lambda: task.output is not None)
    assert task.output is not None
    if how == "stop" and len(task.out) < end:
        task.output = replace(task.output, parser=cast(Any, StopsAt(end - len(task.out))))
    elif how == "cancel":
        fast.run(until=lambda: len(task.out) >= end)
        fast.scheduler.cancel(task)
    fast.run()
    fast.check()
    assert task.out == plain.out[: len(task.out)]
    if how != "cancel" and len(task.out) != 90:
        assert len(task.out) == end
    check_kept(fast, task)


@pytest.mark.slow
def test_log_probabilities_are_those_of_each_token(
    toy_paths: dict[str, Path], rng: np.random.Generator
) -> None:
    """At its place, behind the processors."""
    bench, ids = Bench(toy_paths["llama"]), prompt(rng, 80)
    sampling, rows = SAMPLINGS[3], []
    plain = bench.twin().ask(ids, tokens=40, sampling=sampling)
    for one in (bench.twin(), speculating(bench, foretold(bench, [plain]))):
        task = one.put(ids, tokens=40, sampling=sampling)
        one.run(until=lambda task=task: task.output is not None)  # type: ignore[misc]
        seen: list[tuple[int, np.ndarray]] = []

        def note(drawn: Drawn, seen: list[tuple[int, np.ndarray]] = seen) -> TokenLogprob:
            seen.append((drawn.token, np.asarray(drawn.logprobs)))
            return TokenLogprob("", drawn.token, 0.0)

        assert task.output is not None
        task.output = replace(task.output, logprob=note)
        one.run()
        rows.append(seen)
    for (token, mine), (same, theirs) in zip(*rows, strict=True):
        assert token == same
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=rounding(theirs))


@pytest.mark.slow
def test_replies_that_can_share_a_batch_do(bench: Bench, rng: np.random.Generator) -> None:
    """Nothing is guessed in a batch; who is left alone after it guesses again."""
    prompts = [prompt(rng, n) for n in (60, 64)]
    plain = [bench.twin().ask(p, tokens=t) for p, t in zip(prompts, (90, 40), strict=True)]
    fast = speculating(bench, foretold(bench, plain, wrong=0.3))
    first = fast.put(prompts[0], tokens=90)
    fast.run(until=lambda: len(first.out) > 8)
    second = fast.put(prompts[1], tokens=40)
    fast.run(until=lambda: any(lane.batched for lane in fast.scheduler.lanes.all))
    (lane,) = fast.scheduler.lanes.all
    assert not isinstance(lane.decoder, Verifier)
    drafted = first.record.drafted_tokens
    fast.run()
    assert [first.out, second.out] == [task.out for task in plain]
    assert first.record.drafted_tokens > drafted
    for task in (first, second):
        check_kept(fast, task)


@pytest.mark.parametrize("passes", [(6, 8, 11), pytest.param((5,), marks=pytest.mark.slow)])
def test_a_pass_without_memory_is_tried_again(
    toy_paths: dict[str, Path], rng: np.random.Generator, passes: tuple[int, ...]
) -> None:
    """The right tokens of the guess before it are handed out once."""
    bench, ids = Bench(toy_paths["gemma3"]), prompt(rng, 60)
    plain = bench.twin().ask(ids, tokens=90, sampling=SAMPLINGS[3])
    fast = speculating(bench, foretold(bench, [plain], wrong=0.3))
    model = faulty(fast)
    model.error, model.when = NO_MEMORY, at_passes(*passes)
    task = fast.ask(ids, tokens=90, sampling=SAMPLINGS[3])
    assert task.out == plain.out
    check_kept(fast, task)


@pytest.mark.slow
def test_a_long_reply_is_committed_with_its_checkpoints(
    toy_paths: dict[str, Path], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint holds the state of its own token, although more were fed with it."""
    monkeypatch.setattr(scheduler, "COMMIT_EVERY", 10)
    monkeypatch.setattr("mlxcache.scheduling.task.SPACING", 20)
    monkeypatch.setattr("mlxcache.scheduling.lanes.SPACING", 20)
    bench, ids = Bench(toy_paths["qwen3_5"]), prompt(rng, 40)
    plain = bench.twin().ask(ids, tokens=90)
    fast = speculating(bench, foretold(bench, [plain], wrong=0.2))
    task = fast.ask(ids, tokens=90)
    assert task.out == plain.out
    for at in (20, 40, 60, 80):
        other = [*ids, *task.out[:at], 21, 22, 23]
        again = fast.ask(other)
        assert admitted(again).cached_tokens == 40 + at
        assert again.out == fast.cold(other)


def test_a_budget_without_room_for_guesses_still_serves(
    toy_paths: dict[str, Path], rng: np.random.Generator
) -> None:
    """The reply goes on without them, until there is room for nothing."""
    bench, ids = Bench(toy_paths["llama"]), prompt(rng, 100)
    plain = bench.twin().ask(ids, tokens=200)
    fast = speculating(bench, foretold(bench, [plain], wrong=0.0))
    layout = fast.kv.layout
    fast.use(
        KVCache.open(layout, Budget(128 * layout.bytes_per_token)),
        speculation=foretold(bench, [plain], wrong=0.0),
    )
    task = fast.ask(ids, tokens=200)
    assert finished(task).reason == "length"
    assert len(task.out) == 28
    assert task.out == plain.out[:28]


def test_a_reply_that_repeats_is_guessed_from_its_own_conversation(
    toy_paths: dict[str, Path], rng: np.random.Generator
) -> None:
    """Most of a second reply that says the same is guessed, and none if the request says so."""
    bench, ids = Bench(toy_paths["llama"]), prompt(rng, 80)
    fast = speculating(bench, Conversations(CHEAP))
    first = fast.ask(ids, tokens=60)
    again = fast.ask(ids, tokens=60)
    assert again.out == first.out == bench.ask(ids, tokens=60).out
    record = again.record
    assert record.accepted_tokens > 40
    assert 0 < record.guess_passes < 12
    assert record.guess_saved_s > 0
    task = fast.put(ids, tokens=60)
    task.job = replace(task.job, speculate=False)
    fast.run()
    assert task.out == first.out
    assert (task.record.drafted_tokens, task.record.guess_passes) == (0, 0)


def test_no_owner_is_guessed_for_from_anothers_text(
    toy_paths: dict[str, Path], rng: np.random.Generator
) -> None:
    """The same prompt and reply, of another owner: nothing is known of it."""
    bench, ids = Bench(toy_paths["llama"]), prompt(rng, 80)
    fast, drafted = speculating(bench, Conversations(CHEAP)), []
    for owner in ("a", "b", "a"):
        task = fast.put(ids, tokens=40)
        task.job = replace(task.job, owner=owner)
        fast.run()
        drafted.append(task.record.accepted_tokens)
    assert drafted[0] == drafted[1] < drafted[2]
