"""A model's heads change how fast a reply comes; neither its tokens nor the KV of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache

from mlxcache.cache.kv_cache import KVCache
from mlxcache.model import kv, serialise
from mlxcache.model.heads import KnownRows, WithHeads
from mlxcache.model.mlx_lm_format import agrees, read_prompt_cache
from mlxcache.scheduling.speculation import HeadsOfModel
from mlxcache.store.snapshots import import_snapshot, read_snapshot
from mlxcache.tree.budget import Budget
from mlxcache.types import Sampling, token_ids
from tests.model.test_mlx_lm_format import written
from tests.scheduled import Bench, FreeDrafts, admitted, finished, prompt
from tests.scheduling import matrix, test_matrix
from tests.scheduling.guesses import speculating
from tests.scheduling.heads import add_heads, drafted, oracle, with_heads
from tests.scheduling.history import live
from tests.scheduling.matrix import settled
from tests.scheduling.test_scarce import NO_MEMORY, at_passes
from tests.scheduling.test_verifier import (
    PENALISED,
    SAMPLINGS,
    check_end,
    check_kept,
    check_kv,
    foretold,
)
from tests.store.session_of import session, snapshot_in


@pytest.fixture(scope="module")
def headed(toy_qwen3_5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with heads in its files."""
    return add_heads(toy_qwen3_5, tmp_path_factory.mktemp("heads") / "toy")


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes the heads right but for a share of tokens."""

    def make(wrong: float) -> None:
        monkeypatch.setattr("mlxcache.scheduling.speculation.HeadsDraft", oracle(wrong))

    return make


def slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("sampling", [*slow(*SAMPLINGS[:3]), SAMPLINGS[3]])
def test_a_reply_is_the_one_without_heads(
    headed: Path, right: Callable[[float], None], rng: np.random.Generator, sampling: Sampling
) -> None:
    """Token for token, and the slots of model and heads hold what a cold pass computes."""
    right(0.4)
    ids, fast = prompt(rng, 150), drafted(headed)
    plain = Bench(headed).ask(ids, tokens=90, sampling=sampling)
    task = fast.ask(ids, tokens=90, sampling=sampling)
    assert task.out == plain.out
    assert task.record.drafted_tokens > task.record.accepted_tokens > 30
    assert task.record.guess_source == "heads"
    check_kv(fast, task, ids + task.out)
    check_kept(fast, task)


@pytest.mark.parametrize("how", [*slow("limit", "stop"), "cancel"])
def test_a_reply_ends_within_a_draft(
    headed: Path, right: Callable[[float], None], rng: np.random.Generator, how: str
) -> None:
    right(0.3)
    ids = prompt(rng, 60)
    plain = Bench(headed).ask(ids, tokens=90)
    for end in (1, 2, 5, 6, 23):
        check_end(drafted(headed), ids, plain, how, end)


def test_heads_that_are_wrong_change_nothing(headed: Path, rng: np.random.Generator) -> None:
    """These know nothing of the model."""
    ids = prompt(rng, 150)
    task = drafted(headed).ask(ids, tokens=60, sampling=SAMPLINGS[1])
    assert task.out == Bench(headed).ask(ids, tokens=60, sampling=SAMPLINGS[1]).out
    assert task.record.drafted_tokens > 100 > task.record.accepted_tokens


def test_a_conversation_and_heads_take_turns(
    headed: Path, right: Callable[[float], None], rng: np.random.Generator
) -> None:
    right(0.4)
    ids, fast = prompt(rng, 150), drafted(headed)
    plain = Bench(headed).ask(ids, tokens=90)
    costs, model = FreeDrafts(), fast.model
    assert isinstance(model, WithHeads)
    fast = speculating(fast, foretold([plain]), HeadsOfModel(model, costs, 3), costs=costs)
    task = fast.ask(ids, tokens=90)
    assert task.out == plain.out
    check_kv(fast, task, ids + task.out)
    record = task.record
    counts = [record.guesses[source] for source in ("heads", "history")]
    assert all(one.accepted for one in counts)
    assert sum(one.drafted for one in counts) == record.drafted_tokens


@pytest.mark.parametrize(
    "claim",
    [
        test_matrix.test_the_next_turn,
        *slow(
            test_matrix.test_an_edited_message_in_the_middle,
            test_matrix.test_cancelled_in_prefill,
            test_matrix.test_forked,
        ),
    ],
)
def test_what_clients_do_is_as_right_and_warm(
    headed: Path, right: Callable[[float], None], claim: Callable[[Any], None]
) -> None:
    right(0.3)
    claim(checked(headed))


@pytest.mark.parametrize(
    "claim",
    [test_matrix.test_restarted, *slow(test_matrix.test_evicted_and_restored_from_disk)],
)
def test_what_the_disk_keeps_is_as_right_and_warm(
    headed: Path, right: Callable[[float], None], tmp_path: Path, claim: Callable[..., None]
) -> None:
    right(0.3)
    talks = checked(headed)
    claim(talks, tmp_path)
    talks.close()


def checked(path: Path) -> matrix.Checked:
    talks = matrix.Checked("qwen3_5", path, with_heads(path))
    talks.fresh()
    return talks


def test_replies_in_a_batch_fill_the_slot_and_are_not_drafted(
    headed: Path, right: Callable[[float], None], rng: np.random.Generator
) -> None:
    """Whoever is alone again is drafted for."""
    right(0.3)
    prompts = [prompt(rng, n) for n in (60, 64)]
    plain = [Bench(headed).ask(p, tokens=t) for p, t in zip(prompts, (90, 40), strict=True)]
    fast = drafted(headed)
    first = fast.put(prompts[0], tokens=90)
    fast.run(until=lambda: len(first.out) > 8)
    second = fast.put(prompts[1], tokens=40)
    fast.run(until=lambda: any(lane.batched for lane in fast.scheduler.lanes.all))
    before = first.record.drafted_tokens
    fast.run()
    assert [first.out, second.out] == [task.out for task in plain]
    assert first.record.drafted_tokens > before
    for ids, task in zip(prompts, (first, second), strict=True):
        check_kv(fast, task, ids + task.out)


def rows_of_heads(bench: Bench, ids: Sequence[int]) -> np.ndarray:
    """Which of the positions of `ids` the heads' slot has KV for, in the newest lineage."""
    task = bench.put([*ids, 9], tokens=4)
    bench.run(until=lambda: len(task.out) > 1)
    caches = task.held.lineage.caches
    known = KnownRows(caches)
    rows = np.zeros(len(ids), bool)
    rest = len(ids) - known.first
    rows[known.first :] = True if known.rows is None else np.asarray(known.rows)[:rest]
    bench.run()
    assert admitted(task).cached_tokens >= len(ids) - 1
    return rows


def test_sessions_of_a_server_without_heads_are_warm(
    headed: Path, right: Callable[[float], None], tmp_path: Path, rng: np.random.Generator
) -> None:
    """The slot lacks what was restored, and is filled from there on."""
    right(0.3)
    plain, fast = Bench(headed), drafted(headed)
    ids, kept = prompt(rng, 300), 0
    for bench, lacks in ((plain, False), (fast, True), (plain, False), (fast, True)):
        disk = bench.open_disk(tmp_path / "store")
        task = bench.ask(ids, tokens=40, marks=(len(ids) - 3,))
        assert task.out == Bench(headed).ask(ids, tokens=40).out
        assert admitted(task).restored_tokens == admitted(task).cached_tokens >= kept
        if lacks:
            assert task.record.accepted_tokens > 10
            rows = rows_of_heads(bench, ids + task.out)
            assert not rows[:300].all()
            assert rows[-40:].all()
        settled(disk)
        disk.close(0.0)
        ids = ids + task.out
        kept = len(ids)
        ids += prompt(rng, 20)


def test_a_snapshot_takes_the_heads_kv_if_all_of_its_runs_have_it(
    headed: Path, right: Callable[[float], None], tmp_path: Path, rng: np.random.Generator
) -> None:
    """And is continued with heads and without, wherever it was made."""
    right(0.3)
    plain, fast = Bench(headed), drafted(headed)
    ids = prompt(rng, 200)
    for n, benches in enumerate(((fast, fast), (plain, fast), (fast, plain))):
        said = list(ids)
        for bench in benches:
            disk = bench.open_disk(tmp_path / f"from{n}")
            said += bench.ask(said, tokens=30).out
            settled(disk)
            disk.close(0.0)
            said += prompt(rng, 70)
        stores = [fast.open_store(tmp_path / f"{name}{n}", 1 << 30) for name in ("from", "to")]
        file = snapshot_in(tmp_path / f"{n}.safetensors", stores[0], session(token_ids(said)))
        names = {place.name.split(".")[0] for place in read_snapshot(file).kv}
        assert names == ({"kv", "heads"} if n == 0 else {"kv"})
        spec = serialise.run_spec(plain.kv.layout)
        import_snapshot(stores[1], read_snapshot(file, spec=spec))
        for store in stores:
            store.close()
        for bench in (fast, plain):
            disk = bench.open_disk(tmp_path / f"to{n}")
            task = bench.ask(said, tokens=20)
            assert admitted(task).restored_tokens > 200
            assert task.out == Bench(headed).ask(said, tokens=20).out
            disk.close(0.0)


def test_prompt_caches_of_mlx_lm_have_no_heads(headed: Path, tmp_path: Path) -> None:
    """They are written without, and read as if there were none."""
    model = with_heads(headed).model
    ids, layout = token_ids(range(20, 120)), kv.survey(model)
    file = written(tmp_path / "prompt.safetensors", model, ids)
    assert len(load_prompt_cache(str(file))) == len(layout.make()) - 2
    found = read_prompt_cache(file, layout, mx.cpu)
    assert agrees(model, layout, found, ids)
    assert not mx.any(found.arrays[-1][0]).item()
    assert [array.shape[2] for array in found.arrays[-1]] == [100, 100]
    assert len(found.state) == len(layout.states)


def test_a_pass_without_memory_is_tried_again(
    headed: Path,
    right: Callable[[float], None],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it has written to all slots; then nothing more is drafted in the reply."""
    right(0.3)
    ids, fast, chosen, feed = prompt(rng, 60), drafted(headed), at_passes(9), WithHeads.__call__
    plain = Bench(headed).ask(ids, tokens=60, sampling=PENALISED)

    def failing(model: WithHeads, tokens: mx.array, cache: Any, **inputs: mx.array) -> mx.array:
        logits = feed(model, tokens, cache, **inputs)
        if chosen(tokens):
            raise copy(NO_MEMORY)
        return logits

    monkeypatch.setattr(WithHeads, "__call__", failing)
    task = fast.ask(ids, tokens=60, sampling=PENALISED)
    assert task.out == plain.out
    assert 5 < task.record.drafted_tokens < 40
    check_kv(fast, task, ids + task.out)


@pytest.mark.parametrize("ram_tokens", [*slow(None), 500])
def test_a_random_history(
    headed: Path, right: Callable[[float], None], ram_tokens: int | None
) -> None:
    """Whatever clients do; at 500 nearly everything is evicted again."""
    right(0.3)
    live(headed, 1, 30, ram_tokens=ram_tokens, longest=120, loaded=with_heads(headed))


def test_a_budget_without_room_for_drafts_still_serves(
    headed: Path, right: Callable[[float], None], rng: np.random.Generator
) -> None:
    right(0.0)
    ids, fast = prompt(rng, 100), drafted(headed)
    layout = fast.kv.layout
    least = 140 * layout.bytes_per_token + 6 * layout.running_bytes
    fast.use(KVCache.open(layout, Budget(least)))
    task = fast.ask(ids, tokens=200)
    assert finished(task).reason == "length"
    assert task.out == Bench(headed).ask(ids, tokens=200).out[: len(task.out)]


def test_the_slot_is_the_same_wherever_chunks_end(headed: Path) -> None:
    """Position i holds the KV of token i and of the hidden state before it."""
    model = with_heads(headed).model
    layout = kv.survey(model)
    ids = mx.arange(10, 90)[None]
    whole, parts = layout.make(), layout.make()
    model(ids, cache=whole)
    for start, end in ((0, 1), (1, 34), (34, 35), (35, 80)):
        model(ids[:, start:end], cache=parts)
    for one, other in zip(kv.arrays_of(whole[-2]), kv.arrays_of(parts[-2]), strict=True):
        rows = slice(1, 80)
        assert mx.allclose(one[..., rows, :], other[..., rows, :], atol=1e-4)
    assert not mx.any(whole[-2].keys[:, :, 0]).item()
    assert mx.allclose(whole[-1][0], parts[-1][0], atol=1e-4)
