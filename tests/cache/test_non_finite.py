"""A model that computes NaN: an error for its request, and nothing of it is ever reused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.cache.disk import DiskTier
from mlxcache.model.lineage import finite_upto, is_finite
from mlxcache.scheduling.task import Task
from mlxcache.types import token_ids
from tests.scheduled import Bench, admitted, finished, prompt
from tests.scheduling.faults import FaultyModel, faulty
from tests.scheduling.test_faults import at_rest, error

ROOM = 1 << 20


def decoding(tokens: mx.array) -> bool:
    return tokens.shape[1] == 1


def is_nan(task: object) -> bool:
    return "produced NaN" in str(error(task))  # type: ignore[arg-type]


def all_kept_is_finite(bench: Bench) -> bool:
    """Whether the tree refers to numbers alone."""
    tree = bench.kv.tree
    spans = [(v, tree.live_range(v)) for v in tree.values() if not v.lost]
    return all(finite_upto(v) >= end for v, (_, end) in spans)  # type: ignore[misc]


@pytest.fixture(params=("gemma3", "qwen3_5"))
def bench(request: pytest.FixtureRequest, toy_paths: dict[str, Path]) -> Bench:
    """Sliding windows and states, each beside full attention."""
    return Bench(toy_paths[request.param])


@pytest.fixture
def model(bench: Bench) -> FaultyModel:
    return faulty(bench)


def test_a_prefill_that_computes_nan_keeps_what_came_before_it(
    bench: Bench, model: FaultyModel, rng: np.random.Generator
) -> None:
    ids = prompt(rng, 300)
    first = bench.ask(ids[:150], tokens=3, marks=[100])
    model.poison = lambda tokens: [0] if tokens.shape[1] > 1 else []
    task = bench.put(ids, marks=[100])
    bench.run()
    assert is_nan(task)
    model.poison = lambda tokens: []
    assert all_kept_is_finite(bench)
    again = bench.ask(ids, marks=[100])
    assert 100 <= admitted(again).cached_tokens <= len(first.ids) + len(first.out)
    assert again.out == bench.cold(ids)
    at_rest(bench)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_reply_of_nan_fails_alone_and_leaves_nothing(
    bench: Bench, model: FaultyModel, rng: np.random.Generator, rows: int
) -> None:
    """Not the tokens that it was said to be, not its prompt, not the KV; others go on."""
    prompts = [prompt(rng, 100 + i) for i in range(rows)]
    tasks = [bench.put(ids, tokens=40, marks=[90]) for ids in prompts]
    bad = tasks[0]

    def poison(tokens: mx.array) -> list[int]:
        if not decoding(tokens) or bad.over or len(bad.out) < 12 or tokens.shape[0] != rows:
            return []
        lane = bench.scheduler.lanes.find(bad)
        return [lane.tasks.index(bad)] if lane is not None else []

    model.poison = poison
    bench.run()
    assert is_nan(bad)
    model.poison = lambda tokens: []
    for ids, task in zip(prompts[1:], tasks[1:], strict=True):
        assert finished(task).reason == "length"
        assert task.out == bench.cold(ids, 40)
    assert all_kept_is_finite(bench)
    again = bench.ask(prompts[0] + bad.out)
    assert admitted(again).cached_tokens <= 2  # of what the others' prompts share by chance
    assert again.out == bench.cold(prompts[0] + bad.out)
    at_rest(bench)


def test_nan_behind_the_last_token_is_not_kept(
    bench: Bench, model: FaultyModel, rng: np.random.Generator
) -> None:
    """The pass that feeds a reply's last token is never asked for a token of its own."""
    ids = prompt(rng, 100)
    task = bench.put(ids, tokens=10, marks=[90])
    model.poison = lambda tokens: [0] if decoding(tokens) and len(task.out) >= 9 else []
    bench.run()
    model.poison = lambda tokens: []
    assert finished(task).reason == "length"
    assert all_kept_is_finite(bench)
    longer = ids + task.out + prompt(rng, 5)
    assert bench.ask(longer).out == bench.cold(longer)
    at_rest(bench)


def test_nan_that_an_earlier_request_left_goes_too(
    bench: Bench, model: FaultyModel, rng: np.random.Generator
) -> None:
    ids = prompt(rng, 200)
    bench.ask(ids, tokens=3, marks=[100, 150])
    for lineage in bench.kv.ram.idle.values():
        for slot in lineage.linear:
            slot.values[..., 120, :] = float("nan")
    for node in bench.kv.tree.match(token_ids(ids)).nodes:
        if node.checkpoint is not None and node.end > 120:
            state = spoilt(node.checkpoint)
            bench.kv.tree.set_checkpoint(node, state, node.checkpoint_bytes)
    longer = ids + prompt(rng, 20)
    task = bench.put(longer, marks=[100, 150])
    bench.run()
    assert is_nan(task)
    again = bench.ask(longer, marks=[100, 150])
    assert admitted(again).cached_tokens <= 120
    assert again.out == bench.cold(longer)
    at_rest(bench)


def spoilt(value: object) -> object:
    """A state with NaN in its floating arrays."""
    if isinstance(value, mx.array):
        return value * float("nan") if mx.issubdtype(value.dtype, mx.floating) else value
    if isinstance(value, list | tuple):
        return tuple(map(spoilt, value))
    return value


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Bench], DiskTier]]:
    disks: list[DiskTier] = []

    def begin(bench: Bench) -> DiskTier:
        disks.append(bench.open_disk(tmp_path / "store", pending=ROOM))
        return disks[-1]

    yield begin
    for disk in disks:
        disk.close(0.0)


def fails_in_its_reply(
    bench: Bench, model: FaultyModel, disk: DiskTier, ids: list[int], *, mark: int
) -> Task:
    """A request whose reply begins well and then is NaN; the disk has done what followed."""
    task = bench.put(ids, tokens=200, marks=[mark])
    bench.run(until=lambda: len(task.out) > 5)
    model.poison = lambda tokens: [0] if decoding(tokens) else []
    bench.run()
    assert is_nan(task)
    model.poison = lambda tokens: []
    done = threading.Event()
    disk.write_behind.writer.call(done.set)
    assert done.wait(30.0)
    disk.write_behind.collect()
    assert not disk.write_behind.busy
    return task


def test_nan_does_not_stay_on_disk(
    bench: Bench,
    model: FaultyModel,
    rng: np.random.Generator,
    start: Callable[[Bench], DiskTier],
) -> None:
    """A long prompt is written while its reply goes on; it goes with its reply."""
    disk = start(bench)
    head, ids = prompt(rng, 200), prompt(rng, 1300)
    bench.ask(head, tokens=3, marks=[190])
    assert disk.write_behind.drain(30.0) == 0
    whole = head + ids
    task = fails_in_its_reply(bench, model, disk, whole, mark=190)
    found = disk.store.find(token_ids(whole))
    assert found.length <= len(head) + 3
    disk = start(bench)
    again = bench.ask(whole + task.out)
    assert again.out == bench.cold(whole + task.out)


@pytest.mark.parametrize("shared", [103, 150, 190])
def test_what_others_share_stays_in_both_tiers(
    bench: Bench,
    model: FaultyModel,
    rng: np.random.Generator,
    start: Callable[[Bench], DiskTier],
    shared: int,
) -> None:
    """Behind the last checkpoint a request feeds again what another one has kept."""
    disk = start(bench)
    other = prompt(rng, 200)
    asked = bench.ask(other, tokens=3, marks=[100])
    assert disk.write_behind.drain(30.0) == 0
    ids = other[:shared] + prompt(rng, 80)
    ids[shared] = other[shared] % 300 + 11
    fails_in_its_reply(bench, model, disk, ids, mark=100)
    assert all_kept_is_finite(bench)
    longer = other + asked.out + prompt(rng, 5)
    wanted = admitted(asked).cached_tokens + len(other)
    found = disk.store.find(token_ids(longer))
    assert found.length >= wanted
    again = bench.ask(longer)
    assert admitted(again).cached_tokens >= wanted
    assert again.out == bench.cold(longer)
    assert admitted(bench.ask([*ids, 7])).cached_tokens <= shared


def test_looking_for_numbers_finds_the_first_that_is_none() -> None:
    assert is_finite([mx.zeros((2, 0)), mx.ones(3), mx.array([1, 2], mx.uint32)])
    assert not is_finite([mx.array([1.0, float("inf")])])
