"""Who may start next: sessions in rotation, and a place for those who compute nothing yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxcache.scheduling.admission import MAX_ASKERS, FairQueue
from mlxcache.scheduling.prefill import Limits
from mlxcache.scheduling.task import Task
from mlxcache.types import Job, Prompt, RequestRecord, token_ids
from tests.scheduled import Bench


def task(session: str | None, name: str = "x", client: str | None = None) -> Task:
    prompt = Prompt(token_ids([1, 2, 3]))
    job = Job(name, prompt, session=session, client=client)
    return Task(job, lambda event: None, RequestRecord(name, session, "t", client, "queued", 0.0))


def drained(turns: FairQueue, waiting: list[Task]) -> list[str]:
    """The order in which all would start, one at a time."""
    started = []
    while waiting:
        first = turns.order(waiting)[0]
        waiting.remove(first)
        turns.note_start(first)
        started.append(first.job.id)
    return started


def test_a_session_with_many_requests_waits_its_turn_like_any_other() -> None:
    many = [task("many", f"m{i}") for i in range(5)]
    waiting = [*many, task("one", "o"), task(None, "n", client="curl"), task("two", "t")]
    assert drained(FairQueue(8), waiting) == ["m0", "o", "n", "t", "m1", "m2", "m3", "m4"]


def test_a_priority_orders_the_requests_of_its_owner_alone() -> None:
    def of(owner: str | None, name: str, priority: int) -> Task:
        made = task(name, name)
        made.job = replace(made.job, owner=owner, priority=priority)
        return made

    waiting = [of("b", "b0", 0), of("a", "a0", 0), of("a", "a9", 9), of("b", "b-1", -1)]
    found = [one.job.id for one in FairQueue(8).order(waiting)]
    assert found == ["b0", "a9", "a0", "b-1"]


def test_who_has_just_started_something_comes_last() -> None:
    turns = FairQueue(8)
    turns.note_start(task("busy"))
    assert [t.job.id for t in turns.order([task("busy", "b"), task("new", "n")])] == ["n", "b"]


def test_only_so_many_sessions_are_remembered() -> None:
    turns = FairQueue(8)
    for i in range(3 * MAX_ASKERS):
        turns.note_start(task(f"s{i}"))
    new = task("new", "n")
    for i, order in ((0, "sn"), (2 * MAX_ASKERS - 1, "sn"), (2 * MAX_ASKERS, "ns")):
        assert "".join(t.job.id for t in turns.order([task(f"s{i}", "s"), new])) == order


def test_one_place_more_for_who_computes_nothing() -> None:
    turns = FairQueue(2)
    greedy = [task("greedy"), task("greedy")]
    assert not turns.has_place(task("greedy"), greedy)
    assert turns.has_place(task("other"), greedy)
    assert not turns.has_place(task("third"), [*greedy, task("other")])
    assert not turns.has_place(task("third"), [task("one"), task("other")])
    assert not FairQueue(1).has_place(task("other"), [task("greedy")])


def test_one_more_session_starts_beside_a_crowd(toy_paths: dict[str, Path]) -> None:
    bench = Bench(toy_paths["llama"])
    bench.limits = Limits(2, 64, 65536, 1 << 30)
    bench.use(bench.kv)
    rng = np.random.default_rng(3)

    def put(session: str, **kwargs: Any) -> Task:
        made = bench.put(rng.integers(10, 400, 40).tolist(), **kwargs)
        object.__setattr__(made.job, "session", session)
        return made

    crowd = [put("crowd", tokens=60) for _ in range(5)]
    bench.run(until=lambda: len(crowd[1].out) > 2)
    guest = put("guest", tokens=4)
    bench.run(until=lambda: guest.over)
    assert [t.over for t in crowd] == [False] * 5
    assert [t.lease is None for t in crowd] == [False, False, True, True, True]
    bench.run()
    for each in [*crowd, guest]:
        assert each.out == bench.cold(each.ids.tolist(), len(each.out))
