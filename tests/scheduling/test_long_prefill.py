"""A long prompt holds up neither a reply that goes on nor a short prompt that comes meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.restore import DiskLookup
from mlxcache.scheduling.admission import FairQueue
from mlxcache.scheduling.task import Task
from mlxcache.types import Tokens
from tests.scheduled import Bench
from tests.scheduling.test_prefill import Clock

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
def bench(toy_paths: dict[str, Path]) -> Bench:
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


def test_a_reply_keeps_half_of_its_speed_beside_a_long_prompt(bench: Bench) -> None:
    reply = bench.put(ids(1, 30), tokens=10_000)
    bench.run(until=lambda: len(reply.out) > 20)
    long = bench.put(ids(2, LONG), tokens=2)
    bench.run(until=lambda: long.lease is not None and long.held.lineage.length > 500)
    began, before = bench.model.log[-1][0], len(reply.out)
    bench.run(until=lambda: long.held.lineage.length > 3500)
    seconds = bench.model.log[-1][0] - began
    assert (len(reply.out) - before) * DECODE_S / seconds >= 0.5


def test_a_short_prompt_is_answered_within_three_chunks(bench: Bench) -> None:
    """With and without a reply that goes on, and while the first chunk is under way."""
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
def test_short_prompts_without_end_do_not_starve_a_long_one(bench: Bench) -> None:
    """It is passed over, and each time gains on them."""
    long = bench.put(ids(8, LONG), tokens=2)
    for seed in range(9, 400):
        bench.put(ids(seed, SHORT), tokens=1)
        bench.tick()
        if long.out:
            break
    assert long.lease is not None
    assert long.held.lineage.length > 6 * CHUNK_TOKENS


def test_a_short_prompt_does_not_wait_for_the_disk_beside_a_long_one(bench: Bench) -> None:
    """A look takes a chunk of the long one, and computing the short one takes less."""
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
