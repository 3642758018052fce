"""Prefill and decoding share the thread: equal time, but a short burst goes first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.restore import DiskLookup
from mlxcache.scheduling.admission import FairQueue
from mlxcache.scheduling.prefill import BURST_S, PrefillDecodeBalance
from mlxcache.scheduling.task import Task
from mlxcache.types import Tokens
from tests.scheduled import Bench


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("chunk_s", "left_s", "rounds"), [(0.5, 60.0, (10, 12)), (0.5, 0.3, (0, 0))]
)
def test_decoding_gets_as_much_time_as_a_long_prefill_and_a_burst_goes_first(
    chunk_s: float, left_s: float, rounds: tuple[int, int]
) -> None:
    clock, done = Clock(), list[int]()
    pace = PrefillDecodeBalance(clock)
    pace.prefill(lambda: clock.wait(chunk_s))
    if (due := pace.due(left_s)) > 0:

        def one() -> None:
            done.append(1)
            clock.wait(0.05)

        pace.decode(one, due, lambda: True)
    assert rounds[0] <= len(done) <= rounds[1]


def test_no_burst_holds_decoding_up_for_longer_than_its_bound() -> None:
    clock = Clock()
    pace = PrefillDecodeBalance(clock)
    held_up = 0.0
    while pace.due(0.1) <= 0:
        pace.prefill(lambda: clock.wait(0.2))
        held_up += 0.2
    assert held_up <= BURST_S + 0.2 + 1e-9


def test_what_is_owed_to_replies() -> None:
    """Nothing where nobody decodes or nothing prefills; a reply that begins decodes first."""
    clock = Clock()
    idle, alone, begun = (PrefillDecodeBalance(clock) for _ in range(3))
    idle.prefill(lambda: clock.wait(0.9))
    assert idle.due(0.0) <= 0
    assert idle.owed == 0
    alone.prefill(lambda: clock.wait(30.0), owing=False)
    assert alone.due(60.0) <= 0
    begun.prefill(begun.note_reply, owing=False)
    assert begun.due(60.0) > 0.4
    assert begun.due(0.5) <= 0  # a short burst still goes first


def test_what_arrives_meanwhile_costs_a_reply_none_of_its_time(
    toy_paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding stops to look at each arrival; what it was owed then comes before the next chunk."""
    bench, now = Bench(toy_paths["llama"], chunk=64), Clock()
    bench.use(bench.kv, now)
    scheduler = bench.scheduler
    rng = np.random.default_rng(4)
    reply = bench.put(rng.integers(10, 400, 20).tolist(), tokens=400)
    while not reply.out:
        bench.tick()
    chunks, rounds = [], []
    feed, decode = scheduler._prefill_one, scheduler._decode_round
    scheduler._prefill_one = lambda **k: (now.wait(0.4), chunks.append(1), feed(**k))  # type: ignore[method-assign, assignment, func-returns-value]

    def interrupted(lanes: list[Any]) -> None:
        now.wait(0.05)
        rounds.append(1)
        decode(lanes)
        scheduler.thread.post(lambda: None)

    scheduler._decode_round = interrupted  # type: ignore[method-assign]
    monkeypatch.setattr("mlxcache.scheduling.prefill.BURST_S", 0.0)
    bench.put(rng.integers(10, 400, 1500).tolist(), tokens=1)
    while len(chunks) < 12:
        bench.tick()
    assert len(rounds) * 0.05 >= 0.9 * len(chunks) * 0.4


def test_requests_that_come_at_once_decode_as_one_batch(toy_paths: dict[str, Path]) -> None:
    bench = Bench(toy_paths["llama"])
    rng = np.random.default_rng(2)
    tasks = [bench.put(rng.integers(10, 400, 100 + i).tolist(), tokens=24) for i in range(6)]
    most = 0
    while not bench.scheduler.idle:
        bench.tick()
        most = max([most, *(len(lane.tasks) for lane in bench.scheduler.lanes.all)])
    assert most == 6
    for task in tasks:
        assert task.out == bench.cold(task.ids.tolist(), 24)


# -- a long prompt holds up neither a reply nor a short prompt that comes meanwhile ---------------

CHUNK_TOKENS, LONG, SHORT = 64, 4000, 40
PREFILL_S, DECODE_S = 0.004, 0.05
"""What a token of a prompt and a step of a reply take on the test's clock."""


class Timed:
    """A model whose every pass takes so long by the clock; `log` has each pass's tokens."""

    def __init__(self, model: Callable[..., object], clock: Clock):
        self._model, self._clock = model, clock
        self.log: list[tuple[float, int]] = []

    def __call__(self, tokens, **kwargs):
        count = tokens.shape[1]
        self._clock.wait(DECODE_S if count == 1 else count * PREFILL_S)
        self.log.append((self._clock.now, count))
        return self._model(tokens, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


@pytest.fixture
def timed(toy_paths: dict[str, Path]) -> Bench:
    bench = Bench(toy_paths["llama"], chunk=CHUNK_TOKENS)
    clock = Clock()
    bench.model = Timed(bench.model, clock)
    bench.use(KVCache.open(bench.kv.layout, bench.kv.budget), clock, queue=FairQueue(8))
    return bench


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 400, count).tolist()


def chunks(bench: Bench, since: int = 0) -> int:
    """Chunks that were fed, of whatever prompt, from entry `since` of the log on."""
    return sum(count > 1 for _, count in bench.model.log[since:])


def begun(task: Task) -> bool:
    """Whether a prefill that is not at its end runs."""
    return task.lease is not None and task.remaining < 3000


def answered(task: Task) -> Callable[[], bool]:
    return lambda: len(task.out) > 0


def test_a_reply_keeps_half_of_its_speed_beside_a_long_prompt(timed: Bench) -> None:
    bench = timed
    reply = bench.put(ids(1, 30), tokens=10_000)
    bench.run(until=lambda: len(reply.out) > 20)
    long = bench.put(ids(2, LONG), tokens=2)
    bench.run(until=lambda: long.lease is not None and long.held.lineage.length > 500)
    began, before = bench.model.log[-1][0], len(reply.out)
    bench.run(until=lambda: long.held.lineage.length > 3500)
    seconds = bench.model.log[-1][0] - began
    assert (len(reply.out) - before) * DECODE_S / seconds >= 0.5


def test_a_short_prompt_is_answered_within_three_chunks(timed: Bench) -> None:
    """With and without a reply that goes on, and while the first chunk is under way."""
    bench = timed
    for with_reply in (False, True):
        reply = bench.put(ids(3, 30), tokens=10_000) if with_reply else None
        if reply is not None:
            bench.run(until=answered(reply))
        long = bench.put(ids(4 + with_reply, LONG), tokens=2)
        bench.run(until=partial(begun, long))
        since = len(bench.model.log)
        short = bench.put(ids(6 + with_reply, SHORT), tokens=3)
        bench.run(until=answered(short))
        assert chunks(bench, since) <= 3
        assert long.remaining > 2000
        bench.scheduler.cancel(long)
        if reply is not None:
            bench.scheduler.cancel(reply)


@pytest.mark.slow
def test_short_prompts_without_end_do_not_starve_a_long_one(timed: Bench) -> None:
    """It is passed over, and each time gains on them."""
    bench = timed
    long = bench.put(ids(8, LONG), tokens=2)
    for seed in range(9, 400):
        bench.put(ids(seed, SHORT), tokens=1)
        bench.tick()
        if long.out:
            break
    assert long.lease is not None
    assert long.held.lineage.length > 6 * CHUNK_TOKENS


def test_a_short_prompt_does_not_wait_for_the_disk_beside_a_long_one(timed: Bench) -> None:
    """A look takes a chunk of the long one, and computing the short one takes less."""
    bench = timed
    looked: list[int] = []

    def look_up(ids: Tokens, known: int) -> DiskLookup:
        looked.append(len(ids))
        return DiskLookup(ids, known)

    admission = bench.scheduler.admission
    long, short = bench.put(ids(20, LONG)), bench.put(ids(21, 200))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.kv, "look_up", look_up)
        assert admission.should_wait(short, [])
        assert looked == [200]
    short.await_lookup(None)
    bench.run(until=lambda: long in bench.scheduler.prefilling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.kv, "look_up", look_up)
        other = bench.put(ids(22, 200))
        assert not admission.should_wait(other, [long])
        assert admission.should_wait(bench.put(ids(23, 900)), [long])
    assert looked == [200, 900]
