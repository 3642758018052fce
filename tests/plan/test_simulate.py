"""Plans: the server's own cache decides what a trace reuses, and times follow from speeds."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mlxcache.errors import ConfigError
from mlxcache.model.adapters import Recurrent
from mlxcache.model.kv import Layout
from mlxcache.plan.agents import agents_trace
from mlxcache.plan.cache import Memory, PlannedCache
from mlxcache.plan.plan import draw, make_plan
from mlxcache.plan.simulate import Simulation, Speed, speed_of
from mlxcache.plan.trace import Ids, Request, Trace, path_of

PER_TOKEN = 1024
LAYOUT = Layout(
    make=list,
    vocab_size=100,
    bytes_per_token=PER_TOKEN,
    checkpoint_bytes=0,
    running_bytes=0,
    window_bytes=0,
    linear=(0,),
    specs=(((4, 64, mx.float16), (4, 64, mx.float16)),),
    opaque_at=(),
    checkpointed=(),
    batchable=True,
    states=(),
    unknown=(),
)
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
    assert list(outcome.order) == [first, other, later]


def test_users_of_a_trace_take_turns() -> None:
    trace = agents_trace(2, 4000, sessions=2, seed=3)
    outcome = Simulation(LAYOUT, LIMITLESS, Speed(prefill=1000, decode=100)).run(trace, users=2)
    assert len(outcome.served) == len(trace.requests)
    by_session: dict[str | None, list[float]] = {}
    for one, served in zip(outcome.order, outcome.served, strict=True):
        by_session.setdefault(one.session, []).append(served.at)
    assert all(times == sorted(times) for times in by_session.values())


def test_a_plan_finds_the_capacity_near_the_ceiling() -> None:
    trace = agents_trace(4, 8000, sessions=2)
    plan = make_plan(trace, LAYOUT, room(10_000), Speed(prefill=500, decode=50), users=4)
    rates = [one.hit_rate for one in plan.curve]
    assert (
        rates[0]
        < 0.95 * plan.ceiling
        <= next(one.hit_rate for one in plan.curve if one.nbytes == plan.enough)
    )
    assert plan.outcome.hit_rate <= plan.ceiling == max(rates)
    found = plan.as_object()
    tokens = found["tokens"]
    assert tokens["cached"] + tokens["fed"] == tokens["prompt"]
    assert found["mlx_thread"]["users_per_machine"] > 0
    picture = draw(plan)
    assert picture.startswith("<svg")
    assert picture.count("<circle") == len(plan.curve)


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
