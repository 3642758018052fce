"""A request that waits for the disk holds up no reply that goes on beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mlxcache.cache.kv_cache import KVCache
from mlxcache.scheduling.task import Task
from tests.scheduled import Bench
from tests.scheduling.test_prefill import Clock, Timed, answered, ids

TICKS = 20


def is_prefilling(bench: Bench, task: Task) -> bool:
    return task in bench.scheduler.prefilling


def test_a_reply_goes_on_while_another_request_waits_for_the_disk(
    toy_paths: dict[str, Path],
) -> None:
    """The clock moves with the model's passes alone: to wait for it would be to wait for ever."""
    bench = Bench(toy_paths["llama"], chunk=64)
    clock = Clock()
    bench.model = Timed(bench.model, clock)
    bench.use(KVCache.open(bench.kv.layout, bench.kv.budget), clock)
    for prompt in (300, 30_000):  # a burst, and more than one
        reply = bench.put(ids(1, 30), tokens=10_000)
        bench.run(until=answered(reply))
        waits = bench.put(ids(2, prompt), tokens=2)
        bench.run(until=partial(is_prefilling, bench, waits))
        waits.held.awaiting_state = True
        before = len(reply.out)
        for _ in range(TICKS):
            bench.tick()
        assert len(reply.out) - before >= TICKS
        waits.held.awaiting_state = False
        for task in (waits, reply):
            bench.scheduler.cancel(task)
