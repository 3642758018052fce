"""Leases: in place where possible, copied where not, and never beyond the budget."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.errors import GenerationFailed
from mlxcache.model.lineage import Lineage
from tests.memory import rounding_bytes
from tests.scheduled import Bench, admitted, prompt


@pytest.fixture
def dense(toy_paths: dict[str, Path]) -> Bench:
    return Bench(toy_paths["llama"])


def test_a_linear_turn_goes_on_in_the_same_buffer(dense: Bench, rng: np.random.Generator) -> None:
    ids = prompt(rng, 300)
    first = dense.ask(ids)
    (lineage,) = dense.kv.ram.idle.values()
    buffer = lineage.linear[0].keys
    dense.ask(ids + first.out + prompt(rng, 20))
    assert list(dense.kv.ram.idle.values()) == [lineage]
    assert lineage.linear[0].keys is buffer


def test_a_differing_tail_is_set_aside_and_the_buffer_goes_on(
    dense: Bench, rng: np.random.Generator
) -> None:
    ids = prompt(rng, 300)
    dense.ask(ids, tokens=20)
    (lineage,) = dense.kv.ram.idle.values()
    task = dense.ask(ids + prompt(rng, 20))
    assert admitted(task).cached_tokens == 300
    assert len(dense.kv.ram.idle) == 2
    tail = next(x for x in dense.kv.ram.idle.values() if x is not lineage)
    assert (tail.base, tail.length, tail.capacity) == (300, 320, 20)


def test_a_branch_near_the_front_copies_the_prefix(dense: Bench, rng: np.random.Generator) -> None:
    head = prompt(rng, 100)
    dense.ask(head + prompt(rng, 500))
    task = dense.ask(head + prompt(rng, 50))
    assert admitted(task).cached_tokens == 100
    assert sorted(x.base for x in dense.kv.ram.idle.values()) == [0, 0]


@pytest.mark.slow
def test_only_the_latest_few_keep_more_than_their_own(
    dense: Bench, rng: np.random.Generator
) -> None:
    head = prompt(rng, 1500)
    for _ in range(10):
        dense.ask(head + prompt(rng, 60), tokens=4)
    spare = [x for x in dense.kv.ram.idle.values() if x.whole]
    assert len(spare) <= 5
    assert dense.kv.tree.tokens == 1500 + 10 * 64
    compact = next(x for x in dense.kv.ram.idle.values() if not x.whole)
    assert compact.base == 1500


def test_a_compacted_session_is_made_whole_again(dense: Bench, rng: np.random.Generator) -> None:
    head = prompt(rng, 1500)
    chats = [head + prompt(rng, 60) for _ in range(10)]
    tasks = [dense.ask(ids, tokens=4) for ids in chats]
    ids = chats[2] + tasks[2].out + prompt(rng, 10)
    task = dense.ask(ids)
    assert admitted(task).cached_tokens == len(ids) - 10
    assert task.out == dense.cold(ids)


NO_MEMORY = RuntimeError("[malloc] Unable to allocate 17179869184 bytes.")


def fail(*_: object) -> None:
    raise NO_MEMORY


def test_a_buffer_that_cannot_be_compacted_leaves_the_budget_with_its_bytes(
    dense: Bench,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = prompt(rng, 2000)
    dense.ask(ids)
    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "_refill", fail)
        dense.kv.ram.evict(600 * dense.kv.layout.bytes_per_token)
    assert (
        f"copying KV to a smaller buffer failed; this KV is no longer in RAM: {NO_MEMORY}"
        in caplog.text
    )
    dense.check()
    assert dense.kv.budget.by_kind()["kv"] == 0
    assert dense.ask(ids).out == dense.cold(ids)


def test_a_state_that_cannot_be_copied_leaves_the_budget_with_its_bytes(
    toy_qwen3_5: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, ids = Bench(toy_qwen3_5), prompt(rng, 200)
    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "capture", fail)
        task = bench.put(ids, marks=[100])
        bench.run()
    assert isinstance(task.events[-1], GenerationFailed)  # type: ignore[attr-defined]
    bench.check()
    assert bench.ask(ids, marks=[100]).out == bench.cold(ids)


def test_what_mlx_holds_is_what_is_accounted_for(bench: Bench, rng: np.random.Generator) -> None:
    """Compacted, detached and copied buffers share nothing with what they were made from."""
    bench.ask(prompt(rng, 50), tokens=2)
    bench.kv.ram.clear()
    gc.collect()  # an earlier model may still be waiting to be freed
    mx.clear_cache()
    before = mx.get_active_memory()
    head = prompt(rng, 600)
    for i in range(12):
        bench.ask(head[: 600 - 20 * (i % 3)] + prompt(rng, 80), marks=[500, 560], tokens=4)
    held = sum(bench.kv.budget.by_kind().values())
    pages = rounding_bytes(bench.kv.ram.count_buffers())
    assert abs(mx.get_active_memory() - before - held) < 64_000 + pages


def test_two_branches_in_turn_copy_only_where_they_differ(
    dense: Bench, rng: np.random.Generator
) -> None:
    """The one whole buffer goes to whoever asks; the other's few positions are set aside."""
    head = prompt(rng, 1500)
    chats = [head + prompt(rng, 30), head + prompt(rng, 40)]
    dense.ask(chats[0], tokens=4)
    (whole,) = dense.kv.ram.idle.values()
    buffer = whole.linear[0].keys
    for turn in range(4):
        ids = chats[turn % 2]
        task = dense.ask(ids, tokens=4)
        assert task.out == dense.cold(ids, 4)
        assert admitted(task).cached_tokens >= (1500 if turn < 2 else len(ids) - 20)
        assert task.lease is not None
        assert task.lease.lineage is whole
        assert whole.linear[0].keys is buffer
        chats[turn % 2] = ids + task.out + prompt(rng, 20)
    assert dense.kv.budget.by_kind()["kv"] < 2 * 1500 * dense.kv.layout.bytes_per_token


def test_an_empty_engine_holds_nothing(bench: Bench, rng: np.random.Generator) -> None:
    for _ in range(3):
        bench.ask(prompt(rng, 200), marks=[100])
    bench.kv.ram.clear()
    assert bench.kv.budget.used == 0
    assert not bench.kv.ram.idle
    assert bench.kv.tree.tokens == 0
