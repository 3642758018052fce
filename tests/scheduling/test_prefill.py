"""Prefill and decoding share the thread: equal time, but a short burst goes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.scheduling.prefill import BURST_S, PrefillDecodeBalance
from tests.scheduled import Bench


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def rounds_after(chunk_s: float, left_s: float) -> int:
    clock = Clock()
    pace = PrefillDecodeBalance(clock)
    pace.prefill(lambda: clock.wait(chunk_s))
    due = pace.due(left_s)
    if due <= 0:
        return 0
    done = []

    def one() -> None:
        done.append(1)
        clock.wait(0.05)

    pace.decode(one, due, lambda: True)
    return len(done)


def test_decoding_gets_at_least_as_much_time_as_a_long_prefill() -> None:
    assert 10 <= rounds_after(0.5, left_s=60.0) <= 12


def test_a_short_burst_of_prefill_goes_first() -> None:
    assert rounds_after(0.5, left_s=0.3) == 0


def test_no_burst_holds_decoding_up_for_longer_than_its_bound() -> None:
    clock = Clock()
    pace = PrefillDecodeBalance(clock)
    held_up = 0.0
    while pace.due(0.1) <= 0:
        pace.prefill(lambda: clock.wait(0.2))
        held_up += 0.2
    assert held_up <= BURST_S + 0.2 + 1e-9


def test_a_debt_is_forgotten_once_nothing_prefills() -> None:
    clock = Clock()
    pace = PrefillDecodeBalance(clock)
    pace.prefill(lambda: clock.wait(0.9))
    assert pace.due(0.0) <= 0
    assert pace.owed == 0


def test_prefill_beside_which_nobody_decodes_leaves_no_debt() -> None:
    clock = Clock()
    pace = PrefillDecodeBalance(clock)
    pace.prefill(lambda: clock.wait(30.0), owing=False)
    assert pace.due(60.0) <= 0


def test_a_reply_that_begins_beside_a_long_prompt_decodes_first() -> None:
    clock = Clock()
    pace = PrefillDecodeBalance(clock)
    pace.prefill(lambda: pace.note_reply(0.4), owing=False)
    assert pace.due(60.0) > 0.4
    assert pace.due(0.5) <= 0  # a short burst still goes first


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
