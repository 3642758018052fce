"""Two models under one budget: it is kept, replies are cold's, and who finds no room waits."""

from __future__ import annotations

import gc
import itertools
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.ram import RamTier
from mlxcache.cache.shared_ram import SharedRam
from mlxcache.errors import ContextLengthExceeded
from mlxcache.residency.residency import Rounds
from mlxcache.store.store import Store
from mlxcache.tree.budget import Budget
from mlxcache.types import token_ids
from tests.scheduled import Bench, prompt
from tests.scheduling.history import STRAY, History
from tests.scheduling.test_faults import error


class Models:
    """Benches of several models on one thread, whose budgets share `tokens` of the first's KV.

    `weights`: bytes of an idle model, which `unload` releases. `kept`: tokens of KV that the first
    bench has less for the other, because its model is always kept.
    """

    def __init__(
        self,
        *benches: Bench,
        tokens: int,
        weights: int = 0,
        kept: int = 0,
        disk: Path | None = None,
    ):
        self.benches = benches
        self.limit = tokens * benches[0].kv.layout.bytes_per_token
        budget = Budget(self.limit)
        budget.charge("weights:idle", weights)
        self.weights, self.asked = weights, 0
        self.kept = kept * benches[0].kv.layout.bytes_per_token
        self.shared = SharedRam(budget, self.unload, self.ceiling)
        self.rounds = Rounds()
        for i, bench in enumerate(benches):
            bench.rounds, bench.thread = self.rounds, self.rounds.thread
            store = Store.open(disk / str(i), "test", 1 << 30, free_floor=0) if disk else None
            own = Budget(self.limit, budget)
            bench.use(
                KVCache.open(
                    bench.kv.layout,
                    own,
                    store,
                    pending_limit=1 << 20,
                    wake=self.rounds.thread.wake,
                    shared=self.shared,
                )
            )

    def unload(self, size: int) -> bool:
        if self.weights < size:
            return False
        self.asked += 1
        freed, self.weights = self.weights, 0
        self.shared.budget.release("weights:idle", freed)
        return freed > 0

    def ceiling(self, tier: RamTier) -> int:
        return self.limit - (self.kept if tier is not self.benches[0].kv.ram else 0)

    @property
    def working(self) -> bool:
        return any(bench.scheduler.has_work() for bench in self.benches)

    @property
    def idle(self) -> bool:
        return all(bench.scheduler.idle for bench in self.benches)

    def check(self) -> None:
        for bench in self.benches:
            bench.check()
        shared = self.shared.budget
        assert shared.used <= shared.limit
        members = sum(bench.kv.budget.used for bench in self.benches)
        assert shared.used == members + sum(shared.by_kind().values())

    def tick(self) -> None:
        assert self.working, "the thread would sleep for ever"
        self.rounds.tick()
        self.check()

    def run(self) -> None:
        """Tick until nothing is left to do."""
        for _ in range(10_000):
            if self.idle:
                return
            self.tick()
        raise AssertionError("the schedulers do not come to an end")


@pytest.fixture
def pair(toy_paths: dict[str, Path]) -> tuple[Bench, Bench]:
    return Bench(toy_paths["llama"]), Bench(toy_paths["llama"])


def held(bench: Bench, ids: list[int]) -> int:
    return bench.kv.match(token_ids(ids))


def test_what_another_model_misses_least_is_evicted(
    pair: tuple[Bench, Bench], rng: np.random.Generator
) -> None:
    """The old conversation of one model goes, not the newer ones of either."""
    one, other = pair
    models = Models(one, other, tokens=1200)
    old, newer, mine = (prompt(rng, 300) for _ in range(3))
    one.ask(old, tokens=2)
    other.ask(mine, tokens=2)
    one.ask(newer, tokens=2)
    fresh = prompt(rng, 300)
    task = other.ask(fresh, tokens=2)
    assert task.out == other.cold(fresh, 2)
    assert held(one, old) < 300
    assert held(one, newer) == held(other, mine) == held(other, fresh) == 300
    models.check()
    # what was used again stays, whichever model needs room
    one.ask([*newer, *prompt(rng, 30)], tokens=2)
    other.ask(prompt(rng, 500), tokens=2)
    assert held(one, newer) == 300
    assert held(other, mine) < 300


def test_uses_of_all_models_are_counted_together(
    pair: tuple[Bench, Bench], rng: np.random.Generator
) -> None:
    """The last use decides, however much one of the models was used before."""
    one, other = pair
    Models(one, other, tokens=900)
    for _ in range(6):
        one.ask(prompt(rng, 20), tokens=1)
    one.kv.clear()
    old, newer = prompt(rng, 300), prompt(rng, 300)
    one.ask(old, tokens=2)
    other.ask(newer, tokens=2)
    other.ask(prompt(rng, 300), tokens=2)
    assert held(other, newer) == 300
    assert held(one, old) < 300


def test_a_request_without_room_waits_for_the_other_model_without_spinning(
    pair: tuple[Bench, Bench], rng: np.random.Generator
) -> None:
    """KV of a running request is never evicted; the waiting one is tried when there is more."""
    one, other = pair
    models = Models(one, other, tokens=900)
    long, short = prompt(rng, 700), prompt(rng, 500)
    first = one.put(long, tokens=60)
    while not len(one.scheduler.lanes):
        models.tick()
    second = other.put(short, tokens=5)
    tried = 0
    while not first.over:
        tried += other.scheduler.has_work()
        models.tick()
        if not first.over:
            assert not other.scheduler.active
            assert held(one, long) >= 699
    assert tried <= 3
    models.run()
    assert first.out == one.cold(long, 60)
    assert second.out == other.cold(short, 5)


def test_no_request_of_the_other_model_starts_before_one_that_waits(
    pair: tuple[Bench, Bench], rng: np.random.Generator
) -> None:
    """Those that run end, then the waiting one has its turn, however many more arrive."""
    one, other = pair
    models = Models(one, other, tokens=1000)
    running = [one.put(prompt(rng, 300), tokens=40)]
    while not len(one.scheduler.lanes):
        models.tick()
    waiting = other.put(prompt(rng, 700), tokens=5)
    models.tick()
    models.tick()
    assert other.scheduler.waiting
    running += [one.put(prompt(rng, 300), tokens=40) for _ in range(4)]
    while not waiting.over:
        models.tick()
        assert sum(task.over for task in running) <= 1
    models.run()
    assert all(len(task.out) == 40 for task in running)


def test_what_can_never_fit_is_refused_while_the_other_model_runs(
    pair: tuple[Bench, Bench], rng: np.random.Generator
) -> None:
    one, other = pair
    models = Models(one, other, tokens=900)
    first = one.put(prompt(rng, 700), tokens=60)
    while not len(one.scheduler.lanes):
        models.tick()
    second = other.put(prompt(rng, 1000), tokens=5)
    models.tick()
    models.tick()
    assert not first.over
    assert isinstance(error(second), ContextLengthExceeded)
    # and one that would fit, once it runs alone, is not
    third = other.put(prompt(rng, 800), tokens=5)
    models.run()
    assert len(third.out) == 5


def test_what_can_never_fit_beside_a_model_that_is_always_kept_is_refused(
    pair: tuple[Bench, Bench], rng: np.random.Generator
) -> None:
    """Nothing that it could wait for will ever be free; what fits beside that model waits."""
    one, other = pair
    models = Models(one, other, tokens=900, kept=400)
    one.kv.budget.charge("transient", 400 * one.kv.layout.bytes_per_token)
    refused = other.put(prompt(rng, 600), tokens=3)
    models.tick()
    assert isinstance(error(refused), ContextLengthExceeded)
    running = one.put(prompt(rng, 300), tokens=20)
    while not len(one.scheduler.lanes):
        models.tick()
    fits = other.put(prompt(rng, 400), tokens=3)
    models.tick()
    models.tick()
    assert not fits.over
    models.run()
    assert len(running.out) == 20
    assert len(fits.out) == 3


def test_a_waiting_request_that_is_cancelled_holds_up_nobody(
    pair: tuple[Bench, Bench], rng: np.random.Generator
) -> None:
    one, other = pair
    models = Models(one, other, tokens=1000)
    one.put(prompt(rng, 300), tokens=200)
    while not len(one.scheduler.lanes):
        models.tick()
    waiting = other.put(prompt(rng, 700), tokens=5)
    models.tick()
    models.tick()
    assert other.scheduler.waiting
    second = one.put(prompt(rng, 60), tokens=2)
    models.tick()
    assert second in one.scheduler.waiting
    other.scheduler.cancel(waiting)
    models.tick()
    assert second not in one.scheduler.waiting
    models.run()


def test_idle_models_are_unloaded_only_if_idle_kv_does_not_suffice(
    pair: tuple[Bench, Bench], rng: np.random.Generator
) -> None:
    one, other = pair
    weights = 400 * one.kv.layout.bytes_per_token
    models = Models(one, other, tokens=1400, weights=weights)
    one.ask(prompt(rng, 500), tokens=2)
    other.ask(prompt(rng, 500), tokens=2)
    assert models.weights
    models.check()
    ids = prompt(rng, 1100)
    assert other.ask(ids, tokens=2).out == other.cold(ids, 2)
    assert not models.weights
    assert models.asked == 1


def test_a_request_waits_while_another_model_is_loaded(
    pair: tuple[Bench, Bench], rng: np.random.Generator
) -> None:
    """It is tried again when some of its memory is free, and otherwise not."""
    one, other = pair
    models = Models(one, other, tokens=900)
    one.kv.budget.charge("transient", 400 * one.kv.layout.bytes_per_token)
    task = other.put(prompt(rng, 600), tokens=3)
    models.tick()
    assert not models.working
    assert not task.over
    one.kv.budget.release("transient", 100 * one.kv.layout.bytes_per_token)
    assert models.working
    models.tick()
    assert not models.working
    one.kv.budget.release("transient", 300 * one.kv.layout.bytes_per_token)
    models.run()
    assert len(task.out) == 3


def test_a_path_on_its_way_to_disk_is_waited_for(
    pair: tuple[Bench, Bench], rng: np.random.Generator, tmp_path: Path
) -> None:
    """It leaves RAM once it is on disk, and comes back from there."""
    one, other = pair
    models = Models(one, other, tokens=900, disk=tmp_path)
    old = prompt(rng, 700)
    one.ask(old, tokens=2)
    task = other.put(prompt(rng, 700), tokens=3)
    ends = time.monotonic() + 20
    while not task.over and time.monotonic() < ends:
        models.rounds.tick()
        models.check()
    assert len(task.out) == 3
    assert held(one, old) < 700
    while other.kv.writing:
        models.rounds.tick()
    back = one.put([*old, *prompt(rng, 20)], tokens=3)
    while not back.over and time.monotonic() < ends:
        models.rounds.tick()
        models.check()
    assert back.record.cached_tokens == 700
    assert back.record.restored_tokens > 256
    for bench in pair:
        bench.kv.close(5.0)


class Pair:
    """Two random clients, each of its model, under one budget that is scarce for one alone."""

    def __init__(self, one: Path, other: Path, seed: int, tokens: int):
        self.rng = np.random.default_rng(seed)
        self.histories = [
            History(path, seed + i, ram_tokens=tokens, longest=150)
            for i, path in enumerate((one, other))
        ]
        budgets = [history.bench.kv.budget for history in self.histories]
        passing = [budget.by_kind()["transient"] for budget in budgets]
        layouts = [history.bench.kv.layout for history in self.histories]
        states = [2 * x.checkpoint_bytes + x.running_bytes for x in layouts]
        kv = [tokens * x.bytes_per_token for x in layouts]
        limit = sum(passing) + max(a + b for a, b in zip(kv, states, strict=True))
        self.shared = SharedRam(Budget(limit), lambda size: False)
        self.rounds = Rounds(clock=itertools.count().__next__)
        for history, size in zip(self.histories, passing, strict=True):
            bench = history.bench
            own = Budget(limit - sum(passing) + size, self.shared.budget)
            assert own.reserve("transient", size)
            copied = size // 2
            memory = KVCache.open(bench.kv.layout, own, copy_bytes=copied, shared=self.shared)
            bench.rounds, bench.thread = self.rounds, self.rounds.thread
            bench.use(memory, clock=itertools.count().__next__)
        gc.collect()
        mx.clear_cache()
        self.before = mx.get_active_memory()

    @property
    def idle(self) -> bool:
        return all(history.bench.scheduler.idle for history in self.histories)

    def tick(self) -> None:
        assert any(h.bench.scheduler.has_work() for h in self.histories), "nobody would work again"
        mx.reset_peak_memory()
        self.rounds.tick()
        most = mx.get_peak_memory() - self.before
        stray = sum(history.stray for history in self.histories)
        assert most <= self.shared.budget.limit + stray, f"{most} bytes were in use"
        self.check()

    def check(self) -> None:
        for history in self.histories:
            history.check()
        budget = self.shared.budget
        assert budget.used == sum(h.bench.kv.budget.used for h in self.histories) <= budget.limit

    def live(self, steps: int) -> None:
        """Let `steps` things happen, then run to idleness and check every reply."""
        for _ in range(steps):
            history = self.histories[self.rng.integers(2)]
            kind = self.rng.choice(["ask", "cancel", "tick"], p=[0.45, 0.06, 0.49])
            if kind != "tick":
                getattr(history, str(kind))()
                continue
            for _ in range(int(self.rng.choice([1, 3, 10]))):
                if not self.idle:
                    self.tick()
        while not self.idle:
            self.tick()
        for history in self.histories:
            assert not history.live
            for task in history.done:
                history.verify(task)
            assert not history.bench.kv.ram.busy
        gc.collect()
        mx.clear_cache()
        budget = self.shared.budget
        kept = sum(h.bench.kv.budget.by_kind()["transient"] for h in self.histories)
        stray = mx.get_active_memory() - self.before - (budget.used - kept)
        assert abs(stray) < sum(history.stray for history in self.histories) + STRAY
        for history in self.histories:
            history.bench.kv.close(1.0)
        assert budget.used == kept


def test_two_models_live_under_one_budget(toy_paths: dict[str, Path]) -> None:
    """Requests, cancels and turns of both in random order: the budget holds, replies are cold's."""
    Pair(toy_paths["llama"], toy_paths["qwen3_5"], seed=3, tokens=500).live(16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 40))
def test_two_models_live_longer_under_one_budget(toy_paths: dict[str, Path], seed: int) -> None:
    families = sorted(toy_paths)
    one, other = families[seed % 3], families[(seed // 3) % 3]
    Pair(toy_paths[one], toy_paths[other], seed, tokens=500).live(200)
