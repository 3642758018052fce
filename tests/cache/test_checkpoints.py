"""Checkpoints of layers that cannot be sliced: where they are left, which go, what is reused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.cache.checkpoints import SPACING, Trail, stops
from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.path_write import PathWrite
from mlxcache.prompt.marks import MARK_DISTANCE
from mlxcache.scheduling import scheduler
from mlxcache.scheduling.cost import STOPS, Cost
from mlxcache.tree.budget import Budget
from mlxcache.tree.thinning import BUDGET_SHARE, FEWEST, NEWEST
from mlxcache.types import token_ids
from tests.scheduled import Bench, admitted, prompt
from tests.toys.toy import make_toy

TOYS = ("qwen3_5", "mamba2", "llama4", "deepseek_v41")


@pytest.fixture(params=TOYS)
def bench(request: pytest.FixtureRequest, toy: Callable[[str], Path]) -> Bench:
    return Bench(toy(request.param))


@pytest.fixture
def hybrid(toy: Callable[[str], Path]) -> Bench:
    return Bench(toy("qwen3_5"))


def checkpoints(bench: Bench, ids: list[int]) -> list[int]:
    """Where the path of `ids` has checkpoints."""
    match = bench.kv.tree.match(token_ids(ids), touch=False)
    return [at for at, _ in match.checkpoints]


# -- where a prefill stops -----------------------------------------------------------------------


def test_a_prefill_stops_at_each_mark_it_has_not_seen() -> None:
    """And before its last token where nothing is marked."""
    assert stops((100, 150, 190), 0, 200) == (100, 150, 190)
    assert stops((100, 150, 190), 120, 200) == (150, 190)
    assert stops((), 0, 200) == (199,)
    assert stops((100,), 100, 120) == ()


def test_a_prefill_stops_where_an_earlier_one_parted() -> None:
    """Unless that is at what is reused."""
    assert stops((100, 190), 0, 200, parted=140) == (100, 140, 190)
    assert stops((100, 190), 100, 200, parted=100 + MARK_DISTANCE - 1) == (190,)
    assert stops((100, 150), 100, 200, parted=900) == (150, 199)


def test_a_long_run_is_divided() -> None:
    """From what is reused on, and after each mark."""
    assert stops((2 * SPACING,), 0, 10 * SPACING // 4) == (SPACING, 2 * SPACING)
    assert stops((10,), 0, 2 * SPACING + 20) == (10, SPACING + 10, 2 * SPACING + 10)


@settings(deadline=None)
@given(
    marks=st.sets(st.integers(1, 20_000), max_size=60).map(sorted),
    cached=st.integers(0, 15_000),
    parted=st.integers(0, 20_000),
    most=st.one_of(st.none(), st.integers(0, 30)),
    more=st.integers(1, 5000),
)
def test_stops_are_few_and_apart(
    marks: list[int], cached: int, parted: int, most: int | None, more: int
) -> None:
    """Ascending, in what is to be fed; those that must be are, whatever `most` is."""
    length = max([cached, *marks]) + more
    found = stops(marks, cached, length, parted=parted, most=most)
    every = stops(marks, cached, length, parted=parted)
    assert set(found) <= set(every)
    assert all(b - a >= MARK_DISTANCE for a, b in zip([cached, *every], every, strict=False))
    assert all(cached < at < length for at in found)
    kept = {*marks[:1], *marks[-1:], parted, *every[-NEWEST:]} & set(every)
    assert kept <= set(found)
    if most is not None:
        assert len(found) <= max(most, len(kept))


def test_stops_take_a_twentieth_of_a_prefill() -> None:
    """A few are always worth it."""
    slow = Cost(64.0, 0.0, 0.0, 1000.0, per_pass=0.01)
    assert slow.stops(20_000) == 100
    assert slow.stops(100) == STOPS
    assert Cost(64.0, 0.0, 0.0, 1000.0).stops(20_000) >= 20_000


# -- what is reused ------------------------------------------------------------------------------


def test_an_edited_message_anywhere_keeps_all_before_it(
    bench: Bench, rng: np.random.Generator
) -> None:
    """Of 40 messages, turn by turn: reuse ends where the message before the edit does."""
    ids, starts = prompt(rng, 60), []
    for _ in range(20):
        starts.append(len(ids))
        ids += prompt(rng, 25)
        starts.append(len(ids))
        ids += bench.ask([*ids, 1, 2], marks=starts, tokens=20).out
        ids[starts[-1] : starts[-1]] = [1, 2]
    for message in (35, 22, 9, 2):
        at = starts[message]
        edited = [*ids[:at], *prompt(rng, 30)]
        task = bench.ask(edited, marks=[*starts[: message + 1]], tokens=2)
        assert at - MARK_DISTANCE < admitted(task).cached_tokens <= at + 2
        assert task.out == bench.cold(edited, 2)


def test_two_that_part_reveal_where_the_third_will(bench: Bench, rng: np.random.Generator) -> None:
    """The first is cold, the second leaves a checkpoint where it parts, the third starts there."""
    ids = prompt(rng, 300)
    bench.ask(ids, marks=[100, 290])
    for n, expected in enumerate((100, 237, 237)):
        branch = [*ids[:237], n + 5, *prompt(rng, 40)]
        task = bench.ask(branch, marks=[100, len(branch) - 5], tokens=4)
        assert admitted(task).cached_tokens == expected
        assert task.out == bench.cold(branch, 4)


def test_one_that_waits_reveals_where_it_will_part(bench: Bench, rng: np.random.Generator) -> None:
    """The prompt that is being computed leaves a checkpoint there for it."""
    head = prompt(rng, 400)
    tasks = [bench.put([*head, n + 5, *prompt(rng, 40)], tokens=4) for n in range(3)]
    bench.run()
    assert [admitted(task).cached_tokens for task in tasks] == [0, 400, 400]
    for task in tasks:
        assert task.out == bench.cold(task.ids.tolist(), 4)


def test_going_on_from_the_end_of_a_reply_costs_nothing(
    bench: Bench, rng: np.random.Generator
) -> None:
    ids = prompt(rng, 150)
    for tokens in (1, 7, 40):
        task = bench.ask(ids, marks=[len(ids) - 4], tokens=tokens)
        ids = [*ids, *task.out, *prompt(rng, 30)]
        again = bench.ask(ids, marks=[len(ids) - 4], tokens=3)
        assert admitted(again).cached_tokens == len(ids) - 30
        ids = [*ids, *again.out, 9]


def test_a_thought_that_is_left_out_costs_the_reply_alone(
    bench: Bench, rng: np.random.Generator
) -> None:
    """The next prompt parts right after the generation prompt; a checkpoint lies there."""
    ids = prompt(rng, 200)
    opens = len(ids) - 3
    task = bench.ask(ids, marks=[100, opens], tokens=40)
    turn = [*ids[:-1], *task.out[20:], *prompt(rng, 30)]
    again = bench.ask(turn, marks=[100, opens, len(turn) - 3])
    assert admitted(again).cached_tokens == opens
    assert again.out == bench.cold(turn)


def test_a_long_reply_leaves_no_checkpoints_but_its_end(
    hybrid: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on from the middle of a reply, though it is committed again and again."""
    monkeypatch.setattr(scheduler, "COMMIT_EVERY", 20)
    ids = prompt(rng, 100)
    task = hybrid.put(ids, marks=[90], tokens=70)
    hybrid.run(until=lambda: len(task.out) >= 60)
    assert hybrid.kv.tree.tokens >= 160
    hybrid.run()
    assert checkpoints(hybrid, [*ids, *task.out]) == [90, 170]


# -- KV is held once -----------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [100, 500])
def test_what_is_fed_again_is_held_once(hybrid: Bench, rng: np.random.Generator, mark: int) -> None:
    """Between the checkpoint and where two prompts part; in the tree and in buffers."""
    tree, room = hybrid.kv.tree, hybrid.kv.ram
    per_token = hybrid.kv.layout.bytes_per_token
    ids = prompt(rng, 800)
    first = hybrid.ask(ids, marks=[mark], tokens=4)
    branch = [*ids[:700], *prompt(rng, 300)]
    task = hybrid.ask(branch, marks=[mark], tokens=4)
    assert admitted(task).cached_tokens == mark
    assert tree.tokens == 804 + 304
    for lineage in list(room.idle.values()):
        room.shrink(lineage, force=True)
    assert hybrid.kv.budget.by_kind()["kv"] == tree.tokens * per_token
    for again in ([*ids, *first.out, 5, 6], [*branch, *task.out, 7, 8]):
        task = hybrid.ask(again, tokens=3)
        assert admitted(task).cached_tokens == len(again) - 2
        assert task.out == hybrid.cold(again, 3)


# -- what goes first -----------------------------------------------------------------------------


def conversation(bench: Bench, rng: np.random.Generator, turns: int) -> list[int]:
    """One of `turns` of 50 tokens behind a head of 100."""
    ids = prompt(rng, 100)
    for turn in range(turns):
        marks = [100, 100 + 50 * turn] if turn else [100]
        ids = [*ids, *prompt(rng, 40)]
        ids += bench.ask(ids, marks=marks, tokens=10).out
    return ids


def test_a_path_is_thinned_before_it_is_cut(hybrid: Bench, rng: np.random.Generator) -> None:
    """The one used least recently; its end stays, and its head goes last."""
    layout = hybrid.kv.layout
    size = 2000 * layout.bytes_per_token + 60 * layout.checkpoint_bytes
    hybrid.use(KVCache.open(layout, Budget(size)))
    old = conversation(hybrid, rng, 12)
    before = checkpoints(hybrid, old)
    new = conversation(hybrid, rng, 12)
    room, kept = hybrid.kv.ram, checkpoints(hybrid, new)
    assert room.make_room(hybrid.kv.budget.free + layout.checkpoint_bytes)
    thinned = checkpoints(hybrid, old)
    assert len(thinned) < len(before)
    assert (thinned[0], thinned[-1]) == (100, len(old))
    assert checkpoints(hybrid, new) == kept
    seen = [thinned]
    while checkpoints(hybrid, old):
        assert room.make_room(hybrid.kv.budget.free + 1)
        seen.append(checkpoints(hybrid, old))
    assert seen[-2] == [100]
    assert checkpoints(hybrid, new) == kept
    hybrid.check()


def test_checkpoints_keep_to_their_share_of_the_budget(
    hybrid: Bench, rng: np.random.Generator
) -> None:
    """Whatever is asked, and a conversation still goes on from its end."""
    layout = hybrid.kv.layout
    limit = 40 * layout.checkpoint_bytes
    memory = KVCache.open(layout, Budget(limit))
    hybrid.use(memory)
    most = 0
    for _ in range(4):
        ids = prompt(rng, 40)
        for _ in range(6):
            task = hybrid.ask(ids, marks=[20, len(ids) - 3], tokens=6)
            most = max(most, memory.tree.checkpoint_bytes)
            ids = [*ids, *task.out, *prompt(rng, 20)]
            assert memory.reusable(token_ids(ids)) == len(ids) - 20
    assert limit * BUDGET_SHARE - layout.checkpoint_bytes < most <= limit * BUDGET_SHARE


def test_a_trail_tells_after_which_checkpoints_others_leave(
    hybrid: Bench, rng: np.random.Generator
) -> None:
    """Also where they share a few tokens more."""
    head = prompt(rng, 100)
    tasks = [
        hybrid.ask([*head, 3, 4, n + 20, *prompt(rng, 60)], marks=[100, 140], tokens=4)
        for n in range(2)
    ]
    ids = token_ids([*tasks[0].ids.tolist(), *tasks[0].out])
    trail = Trail.to(hybrid.kv.tree.match(ids).nodes[-1])
    assert [node.end for node in trail.nodes] == [100, 140, 167]
    assert trail.parted == {100}


def test_a_path_is_thinned_also_while_the_disk_is_slow(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that come faster than the disk writes leave no more than the rule allows, anywhere."""
    bench = Bench(make_toy(tmp_path / "model", "qwen3_5", heads=8, kv_heads=1, head_dim=64))
    disk = bench.open_disk(tmp_path / "store", ram=1 << 26, limit=1 << 26, pending=1 << 22)
    answers, answer = threading.Event(), disk.write_behind._look_up

    def late(path: PathWrite) -> None:
        assert answers.wait(60)
        answer(path)

    monkeypatch.setattr(disk.write_behind, "_look_up", late)
    ids = prompt(rng, 100)
    for _ in range(30):
        ids = [*ids, *prompt(rng, 30)]
        ids += bench.ask(ids, marks=[100, len(ids) - 4], tokens=8).out
        assert disk.write_behind.busy
        held = checkpoints(bench, ids)
        assert len(held) <= max(FEWEST, bench.kv.ram.max_checkpoints(len(ids)))
        assert (held[0], held[-1]) == (100, len(ids))
    answers.set()
    assert disk.write_behind.drain(60.0) == 0
    found = disk.store.find(token_ids(ids))
    assert found.length == len(ids)
    assert [one.position for one in found.checkpoints][-1] == len(ids)
    assert {one.position for one in found.checkpoints} <= set(held)
    disk.close(0.0)
