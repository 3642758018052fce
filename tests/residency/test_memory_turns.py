"""Prompts that need memory which other models hold: each gets its turn, and switching is bounded.

Toy models under one real budget, with a clock of the test's own.
"""

from __future__ import annotations

import itertools

import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.shared_ram import SharedRam
from mlxcache.errors import ContextLengthExceeded
from mlxcache.residency.residency import Rounds
from mlxcache.scheduling.task import Task
from mlxcache.tree.budget import Budget
from mlxcache.types import Finished
from tests.conftest import ToyMaker
from tests.residency.test_residency import House, ids, last_of, states
from tests.scheduled import Bench

SMALL, ROOM, LARGE, WHOLE = 60, 400, 700, 1100
"""Tokens of a prompt that fits beside all models; the memory besides their weights, which are about
500 tokens each; a prompt that fits if one other model is unloaded, and one that fits if two are.
"""


class Shared(House):
    """Toy models `a`, `b`, ... under one budget for all their weights and `ROOM` tokens of KV.

    `kept`: names of models that are never unloaded. A round takes `tick_s` seconds.
    """

    concurrency = 2
    tick_s = 0.05

    def __init__(self, toy: ToyMaker, names: str, kept: str = ""):
        super().__init__()
        self.rounds = Rounds(self.residency, itertools.count().__next__)  # all are stepped in turn
        sizes = Budget(1 << 40)
        self.shared = SharedRam(sizes, self.residency.free_idle, self.residency.ceiling)
        self.residency.share(self.shared)
        for seed, name in enumerate(names):
            self.add(name, toy("llama", seed=seed), keep=name in kept)
        layout = self.benches["a"].kv.layout
        sizes.limit = sizes.used + ROOM * layout.bytes_per_token
        self.tasks: list[Task] = []
        self.busy: set[str] = set()

    def open_cache(self, bench: Bench) -> KVCache:
        own = Budget(1 << 40, self.shared.budget)
        return KVCache.open(bench.kv.layout, own, shared=self.shared)

    def put(self, name: str, seed: int, size: int = SMALL) -> Task:
        task = self.benches[name].put(ids(seed, size), tokens=4)
        self.tasks.append(task)
        return task

    def keep_busy(self, *names: str) -> None:
        """Have at least two requests for each of these models from now on."""
        self.busy = set(names)

    def tick(self) -> None:
        for name in self.busy:
            while len(self.benches[name].scheduler.waiting) < 2:
                self.put(name, len(self.tasks))
        waits = self.residency.wait_s()
        if not self.works():
            assert waits is not None, "the thread would sleep for ever"
            self.clock.now += waits
        self.rounds.tick()
        self.clock.now += self.tick_s
        assert self.shared.budget.used <= self.shared.budget.limit

    def run_until(self, *tasks: Task, seconds: float = 20.0) -> None:
        end = self.clock.now + seconds
        while not all(task.over for task in tasks):
            assert self.clock.now < end, "the requests do not end"
            self.tick()

    def check(self) -> None:
        """Run all requests to their ends: each has its whole reply."""
        self.busy = set()
        self.run_until(*self.tasks, seconds=60.0)
        assert all(isinstance(last_of(task), Finished) for task in self.tasks)
        assert all(len(task.out) == 4 for task in self.tasks)
        assert not any(one.draining for one in self.residents.values())


@pytest.fixture
def two(toy: ToyMaker) -> Shared:
    return Shared(toy, "ab")


@pytest.fixture
def three(toy: ToyMaker) -> Shared:
    return Shared(toy, "abc")


def test_a_prompt_gets_the_memory_of_a_model_that_always_has_requests(two: Shared) -> None:
    """Once the other one has had it for its stay; then that goes on."""
    two.keep_busy("b")
    two.run_until(two.put("b", 1))
    began, large = two.clock.now, two.put("a", 2, LARGE)
    two.run_until(large)
    assert large.out == two.benches["a"].cold(ids(2, LARGE), 4)
    assert two.residents["b"].unloads == 1
    assert two.clock.now - began > two.residents["b"].stay_s
    two.run_until(two.put("b", 3))
    two.check()


def test_a_prompt_that_needs_no_weights_of_others_unloads_none(two: Shared) -> None:
    two.keep_busy("b")
    two.run_until(two.put("b", 1))
    two.run_until(two.put("a", 2, ROOM - 100))
    assert states(two) == {"a": "loaded", "b": "loaded"}
    two.check()
    assert two.residents["b"].unloads == 0


def test_two_models_that_wait_for_memory_of_each_other(two: Shared) -> None:
    """Neither has a request in progress, so nothing would ever become free."""
    one, other = two.put("a", 1, LARGE), two.put("b", 2, LARGE)
    two.run_until(one, other)
    two.check()


def test_models_that_both_have_large_prompts_do_not_switch_all_the_time(two: Shared) -> None:
    began, two.tick_s = two.clock.now, 0.02
    for seed in range(12):
        two.put("ab"[seed % 2], seed, LARGE)
    two.check()
    least = min(one.stay_s for one in two.residents.values())
    unloads = sum(one.unloads for one in two.residents.values())
    assert 2 <= unloads <= 2 + (two.clock.now - began) / least  # and not one for each prompt


def test_a_prompt_for_which_two_models_must_go(three: Shared) -> None:
    """They always have requests, and are read again in turn, but not before it."""
    three.keep_busy("b", "c")
    three.run_until(three.put("b", 1), three.put("c", 2))
    for seed in (3, 4):
        three.run_until(three.put("a", seed, WHOLE))
        three.run_until(three.put("b", seed + 2), three.put("c", seed + 4))
    three.check()


def test_a_model_that_is_always_kept_makes_way_without_being_unloaded(toy: ToyMaker) -> None:
    house = Shared(toy, "abc", kept="b")
    house.keep_busy("b", "c")
    house.run_until(house.put("b", 1))
    house.run_until(house.put("a", 2, LARGE))
    house.check()
    assert house.residents["b"].unloads == 0


def test_no_model_makes_way_for_a_prompt_that_can_never_fit(toy: ToyMaker) -> None:
    house = Shared(toy, "ab", kept="b")
    house.keep_busy("b")
    task = house.benches["a"].put(ids(1, LARGE), tokens=4)
    house.run_until(task)
    assert isinstance(last_of(task), ContextLengthExceeded)
    house.check()


def test_a_prompt_that_is_given_up_stops_no_other_model(two: Shared) -> None:
    two.keep_busy("b")
    two.run_until(two.put("b", 1))
    large = two.benches["a"].put(ids(2, LARGE), tokens=4)
    while not two.residents["b"].draining:
        two.tick()
    two.rounds.thread.post(lambda: two.benches["a"].scheduler.cancel(large))
    two.check()
    assert two.residents["b"].unloads == 0
