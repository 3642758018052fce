"""A draft changes how fast a reply comes, and nothing else: not its tokens, not what is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import GenerationFailed
from mlxcache.guess.drafts import DraftCosts, DraftRule
from mlxcache.guess.rule import LENGTHS, PassCosts
from mlxcache.model import kv
from mlxcache.model.pair import Pair
from mlxcache.scheduling import scheduler
from mlxcache.scheduling.decoder import Drawn
from mlxcache.scheduling.task import Task
from mlxcache.tree.budget import Budget
from mlxcache.types import Sampling, TokenLogprob, token_ids
from tests import scheduled as bench_module
from tests.conftest import ToyMaker
from tests.rounding import rounding
from tests.scheduled import Bench, PlainParser, admitted, drafting, finished
from tests.scheduling import test_scheduler as plain_tests
from tests.scheduling.drafts import KINDS, Kind, make_draft, make_resized
from tests.scheduling.history import live

MANY = int(os.environ.get("MLXCACHE_HISTORIES", "0"))

SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Families whose attention chooses the positions that it attends to."""

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(repetition_penalty=1.3, logit_bias=((50, 2.0),)),
    Sampling(temperature=1.1, seed=4, top_p=0.9, presence_penalty=0.4, frequency_penalty=0.2),
)


@pytest.fixture(scope="session")
def drafts(toy_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft of each kind for the llama toy."""
    root = tmp_path_factory.mktemp("drafts")
    return {kind: make_draft(toy_llama, root / kind, kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def drafted(request: pytest.FixtureRequest, toy_llama: Path, drafts: dict[str, Path]) -> Bench:
    """A scheduler with a draft that is right always, half the time, or hardly ever."""
    return Bench(toy_llama, draft=drafts[request.param])


@pytest.fixture
def alike(toy_llama: Path, drafts: dict[str, Path]) -> Bench:
    """A scheduler with a draft that is right half the time."""
    return Bench(toy_llama, draft=drafts["alike"])


@pytest.fixture
def plain(toy_llama: Path) -> Bench:
    """The same model without a draft."""
    return Bench(toy_llama)


def prompt(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(10, 400, n)]


def check_kv(bench: Bench, task: Task, ids: list[int]) -> None:
    """What the tree holds of `ids` is what both models compute for them at once.

    Sparse attention takes other positions where two scores are the same up to rounding: a position
    in a hundred may differ then.
    """
    sparse = getattr(bench.model, "model_type", "") in SPARSE
    match = bench.kv.tree.match(token_ids(ids))
    assert match.length == len(ids)
    fresh = bench.kv.layout.make()
    bench.model(mx.array([ids]), cache=fresh)
    slots = kv.flatten(fresh)
    for owner, start, end in match.spans(len(ids)):
        assert owner.aligned()
        for i, linear in enumerate(bench.kv.layout.linear):
            for j, array in enumerate(kv.arrays_of(slots[linear])):
                held = owner.view(i, j, start, end)
                expected = array[..., start:end, :]
                off = mx.any(mx.abs(held - expected) > rounding(expected), axis=(0, 1, 3))
                assert np.count_nonzero(np.asarray(off)) <= sparse * (end - start) / 100, (
                    i,
                    j,
                    off,
                )


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_a_reply_is_the_one_without_a_draft(
    drafted: Bench, plain: Bench, rng: np.random.Generator, sampling: Sampling
) -> None:
    """Token for token, drawn with a seed too, and both models hold the KV of all that was said."""
    ids = prompt(rng, 150)
    task = drafted.ask(ids, tokens=90, sampling=sampling)
    assert task.out == plain.ask(ids, tokens=90, sampling=sampling).out
    assert admitted(task).prompt_tokens == 150
    assert finished(task).generated_tokens == 90
    assert task.record.cached_tokens + task.record.fed_tokens == 150
    check_kv(drafted, task, ids + task.out)


@pytest.mark.parametrize(
    "claim",
    [
        plain_tests.test_a_cold_reply_is_mlx_lms,
        plain_tests.test_the_next_turn_feeds_only_what_is_new,
        plain_tests.test_an_edited_message_keeps_what_came_before_it,
        plain_tests.test_the_same_prompt_again_leaves_one_token_to_feed,
        plain_tests.test_a_cancelled_prefill_is_continued_by_the_retry,
        plain_tests.test_a_cancelled_reply_is_kept,
        plain_tests.test_a_shared_prefix_is_held_once,
        plain_tests.test_two_requests_at_once_compute_their_common_head_once,
        lambda bench, rng: plain_tests.test_a_small_budget_is_never_exceeded(bench, rng, 700),
    ],
)
def test_what_holds_without_a_draft_holds_with_one(
    alike: Bench, rng: np.random.Generator, claim: Callable[[Bench, np.random.Generator], None]
) -> None:
    """Cold, warm, edited, branched, cancelled, evicted."""
    claim(alike, rng)


@pytest.mark.parametrize("seed", range(MANY or 1))
@pytest.mark.parametrize("ram_tokens", [None, 500])
def test_a_random_history(
    toy_llama: Path, drafts: dict[str, Path], ram_tokens: int | None, seed: int
) -> None:
    """Whatever clients do; at 500 nearly everything is evicted again."""
    steps = 200 if MANY else 30
    history = live(
        toy_llama, seed, steps, ram_tokens=ram_tokens, longest=120, draft=drafts["alike"]
    )
    assert isinstance(history.bench.model, Pair)


def test_a_draft_that_is_right_saves_passes(
    drafted: Bench, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    """Of four tokens that a pass gives, three were drafted; a wrong draft leaves one per pass."""
    task = drafted.put(prompt(rng, 100), tokens=120)
    drafted.run(until=lambda: task.output is not None)
    passes = counted(drafted.model)
    drafted.run()
    record = task.record
    assert record.drafted_tokens >= record.accepted_tokens
    assert 120 <= record.accepted_tokens + len(passes) <= 120 + 5
    least, most = {"same": (30, 35), "alike": (40, 80), "other": (110, 125)}[
        request.node.callspec.params["drafted"]
    ]
    assert least <= len(passes) <= most


@pytest.mark.parametrize("tokens", [1, 2, 4, 6])
def test_a_limit_within_what_was_accepted_is_kept_to(
    toy_llama: Path, drafts: dict[str, Path], plain: Bench, rng: np.random.Generator, tokens: int
) -> None:
    """And no token is drafted that could not be handed out."""
    bench = Bench(toy_llama, draft=drafts["same"])
    ids = prompt(rng, 60)
    task = bench.ask(ids, tokens=tokens)
    assert task.out == plain.ask(ids, tokens=tokens).out
    assert bench.kv.tree.tokens == 60 + tokens
    assert task.record.drafted_tokens <= max(0, tokens - 1)
    check_kv(bench, task, ids + task.out)


class StopsAt(PlainParser):
    """Ends the reply at its nth token."""

    def __init__(self, at: int):
        self.left = at

    def feed(self, token: int) -> list[Any]:
        self.left -= 1
        self.done = None if self.left else "stop"
        return []


@pytest.mark.parametrize("at", [5, 6, 8])
def test_a_stop_within_what_was_accepted_leaves_nothing_behind_it(
    toy_llama: Path, drafts: dict[str, Path], rng: np.random.Generator, at: int
) -> None:
    """What was drafted and accepted beyond it is neither said nor kept."""
    bench = Bench(toy_llama, draft=drafts["same"])
    ids = prompt(rng, 60)
    task = bench.put(ids, tokens=50)
    bench.run(until=lambda: task.output is not None)
    assert task.output is not None
    task.output = replace(task.output, parser=cast(Any, StopsAt(at - len(task.out))))
    bench.run()
    assert (finished(task).reason, len(task.out)) == ("stop", at)
    assert bench.kv.tree.tokens == 60 + at
    check_kv(bench, task, ids + task.out)
    longer = ids + task.out + prompt(rng, 9)
    again = bench.ask(longer)
    assert admitted(again).cached_tokens == 60 + at
    assert again.out == bench.cold(longer)


@pytest.mark.parametrize("ticks", [1, 2, 3, 4, 6, 9])
def test_a_cancel_at_any_moment_keeps_what_was_handed_out(
    alike: Bench, rng: np.random.Generator, ticks: int
) -> None:
    """Each reply is cut at another tick."""
    ids = prompt(rng, 30)
    task = alike.put(ids, tokens=500)
    for _ in range(ticks):
        alike.tick()
        alike.check()
    alike.scheduler.cancel(task)
    alike.check()
    said = ids + task.out
    assert alike.kv.tree.tokens == len(said if task.out else ids[:-1])
    longer = said + prompt(rng, 5)
    again = alike.ask(longer)
    assert again.out == alike.cold(longer)
    check_kv(alike, again, longer + again.out)


def test_replies_at_once_are_stepped_in_turn(
    alike: Bench, plain: Bench, rng: np.random.Generator
) -> None:
    """Each in a lane of its own, at its own pace."""
    prompts = [prompt(rng, n) for n in (60, 64, 61)]
    tasks = [alike.put(ids, tokens=40) for ids in prompts]
    while not alike.scheduler.idle:
        alike.tick()
        alike.check()
        assert not any(lane.batched for lane in alike.scheduler.lanes.all)
    for ids, task in zip(prompts, tasks, strict=True):
        assert task.out == plain.ask(ids, tokens=40).out


def test_a_long_reply_is_committed_on_its_way(
    alike: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although several tokens may come at once, and pass the mark."""
    monkeypatch.setattr(scheduler, "COMMIT_EVERY", 7)
    ids = prompt(rng, 40)
    task = alike.put(ids, tokens=60)
    alike.run(until=lambda: bool(task.out))
    while not alike.scheduler.idle:
        assert alike.kv.tree.tokens >= len(ids) - 1 + len(task.out) // 7 * 7
        assert alike.kv.tree.tokens <= len(ids) + len(task.out)
        alike.tick()


def test_log_probabilities_are_the_models_own(
    alike: Bench, plain: Bench, rng: np.random.Generator
) -> None:
    """Those of each token at its place, behind the processors, and not the draft's."""
    ids, rows = prompt(rng, 80), []
    for bench in (alike, plain):
        task = bench.put(ids, tokens=30, sampling=SAMPLINGS[3])
        bench.run(until=lambda task=task: task.output is not None)  # type: ignore[misc]
        seen: list[tuple[int, np.ndarray]] = []

        def note(drawn: Drawn, seen: list[Any] = seen) -> TokenLogprob:
            seen.append((drawn.token, np.asarray(drawn.logprobs)))
            return TokenLogprob("", drawn.token, 0.0)

        assert task.output is not None
        task.output = replace(task.output, logprob=note)
        bench.run()
        rows.append(seen)
    for (token, mine), (same, theirs) in zip(*rows, strict=True):
        assert token == same
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=rounding(theirs))


def test_a_budget_without_room_for_drafts_still_serves(
    toy_llama: Path, drafts: dict[str, Path], plain: Bench, rng: np.random.Generator
) -> None:
    """The reply goes on without them, until there is room for nothing."""
    bench = Bench(toy_llama, draft=drafts["same"])
    bench.use(KVCache.open(bench.kv.layout, Budget(128 * bench.kv.layout.bytes_per_token)))
    ids = prompt(rng, 100)
    task = bench.ask(ids, tokens=200)
    assert finished(task).reason == "length"
    assert 128 - 4 <= 100 + len(task.out) <= 128
    assert task.out == plain.ask(ids, tokens=len(task.out)).out
    check_kv(bench, task, ids + task.out)


def test_quantised_keys_and_values_go_with_a_draft(toy: ToyMaker, rng: np.random.Generator) -> None:
    """Both models' are: the reply is that of the quantised model, and so is the next turn's."""
    model = toy("llama", head_dim=64)
    bench = Bench(model, draft=model, kv_bits=8)
    alone = Bench(model, kv_bits=8)
    ids = prompt(rng, 150)
    for n in range(2):
        task = bench.ask(ids, tokens=40)
        assert task.out == alone.twin().ask(ids, tokens=40).out
        assert (admitted(task).cached_tokens > 150) is bool(n)
        assert task.record.accepted_tokens > 20
        ids = ids + task.out + prompt(rng, 10)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_latents_and_layers_of_several_caches_can_be_cut_too(
    toy: ToyMaker, drafts: dict[str, Path], rng: np.random.Generator, family: str
) -> None:
    """With a draft of its own kind, and with one of another."""
    model = toy(family)
    ids = prompt(rng, 80)
    expected = Bench(model).ask(ids, tokens=20).out
    for draft, most in ((model, 9), (drafts["same"], 24)):
        bench = Bench(model, draft=draft)
        task = bench.put(ids, tokens=20)
        bench.run(until=lambda task=task: task.output is not None)  # type: ignore[misc]
        passes = counted(bench.model)
        bench.run()
        assert task.out == expected
        assert len(passes) <= most
        check_kv(bench, task, ids + task.out)


@pytest.mark.parametrize("kind", ["alike", pytest.param("other", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["gemma3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_sliding_windows_are_rewound(
    toy: ToyMaker, tmp_path: Path, rng: np.random.Generator, family: str, kind: Kind
) -> None:
    """Beyond their windows too, with wrong drafts; the next turn is a cold one's."""
    draft = make_draft(toy(family), tmp_path / "draft", kind, family)
    bench, alone = Bench(toy(family), draft=draft), Bench(toy(family))
    window = bench.kv.layout.window
    assert window is not None
    assert window < 150
    for sampling in SAMPLINGS[2:]:
        ids = prompt(rng, 150)
        for _ in range(2):
            task = bench.ask(ids, tokens=40, sampling=sampling)
            assert task.out == alone.twin().ask(ids, tokens=40, sampling=sampling).out
            assert task.record.drafted_tokens > task.record.accepted_tokens
            check_kv(bench, task, ids + task.out)
            ids = ids + task.out + prompt(rng, 10)


# -- where drafting does not pay -------------------------------------------------------------------


def ruled(bench: Bench, slope: float, share: float) -> Bench:
    """A twin of `bench` whose drafts are chosen by a rule for such costs.

    `slope`: cost of a further token in a pass. `share`: cost of a pass of the draft model.
    """
    target = PassCosts({0: [(n, 1e-3 * (1 + slope * (n - 1))) for n in LENGTHS]})
    draft = PassCosts({0: [(n, 1e-3 * share) for n in LENGTHS]})
    fresh = bench.twin()
    fresh.use(
        KVCache.open(fresh.kv.layout, Budget(1 << 30)),
        speculation=drafting(fresh.model, DraftRule(FixedCosts(target, draft))),
    )
    return fresh


class FixedCosts(DraftCosts):
    """Costs that no live round corrects: a toy's are other ones."""

    def observe(self, drafts: int, seconds: float, cached: int) -> float:
        return self.round(drafts, cached)

    def excess(self, seconds: float, cached: int) -> float:
        return 0.0


@pytest.mark.parametrize("sampling", [SAMPLINGS[3]])
def test_a_reply_whose_drafts_do_not_pay_is_decoded_without_them(
    drafted: Bench, plain: Bench, rng: np.random.Generator, sampling: Sampling
) -> None:
    """A few are tried; the draft model is fed the rest later, and both hold the same tokens."""
    bench, ids, drafts = ruled(drafted, 0.8, 0.5), prompt(rng, 100), 0
    for _ in range(2):
        passes = counted(bench.model)
        task = bench.put(ids, tokens=120, sampling=sampling)
        bench.run(until=lambda task=task: task.output is not None)  # type: ignore[misc]
        passes.clear()
        bench.run()
        assert task.out == plain.twin().ask(ids, tokens=120, sampling=sampling).out
        drafts += task.record.drafted_tokens
        assert sum(length == 1 for length in passes) > 105
        check_kv(bench, task, ids + task.out)
        ids = ids + task.out + prompt(rng, 10)
    assert 0 < drafts <= 5


@pytest.mark.parametrize(
    "ticks", [2, 30, 31, *(pytest.param(n, marks=pytest.mark.slow) for n in range(32, 60))]
)
def test_a_pause_may_end_at_any_moment(
    alike: Bench, plain: Bench, rng: np.random.Generator, ticks: int
) -> None:
    """Cancelled while the draft model is behind, or is tried again."""
    bench, ids = ruled(alike, 0.8, 0.5), prompt(rng, 60)
    task = bench.put(ids, tokens=500)
    bench.run(until=lambda: len(task.out) >= ticks)
    bench.scheduler.cancel(task)
    bench.check()
    assert task.out == plain.ask(ids, tokens=len(task.out)).out
    check_kv(bench, task, ids + task.out)


def test_a_reply_whose_drafts_pay_has_as_many_as_pay(
    toy_llama: Path, drafts: dict[str, Path], plain: Bench, rng: np.random.Generator
) -> None:
    """More of a cheap one, and passes over more tokens."""
    counts = []
    for share in (0.05, 0.5):
        bench, ids = ruled(Bench(toy_llama, draft=drafts["same"]), 0.02, share), prompt(rng, 60)
        task = bench.ask(ids, tokens=120)
        assert task.out == plain.twin().ask(ids, tokens=120).out
        counts.append(task.record.guess_passes)
        assert task.record.guess_saved_s > 0
        check_kv(bench, task, ids + task.out)
    assert 120 / 4 <= counts[0] < counts[1]


def test_a_paused_reply_is_committed_with_both_models(
    alike: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its way, so that another request can use it."""
    monkeypatch.setattr(scheduler, "COMMIT_EVERY", 30)
    bench, ids = ruled(alike, 0.8, 0.5), prompt(rng, 40)
    task = bench.put(ids, tokens=200)
    bench.run(until=lambda: len(task.out) >= 100)
    other = [*ids, *task.out[:80], 7, 8, 9]
    again = bench.put(other)
    bench.run()
    assert admitted(again).cached_tokens == 120
    assert again.out == bench.cold(other)
    check_kv(bench, again, other + again.out)


class Breaks:
    """A sampler that draws the likeliest token until its nth draw; each copy goes on counting."""

    def __init__(self, at: int):
        self.left = at

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.left -= 1
        if self.left < 0:
            raise ValueError("no choice")
        return mx.argmax(logprobs, axis=-1)


@pytest.mark.parametrize("at", [1, 5, 6])
def test_a_sampler_that_raises_fails_its_own_request(
    alike: Bench,
    rng: np.random.Generator,
    at: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was handed out before is right, and is kept."""
    ids = prompt(rng, 60)
    with monkeypatch.context() as patch:
        patch.setattr(bench_module, "make_sampler", lambda *_: Breaks(at))
        task = alike.put(ids, tokens=50)
        alike.run()
    assert isinstance(task.events[-1], GenerationFailed)  # type: ignore[attr-defined]
    assert f"{task.record.id}: request failed: unexpected exception" in caplog.text
    assert 0 < len(task.out) <= at
    longer = ids + task.out + prompt(rng, 5)
    again = alike.ask(longer)
    assert admitted(again).cached_tokens == len(longer) - 5
    assert again.out == alike.cold(longer)


@pytest.mark.parametrize("rows", [400, 600])
def test_another_number_of_logits_is_no_other_vocabulary(
    toy_llama: Path, tmp_path: Path, plain: Bench, rng: np.random.Generator, rows: int
) -> None:
    """Models of one family are padded to different sizes; ids that no draft has do no harm."""
    bench = Bench(toy_llama, draft=make_resized(toy_llama, tmp_path / "draft", rows))
    for sampling in (SAMPLINGS[0], Sampling(temperature=0.9, seed=3, logit_bias=((450, 9.0),))):
        ids = [int(t) for t in rng.integers(10, 512, 80)]
        task = bench.twin().ask(ids, tokens=40, sampling=sampling)
        assert task.out == plain.ask(ids, tokens=40, sampling=sampling).out
        assert task.record.accepted_tokens > 20 or rows < 512


def counted(model: Any) -> list[int]:
    """A list that gets the tokens of each pass of the pair's model from now on."""
    passes: list[int] = []
    verify = model.verify

    def counting(tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        passes.append(tokens.shape[1])
        return verify(tokens, *args, **kwargs)

    model.verify = counting
    return passes
