"""What is proposed changes how fast a reply comes, and nothing else: not its tokens nor its KV."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import GenerationFailed
from mlxcache.guess.rule import LENGTHS, DraftCosts
from mlxcache.model import kv
from mlxcache.model.lineage import Lineage
from mlxcache.model.load import ModelSpec, load
from mlxcache.model.pair import Pair
from mlxcache.model.recurrence import Tape, recorder_of
from mlxcache.scheduling import scheduler
from mlxcache.scheduling.decoder import DecoderRow
from mlxcache.scheduling.speculation import Conversations, DraftModel, Speculation
from mlxcache.scheduling.task import Task
from mlxcache.scheduling.verifier import Verifier
from mlxcache.tree.budget import Budget
from mlxcache.types import Sampling, TokenLogprob, join_ids, token_ids
from tests import scheduled as bench_module
from tests.conftest import ToyMaker
from tests.kinds import CACHE_KINDS
from tests.rounding import rounding
from tests.scheduled import Bench, FreeDrafts, PlainParser, admitted, drafting, finished, prompt
from tests.scheduling import matrix, test_matrix
from tests.scheduling.drafts import KINDS, Kind, make_draft, make_resized
from tests.scheduling.faults import faulty
from tests.scheduling.guesses import CHEAP, Foretold, speculating
from tests.scheduling.history import live
from tests.scheduling.test_guided_steps import guides
from tests.scheduling.test_scarce import NO_MEMORY, at_passes
from tests.toys.configs import toy_options
from tests.toys.toy import FUSED

MANY = int(os.environ.get("MLXCACHE_HISTORIES", "0"))

PENALISED = Sampling(temperature=0.8, seed=5, repetition_penalty=1.3, frequency_penalty=0.2)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.1, seed=4, top_p=0.9, min_p=0.02),
    replace(PENALISED, logit_bias=((50, 2.0),)),
)

REWOUND = tuple(family for family in CACHE_KINDS if family != "llama4")
"""Families whose caches can be rewound, so that guesses are checked."""

SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Families whose attention chooses the positions that it attends to."""

Source = Literal["draft", "history"]
Faster = Callable[..., Bench]


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


@pytest.fixture(params=["draft", "history"])
def faster(request: pytest.FixtureRequest, alike: Bench, plain: Bench) -> Faster:
    """Makes the llama's bench in which replies like those of some tasks are right half the time."""

    def make(*tasks: Task, wrong: float = 0.4) -> Bench:
        return alike if request.param == "draft" else guessing(plain, tasks, wrong=wrong)

    return make


def foretold(tasks: Sequence[Task], *, wrong: float = 0.5) -> Foretold:
    """Guesses of the replies of `tasks`, which were computed without guesses."""
    return Foretold({task.prompt_tokens: task.out for task in tasks}, wrong=wrong)


def guessing(bench: Bench, tasks: Sequence[Task], *, wrong: float = 0.5) -> Bench:
    return speculating(bench, foretold(tasks, wrong=wrong))


def check_kv(bench: Bench, task: Task, ids: list[int]) -> None:
    """What the tree holds of `ids` is what all models compute for them at once.

    Sparse attention takes other positions where two scores are the same up to rounding: in the
    first layer behind that a position in a hundred may differ, and then any later one.
    """
    parted = len(ids)
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
                found = start + np.flatnonzero(np.asarray(off))
                if sparse and parted == len(ids) and 0 < len(found) <= (end - start) / 100:
                    parted = found[0]
                assert (found >= parted).all(), (i, j, found)


def check_kept(bench: Bench, task: Task) -> None:
    """What is kept of a reply is what a cold model computes, wherever the next prompt goes on."""
    ids = task.tokens().tolist()
    if not bench.kv.layout.opaque:
        check_kv(bench, task, ids)
    longer = [*ids, 11, 12, 13, 14, 15]
    again = bench.ask(longer)
    assert admitted(again).cached_tokens == len(ids)
    assert again.out == bench.cold(longer)


# -- by either source ------------------------------------------------------------------------------


class StopsAt(PlainParser):
    """Ends the reply at its nth token."""

    def __init__(self, at: int):
        self.left = at

    def feed(self, token: int) -> list[Any]:
        self.left -= 1
        self.done = None if self.left else "stop"
        return []


def check_end(fast: Bench, ids: list[int], plain: Task, how: str, end: int) -> None:
    """A reply that is over after `end` tokens by its limit or a stop, or is cancelled then."""
    task = fast.put(ids, tokens=end if how == "limit" else 90)
    fast.run(until=lambda: task.output is not None)
    assert task.output is not None
    if how == "stop" and len(task.out) < end:
        task.output = replace(task.output, parser=StopsAt(end - len(task.out)))
    elif how == "cancel":
        fast.run(until=lambda: len(task.out) >= end)
        fast.scheduler.cancel(task)
    fast.run()
    fast.check()
    assert task.out == plain.out[: len(task.out)]
    if how != "cancel" and len(task.out) != 90:
        assert len(task.out) == end
    assert how != "limit" or end > 1 or not task.record.drafted_tokens
    check_kept(fast, task)


@pytest.mark.parametrize("how", ["limit", "stop", "cancel"])
def test_a_reply_ends_within_what_was_accepted(
    faster: Faster, plain: Bench, rng: np.random.Generator, how: str
) -> None:
    """What was accepted beyond its end is neither said nor kept."""
    ids = prompt(rng, 60)
    reply = plain.ask(ids, tokens=90)
    for end in (1, 2, 5, 6, 8):
        check_end(faster(reply), ids, reply, how, end)


def test_log_probabilities_are_those_of_each_token(
    faster: Faster, plain: Bench, rng: np.random.Generator
) -> None:
    """At its place, behind the processors, and not those of a draft model."""
    ids, rows = prompt(rng, 80), []
    reply = plain.twin().ask(ids, tokens=40, sampling=PENALISED)
    for bench in (plain.twin(), faster(reply)):
        task = bench.put(ids, tokens=40, sampling=PENALISED)
        bench.run(until=lambda task=task: task.output is not None)  # type: ignore[misc]
        seen: list[tuple[int, np.ndarray]] = []

        def note(
            logprobs: mx.array, tokens: Sequence[int], seen: list[Any] = seen
        ) -> list[TokenLogprob]:
            seen.append((tokens[0], np.asarray(logprobs[0])))
            return [TokenLogprob("", tokens[0], 0.0)]

        assert task.output is not None
        task.output = replace(task.output, logprob=note)
        bench.run()
        rows.append(seen)
    for (token, mine), (same, theirs) in zip(*rows, strict=True):
        assert token == same
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=rounding(theirs))


def test_a_budget_without_room_for_guesses_still_serves(
    faster: Faster, plain: Bench, rng: np.random.Generator
) -> None:
    """The reply goes on without them, until there is room for nothing."""
    ids = prompt(rng, 100)
    reply = plain.twin().ask(ids, tokens=200)
    bench = faster(reply, wrong=0.0)
    layout, proposers = bench.kv.layout, bench.scheduler.lanes.speculation
    small = KVCache.open(layout, Budget(128 * layout.bytes_per_token))
    bench.use(small, speculation=proposers)
    task = bench.ask(ids, tokens=200)
    assert finished(task).reason == "length"
    assert 128 - 4 <= 100 + len(task.out) <= 128
    assert task.out == reply.out[: len(task.out)]
    check_kv(bench, task, ids + task.out)


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        ("deepseek_v3", 8),
        ("gemma3", 4),
        *(
            pytest.param(family, bits, marks=pytest.mark.slow)
            for family in ("llama", "gemma3", "gpt_oss", "qwen3_5")
            for bits in (8, 4)
            if (family, bits) != ("gemma3", 4)
        ),
    ],
)
def test_quantised_keys_and_values_are_rewound(toy: ToyMaker, family: str, bits: int) -> None:
    """The reply is that of the quantised model alone, and so is the next turn's."""
    path = toy(**toy_options(family), layers=2, window=32, **FUSED)
    checked = matrix.Checked(family, path, load(ModelSpec(str(path))), kv_bits=bits)
    checked.fresh()
    layout = checked.kv.layout
    assert (recorder_of(checked.model, layout) is not None) is layout.recurrent
    talk = matrix.conversation(checked, 1).asked(20)
    first = checked.say(talk, tokens=40)
    following = talk.answered(first).asked(21)
    checked.speculation = foretold([first, checked.say(following, tokens=40)]).alone
    checked.fresh()
    for asked in (talk, following):
        record = checked.say(asked, tokens=40).record
        assert record.drafted_tokens > record.accepted_tokens > 4


# -- from the conversation -------------------------------------------------------------------------


def check_same(bench: Bench, rng: np.random.Generator, samplings: Sequence[Sampling]) -> None:
    for sampling in samplings:
        ids = prompt(rng, 150)
        plain = bench.twin().ask(ids, tokens=90, sampling=sampling)
        guesses = foretold([plain])
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


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("qwen3_next", "kimi_linear", "lfm2")
        ),
    ],
)
def test_right_tokens_before_a_wrong_one_are_not_fed_again(
    toy: ToyMaker, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Where the state after them can be recomputed."""
    bench, ids, again = Bench(toy(family)), prompt(rng, 150), list[int]()
    plain, step = bench.twin().ask(ids, tokens=90), Verifier.step

    def counted(decoder: Verifier) -> Any:
        again[-1] += decoder.feeds - 1
        return step(decoder)

    monkeypatch.setattr(Verifier, "step", counted)
    for recorder in (recorder_of, lambda model, layout: None):
        monkeypatch.setattr("mlxcache.scheduling.lanes.recorder_of", recorder)
        again.append(0)
        fast = guessing(bench, [plain], wrong=0.9)
        task = fast.ask(ids, tokens=90)
        assert task.out == plain.out
        assert task.record.drafted_tokens > task.record.accepted_tokens > 9
        check_kept(fast, task)
    assert again[0] == 0 < again[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "falcon_h1", "rwkv7"])
def test_without_its_recurrent_state_put_back_a_reply_differs(
    toy: ToyMaker, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The control of the tests above: they would see a state that is wrong."""
    bench, ids = Bench(toy(family)), prompt(rng, 150)
    plain = bench.twin().ask(ids, tokens=90)
    monkeypatch.setattr(kv, "put_back", lambda slots, state: None)
    monkeypatch.setattr(Tape, "end_at", lambda tape, count: None)
    assert guessing(bench, [plain]).ask(ids, tokens=90).out != plain.out


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
        fast = guessing(bench, [plain])
        task = fast.ask(ids, tokens=40, sampling=sampling, guide=guide.copy())
        assert task.out == plain.out
        assert task.record.accepted_tokens > 5
        check_kept(fast, task)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3_5", "cancel"),
        *(
            pytest.param(family, how, marks=pytest.mark.slow)
            for family in REWOUND
            for how in ("limit", "stop", "cancel")
        ),
    ],
)
def test_a_reply_may_end_anywhere(
    toy: ToyMaker, rng: np.random.Generator, family: str, how: str
) -> None:
    """Also of a recurrent model, whose state is that of its last token."""
    bench, ids = Bench(toy(family)), prompt(rng, 60)
    plain = bench.twin().ask(ids, tokens=90)
    for end in (1, 2, 5, 23, 24):
        check_end(guessing(bench, [plain], wrong=0.3), ids, plain, how, end)


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
    made_by = Speculation(CHEAP, [Conversations()])
    task = bench.put(ids.tolist(), tokens=1)
    bench.run(until=lambda: task.output is not None)
    proposals = made_by.begin(task, redo=True)
    assert proposals is not None
    decoder = Verifier(bench.model, DecoderRow(lambda logits: logits, (), None), lineage, proposals)
    decoder.rewind(join_ids(ids, token_ids([5, 6])))
    assert lineage.length == len(ids)


@pytest.mark.slow
def test_replies_that_can_share_a_batch_do(bench: Bench, rng: np.random.Generator) -> None:
    """Nothing is guessed in a batch; who is left alone after it guesses again."""
    prompts = [prompt(rng, n) for n in (60, 64)]
    plain = [bench.twin().ask(p, tokens=t) for p, t in zip(prompts, (90, 40), strict=True)]
    fast = guessing(bench, plain, wrong=0.3)
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
    plain = bench.twin().ask(ids, tokens=90, sampling=PENALISED)
    fast = guessing(bench, [plain], wrong=0.3)
    model = faulty(fast)
    model.error, model.when = NO_MEMORY, at_passes(*passes)
    task = fast.ask(ids, tokens=90, sampling=PENALISED)
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
    fast = guessing(bench, [plain], wrong=0.2)
    task = fast.ask(ids, tokens=90)
    assert task.out == plain.out
    for at in (20, 40, 60, 80):
        other = [*ids, *task.out[:at], 21, 22, 23]
        again = fast.ask(other)
        assert admitted(again).cached_tokens == 40 + at
        assert again.out == fast.cold(other)


def test_a_reply_that_repeats_is_guessed_from_its_own_conversation(
    plain: Bench, rng: np.random.Generator
) -> None:
    """Most of a second reply that says the same is guessed, and none if the request says so."""
    ids, fast = prompt(rng, 80), speculating(plain, Conversations())
    first = fast.ask(ids, tokens=60)
    again = fast.ask(ids, tokens=60)
    assert again.out == first.out == plain.ask(ids, tokens=60).out
    record = again.record
    assert record.accepted_tokens > 40
    assert 0 < record.guess_passes < 12
    assert record.guess_saved_s > 0
    task = fast.put(ids, tokens=60)
    task.job = replace(task.job, speculate=False)
    fast.run()
    assert task.out == first.out
    assert (task.record.drafted_tokens, task.record.guess_passes) == (0, 0)


def test_no_owner_is_guessed_for_from_anothers_text(plain: Bench, rng: np.random.Generator) -> None:
    """The same prompt and reply, of another owner: nothing is known of it."""
    ids, drafted = prompt(rng, 80), []
    fast = speculating(plain, Conversations())
    for owner in ("a", "b", "a"):
        task = fast.put(ids, tokens=40)
        task.job = replace(task.job, owner=owner)
        fast.run()
        drafted.append(task.record.accepted_tokens)
    assert drafted[0] == drafted[1] < drafted[2]


# -- by a draft model ------------------------------------------------------------------------------


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
        test_matrix.test_the_same_prompt_again,
        test_matrix.test_the_next_turn,
        test_matrix.test_an_edited_message_in_the_middle,
        test_matrix.test_cancelled_in_prefill,
    ],
)
@pytest.mark.parametrize("bits", [None, pytest.param(8, marks=pytest.mark.slow), 4])
def test_what_clients_do_is_as_right_and_warm_with_a_draft(
    toy_llama: Path, drafts: dict[str, Path], claim: Callable[[Any], None], bits: int | None
) -> None:
    loaded = load(ModelSpec(str(toy_llama), draft=str(drafts["alike"])))
    checked = matrix.Checked("llama", toy_llama, loaded, kv_bits=bits)
    checked.fresh()
    claim(checked)


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
    window = kv.windows(bench.kv.layout.make())[0].max_size
    assert window < 150
    for sampling in SAMPLINGS[2:]:
        ids = prompt(rng, 150)
        for _ in range(2):
            task = bench.ask(ids, tokens=40, sampling=sampling)
            assert task.out == alone.twin().ask(ids, tokens=40, sampling=sampling).out
            assert task.record.drafted_tokens > task.record.accepted_tokens
            check_kv(bench, task, ids + task.out)
            ids = ids + task.out + prompt(rng, 10)


# -- by both ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_a_conversation_and_a_draft_model_take_turns(
    drafted: Bench, plain: Bench, rng: np.random.Generator, sampling: Sampling
) -> None:
    """Both models hold what was said, whichever proposed it, also of a reply that is cancelled."""
    ids = prompt(rng, 150)
    reply = plain.ask(ids, tokens=90, sampling=sampling)
    model, sources = drafted.model, (foretold([reply]), DraftModel(drafted.model, FreeDrafts(), 3))
    assert isinstance(model, Pair)
    for end in (90, 31):
        fast = speculating(drafted, *sources)
        task = fast.put(ids, tokens=90, sampling=sampling)
        fast.run(until=lambda task=task, end=end: len(task.out) >= end)  # type: ignore[misc]
        fast.scheduler.cancel(task)
        fast.run()
        assert task.out == reply.out[: len(task.out)]
        assert task.record.accepted_tokens > end / 4
        check_kv(fast, task, ids + task.out)


# -- where drafting does not pay -------------------------------------------------------------------


class FixedCosts(FreeDrafts):
    """Costs that no live round corrects: a toy's are other ones.

    `slope`: cost of a further token in a pass. `share`: cost of a pass of the draft model.
    """

    def __init__(self, slope: float, share: float):
        DraftCosts.__init__(
            self,
            {0: [(n, 1e-3 * (1 + slope * (n - 1))) for n in LENGTHS]},
            {0: [(n, 1e-3 * share) for n in LENGTHS]},
        )
        self.share = share

    def catch_up(self, tokens: int, cached: int) -> float:
        return self.share * (tokens > 0)


def ruled(bench: Bench, slope: float, share: float) -> Bench:
    """A twin of `bench` whose drafts are chosen by a rule for such costs; see `FixedCosts`."""
    fresh = bench.twin()
    fresh.use(
        KVCache.open(fresh.kv.layout, Budget(1 << 30)),
        speculation=drafting(fresh.model, FixedCosts(slope, share)),
    )
    return fresh


def test_a_reply_whose_drafts_do_not_pay_is_decoded_without_them(
    drafted: Bench, plain: Bench, rng: np.random.Generator
) -> None:
    """A few are tried; the draft model is fed the rest later, and both hold the same tokens."""
    bench, ids, drafts, sampling = ruled(drafted, 0.8, 0.5), prompt(rng, 100), 0, SAMPLINGS[3]
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
    alike: Bench, rng: np.random.Generator, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was handed out before is right, and is kept."""
    ids = prompt(rng, 60)
    with monkeypatch.context() as patch:
        patch.setattr(bench_module, "make_sampler", lambda *_: Breaks(at))
        task = alike.put(ids, tokens=50)
        alike.run()
    assert isinstance(task.events[-1], GenerationFailed)  # type: ignore[attr-defined]
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
