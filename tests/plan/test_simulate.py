"""Plans: the server's own cache decides what a trace reuses, and times follow from speeds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from mlxcache.errors import ConfigError
from mlxcache.model.adapters import Recurrent, Windowed
from mlxcache.plan.agents import agents_trace
from mlxcache.plan.cache import Memory, PlannedCache
from mlxcache.plan.chart import draw
from mlxcache.plan.plan import make_plan
from mlxcache.plan.simulate import Simulation, Speed, speed_of
from mlxcache.plan.trace import Ids, Request, Trace, path_of
from tests.proofs.policies import PLAIN

PER_TOKEN = 1024
LAYOUT = replace(PLAIN, bytes_per_token=PER_TOKEN)
LIMITLESS = Memory(1 << 60)


def request(ids: Ids, *names: tuple[str, int], reply: int = 0, **more: object) -> Request:
    parts = [(ids.of(name), tokens) for name, tokens in names]
    path = path_of([*parts, (ids.new(), reply)])
    return replace(Request(0.0, None, *path, len(parts)), **more)  # type: ignore[arg-type]


def trace_of(*requests: Request) -> Trace:
    timed = (replace(one, time=float(at)) for at, one in enumerate(requests))
    return Trace(tuple(timed), "mooncake", 64)


def hits(trace: Trace, memory: Memory) -> list[tuple[int, int]]:
    """Cached tokens of each request, and those of them from disk."""
    served = Simulation(LAYOUT, memory, Speed(), at_once=1).run(trace).served
    return [(one.reuse.cached, one.reuse.disk) for one in served]


def room(tokens: int) -> Memory:
    return Memory(tokens * PER_TOKEN, reserved={})


def test_a_prefix_is_reused_to_the_token_and_one_token_is_fed() -> None:
    """As a server does: the last token's logits are needed."""
    ids = Ids()
    one = request(ids, ("head", 300), ("a", 100))
    trace = trace_of(one, one, request(ids, ("head", 300), ("b", 50)))
    assert hits(trace, LIMITLESS) == [(0, 0), (399, 0), (300, 0)]


def test_what_does_not_fit_is_evicted_and_read_from_disk() -> None:
    ids = Ids()
    prompts = [request(ids, (name, 2000)) for name in "abcdef"]
    trace = trace_of(*prompts, prompts[0])
    assert hits(trace, room(6000))[-1] == (0, 0)
    disk = replace(room(6000), disk=100 << 20, reserved={"pending": 1 << 20})
    assert hits(trace, disk)[-1] == (1999, 1999)


def test_a_small_disk_evicts_too() -> None:
    ids = Ids()
    prompts = [request(ids, (str(number), 2000)) for number in range(12)]
    trace = trace_of(*prompts, prompts[0], prompts[11])
    small = Memory(5 << 20, 16 << 20, reserved={"pending": 1 << 20})
    first, last = hits(trace, small)[-2:]
    assert first == (0, 0)
    assert last[0] == 1999


def test_a_remote_has_what_the_machine_has_not() -> None:
    ids = Ids()
    prompts = [request(ids, (name, 2000)) for name in "abcdef"]
    trace = trace_of(*prompts, prompts[0])
    memory = replace(room(5000), remote=True)
    served = Simulation(LAYOUT, memory, Speed(), at_once=1).run(trace).served
    assert (served[-1].reuse.disk, served[-1].reuse.remote) == (0, 1999)


def test_a_model_with_states_continues_from_checkpoints() -> None:
    layout = replace(
        LAYOUT,
        checkpoint_bytes=4096,
        running_bytes=4096,
        checkpointed=(Recurrent("ArraysCache"),),
    )
    ids = Ids()
    first = request(ids, ("head", 500), ("a", 300), reply=20, key=800, head=500)
    other = request(ids, ("head", 500), ("b", 100), key=600, head=500)
    cache = PlannedCache(layout, LIMITLESS, lambda: 0.0)
    reused = []
    for one in (first, other):
        running = cache.start(one)
        assert running is not None
        reused.append(running.reuse.cached)
        cache.end(running)
    assert reused == [0, 500]


def test_rows_of_windows_are_kept_where_memory_is_to_spare() -> None:
    """A model with windows goes on from any token then, as with full attention."""
    window = Windowed("RotatingKVCache")
    layout = replace(
        LAYOUT, checkpoint_bytes=128_000, window_bytes=2000, checkpointed=(window,), opaque_at=(1,)
    )
    ids = Ids()
    first = request(ids, ("head", 500), ("a", 150), ("b", 150), reply=20, key=800, head=500)
    edited = request(ids, ("head", 500), ("a", 150), ("c", 100), key=750, head=500)
    for ram, reused in ((LIMITLESS, 650), (room(2800), 500)):
        served = Simulation(layout, ram, Speed(), at_once=1).run(trace_of(first, edited)).served
        assert [one.reuse.cached for one in served] == [0, reused]


def test_first_tokens_wait_for_the_thread() -> None:
    ids = Ids()
    trace = trace_of(request(ids, ("a", 1000), reply=10), request(ids, ("b", 1000), reply=10))
    trace = replace(trace, requests=tuple(replace(one, time=0.0) for one in trace.requests))
    outcome = Simulation(LAYOUT, LIMITLESS, Speed(prefill=100, decode=10)).run(trace)
    first, second = (one.first_token_s for one in outcome.served)
    assert first == pytest.approx(10.1)
    assert second > 20
    assert outcome.busy == pytest.approx(22 / outcome.span_s)


def test_a_restore_takes_the_time_of_the_disk() -> None:
    ids = Ids()
    prompts = [request(ids, (name, 2000), reply=1) for name in "abcdef"]
    trace = trace_of(*prompts, prompts[0])
    disk = replace(room(6000), disk=100 << 20, reserved={"pending": 1 << 20})
    speed = Speed(prefill=1e9, decode=1e9, disk=1999 * PER_TOKEN / 7)
    outcome = Simulation(LAYOUT, disk, speed, at_once=1).run(trace)
    assert outcome.served[-1].first_token_s == pytest.approx(7, abs=0.01)


def test_without_speeds_recorded_requests_take_as_long_as_they_did() -> None:
    """So that those of several sessions stay in their order."""
    ids = Ids()
    first = request(ids, ("a", 100), reply=1, session="a", took=10.0)
    later = replace(request(ids, ("a", 100), ("b", 9)), session="a", after=(0,), delay=2.0)
    other = replace(request(ids, ("c", 100)), session="c", time=11.0)
    trace = Trace((first, other, later), "mlxcache", 64)
    outcome = Simulation(LAYOUT, LIMITLESS, Speed(), at_once=1).run(trace)
    assert list(outcome.order) == [0, 1, 2]


def test_users_of_a_trace_take_turns() -> None:
    trace = agents_trace(2, 4000, sessions=2, seed=3)
    outcome = Simulation(LAYOUT, LIMITLESS, Speed(prefill=1000, decode=100)).run(trace, users=2)
    assert len(outcome.served) == len(trace.requests)
    by_session: dict[str | None, list[float]] = {}
    for position, served in zip(outcome.order, outcome.served, strict=True):
        by_session.setdefault(trace.requests[position].session, []).append(served.at)
    assert all(times == sorted(times) for times in by_session.values())


def test_a_plan_finds_the_ram_and_disk_that_are_enough() -> None:
    """More of either never brings less by more than noise, and what it names suffices."""
    trace = agents_trace(4, 8000, sessions=1).first(160)
    machine = replace(room(10_000), disk=64 << 20)
    plan = make_plan(trace, LAYOUT, machine, Speed(prefill=500, decode=50), users=4)
    for sizes in (plan.ram, plan.disk):
        rates = [one.hit_rate for one in sizes.curve]
        assert all(more > less - 0.02 for less, more in pairwise(rates))
        enough = [one or 0 for one in sizes.enough]
        assert 0 < enough[0] <= enough[1] <= enough[2]
    machine = Memory(plan.ram.enough[1] or 0, reserved={})
    found = Simulation(LAYOUT, machine, plan.speed).run(trace, 4).hit_rate
    assert plan.ram.curve[0].hit_rate < 0.95 * plan.ceiling
    assert found == pytest.approx(0.95 * plan.ceiling, abs=0.02)
    assert "95% of the ceiling" in draw(plan)


def test_a_plan_in_several_processes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = agents_trace(2, 4000, sessions=1).first(40)
    machine = replace(room(6000), disk=1 << 20)
    seen: list[tuple[int, int]] = []
    plans = []
    for work in (1 << 40, 1):
        monkeypatch.setattr("mlxcache.plan.runs.WORK", work)
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        made = make_plan(trace, LAYOUT, machine, Speed(), progress=lambda *now: seen.append(now))
        plans.append(made.as_object())
    assert plans[0] == plans[1]
    assert seen[-1][0] <= seen[-1][1]


def test_a_user_waits_for_new_text_for_evicted_text_and_for_replies() -> None:
    """Each prompt token that is fed counts once, in the kind of what made it be fed."""
    ids = Ids()
    first = request(ids, ("a", 1000), reply=10)
    other = request(ids, ("b", 1000), reply=10)
    again = request(ids, ("a", 1000), ("c", 500), reply=10)
    plan = make_plan(trace_of(first, other, again), LAYOUT, room(2000), Speed(100, 10))
    waits = plan.waits()
    assert waits is not None
    assert [waits.first, waits.new] == pytest.approx([20 / 3, 5 / 3], rel=0.01)
    fed = sum(one.reuse.fed for one in plan.outcome.served)
    assert 0 < waits.again == pytest.approx(fed / 300 - waits.first - waits.new)
    assert waits.replies == pytest.approx(1.0)
    assert waits.uncached == pytest.approx(35 / 3 + 1.0)


def test_what_cannot_be_planned_is_refused() -> None:
    trace = trace_of(request(Ids(), ("a", 50_000)))
    with pytest.raises(ConfigError, match="50,000 tokens"):
        make_plan(trace, LAYOUT, room(1000), Speed())
    with pytest.raises(ConfigError, match="no requests"):
        make_plan(trace.first(0), LAYOUT, LIMITLESS, Speed())
    unknown = replace(LAYOUT, unknown=("StrangeCache",))
    with pytest.raises(ConfigError, match="StrangeCache"):
        make_plan(trace, unknown, LIMITLESS, Speed())


def test_speeds_come_from_records_of_requests() -> None:
    records = []
    for prompt, fed in ((1000, 1000), (9000, 1000), (20_000, 4000), (5000, 5000)):
        seconds = fed / 500 * (1 + 1e-4 * (prompt - fed / 2))
        records.append({
            "status": "done", "prompt_tokens": prompt, "fed_tokens": fed,
            "restored_tokens": 2000, "generated_tokens": 101,
            "timing": {"prefill_s": seconds, "decode_s": 2.0, "restore_s": 0.5},
        })  # fmt: skip
    speed = speed_of(records, 1000)
    assert speed.prefill == pytest.approx(500)
    assert speed.growth == pytest.approx(1e-4)
    assert (speed.decode, speed.disk) == (50.0, 4e6)
    assert speed_of([], 1000) == Speed()
