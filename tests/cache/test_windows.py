"""Rows of sliding windows: kept with memory to spare, else only before checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlxcache.cache.ram import STEP, rounded
from mlxcache.model import kv
from mlxcache.model.lineage import Lineage
from mlxcache.types import token_ids
from tests.conftest import ToyMaker
from tests.scheduled import Bench, prompt

FAMILIES = ("gemma3", "gemma4", "gpt_oss", "cohere2", "olmo3", "ministral3")


@pytest.fixture(params=FAMILIES[:3])
def bench(request: pytest.FixtureRequest, toy: ToyMaker) -> Iterator[Bench]:
    made = Bench(toy(request.param))
    yield made
    made.check()


def rows(bench: Bench) -> list[int]:
    return [lineage.rows for lineage in bench.kv.ram.idle.values()]


def test_any_prefix_goes_on_to_the_token_with_memory_to_spare(
    bench: Bench, rng: np.random.Generator
) -> None:
    ids = prompt(rng, 500)
    first = bench.ask(ids, tokens=40)
    whole = [*ids, *first.out]
    for at in (530, 499, 333, 70, 3):
        edited = [*whole[:at], *prompt(rng, 20)]
        task = bench.ask(edited)
        assert task.record.cached_tokens >= at - 1
        assert task.out == bench.cold(edited)


def test_a_prompt_goes_on_from_a_mark_once_its_rows_are_gone(
    bench: Bench, rng: np.random.Generator
) -> None:
    ids = prompt(rng, 500)
    bench.ask(ids, marks=(100, 300))
    before = bench.kv.budget.used
    for lineage in bench.kv.ram.idle.values():
        bench.kv.ram.drop_rows(lineage)
    assert bench.kv.budget.used < before
    for at, cached in ((420, 300), (299, 100), (99, 0)):
        edited = [*ids[:at], *prompt(rng, 20)]
        task = bench.ask(edited)
        assert task.record.cached_tokens == cached
        assert task.out == bench.cold(edited)


@pytest.mark.parametrize("bench", FAMILIES, indirect=True)
def test_rows_may_go_at_any_time(bench: Bench, rng: np.random.Generator) -> None:
    """Conversations that go on and part, while rows are dropped at random."""
    talks = [prompt(rng, 150)]
    for _ in range(25):
        for lineage in list(bench.kv.ram.idle.values()):
            if rng.random() < 0.4:
                bench.kv.ram.drop_rows(lineage)
        before = talks[rng.integers(len(talks))]
        ids = [*before[: rng.integers(1, len(before) + 1)], *prompt(rng, int(rng.integers(2, 200)))]
        task = bench.ask(ids, tokens=int(rng.integers(1, 90)), marks=(len(ids) - 1,))
        assert task.out == bench.cold(ids, len(task.out))
        talks = [*talks, [*ids, *task.out]][-6:]
        bench.check()


def test_pressure_takes_rows_before_conversations(bench: Bench, rng: np.random.Generator) -> None:
    talks = []
    for _ in range(3):
        ids = prompt(rng, 600)
        talks.append([*ids, *bench.ask(ids, tokens=2, marks=(300,)).out])
    assert all(rows(bench))
    layout, ram = bench.kv.layout, bench.kv.ram
    held = sum(lineage.rows for lineage in ram.idle.values()) * layout.window_bytes
    tokens = bench.kv.tree.tokens
    assert ram.make_room(bench.kv.budget.free + held)
    assert not any(rows(bench))
    assert bench.kv.tree.tokens == tokens
    for ids in talks:
        assert bench.kv.reusable(token_ids([*ids, 7])) >= 601


def test_a_turn_drops_its_own_rows_before_its_conversation(
    bench: Bench, rng: np.random.Generator
) -> None:
    """Growth copies: with its rows, a lineage in use finds no room for that."""
    ids = prompt(rng, 600)
    first = bench.ask(ids, tokens=2, marks=(300,))
    following = [*ids, *first.out, *prompt(rng, 700)]
    (lineage,) = bench.kv.ram.idle.values()
    layout, budget = bench.kv.layout, bench.kv.budget
    grown = rounded(len(following) + STEP) - lineage.capacity
    needed = grown * layout.bytes_per_token + lineage.capacity * layout.widest
    kept = lineage.rows * layout.window_bytes
    assert kept > layout.running_bytes + budget.by_kind()["checkpoints"]
    budget.charge("images", budget.free - needed - layout.running_bytes + kept)
    task = bench.ask(following, tokens=2, marks=(len(following) - 4,))
    assert task.record.cached_tokens >= 600
    assert rows(bench) == [0]


def test_windows_slide_where_memory_is_short(toy: ToyMaker, rng: np.random.Generator) -> None:
    """A long prompt takes the KV of full attention, and of windows no more than they see."""
    bench = Bench(toy("gemma3"))
    layout = bench.kv.layout
    bench = Bench(toy("gemma3"), ram=3000 * layout.bytes_per_token + 12 * layout.checkpoint_bytes)
    window = kv.windows(layout.make())[0].max_size
    ids = prompt(rng, 2500)
    task = bench.ask(ids, tokens=30, marks=(1000, 2490))
    assert task.out == bench.cold(ids, 30)
    (lineage,) = bench.kv.ram.idle.values()
    assert lineage.rows == 0
    assert layout.bytes_per_token + layout.window_bytes > 1.2 * bench.kv.budget.used / len(ids)
    assert layout.checkpoint_bytes == window * layout.window_bytes
    bench.check()


@pytest.mark.parametrize("bench", FAMILIES, indirect=True)
def test_an_edited_message_and_another_reply_continue_from_the_disk(
    bench: Bench, rng: np.random.Generator, tmp_path: Path
) -> None:
    """The new KV does not pay for their checkpoints, which are written when the talk rests."""
    bench.open_disk(tmp_path)
    window = kv.windows(bench.kv.layout.make())[0].max_size
    ids, marks = prompt(rng, 10 * window), [100]
    for new in (20, window + 30):
        marks = [*marks, len(ids), len(ids) + new]
        ids = [*ids, *prompt(rng, new + 4)]
        ids = [*ids, *bench.ask(ids, tokens=8, marks=marks).out]
    for at, cached in ((marks[-2], marks[-2] - 1), (marks[-1], marks[-1])):
        bench.kv.close(20.0)
        bench.open_disk(tmp_path)
        other = [*ids[: at + 2], *prompt(rng, 10)]
        task = bench.ask(other, marks=marks)
        assert cached <= task.record.cached_tokens <= at
        assert task.out == bench.cold(other)
    bench.kv.close(20.0)


def test_a_state_within_the_first_chunk_is_written(
    bench: Bench, rng: np.random.Generator, tmp_path: Path
) -> None:
    """There a window that slides may hold the keys as the model has computed them, transposed."""
    ids = prompt(rng, bench.chunk + 30)
    layout = bench.kv.layout
    ram = 2000 * layout.bytes_per_token + 12 * layout.checkpoint_bytes + (1 << 16)
    disk = bench.open_disk(tmp_path, ram=ram, pending=1 << 16)
    budget = bench.kv.budget
    budget.charge("images", int(0.8 * budget.limit) - budget.used)
    bench.ask(ids, marks=(29, len(ids) - 4))
    assert rows(bench) == [0]
    assert disk.write_behind.drain(20.0) == 0
    assert disk.write_behind.works
    bench.kv.close(20.0)


def test_a_lineage_whose_release_failed_goes_with_the_next(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(lineage: Lineage) -> None:
        raise MemoryError

    bench.ask(prompt(rng, 300))
    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "release", fail)
        with pytest.raises(MemoryError):
            bench.kv.clear()
    bench.check()
    bench.ask(prompt(rng, 50))
    assert {id(value) for value in bench.kv.tree.values()} == set(bench.kv.ram.idle)
