"""When weights are dropped and read back: on real toy models, with a clock of the test's own."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import BadRequest, NotReady, StoreError
from mlxcache.model.load import ModelSpec, load
from mlxcache.model.weights import BaseUse, Pace, Weights
from mlxcache.residency.residency import Residency, Rounds
from mlxcache.residency.resident import Newcomer, Resident
from mlxcache.scheduling.task import Task
from mlxcache.types import Finished
from tests.conftest import ToyMaker
from tests.scheduled import Bench
from tests.server.api import until
from tests.toys.adapter import make_adapter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """Memory of all models, as the budget they share would be: it holds `limit` bytes."""

    def __init__(self, limit: int):
        self.limit = limit
        self.kinds: dict[str, int] = {}
        self.residency: Residency | None = None
        self.highest = self.withheld = self.retried = 0

    @property
    def used(self) -> int:
        return sum(self.kinds.values())

    @property
    def free(self) -> int:
        return self.limit - self.used - self.withheld

    def withhold(self, size: int) -> None:
        self.withheld = size

    def retry_waiting(self) -> None:
        self.retried += 1

    def charge(self, kind: str, n: int) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0) + n
        assert self.kinds[kind] >= 0
        self.highest = max(self.highest, self.used)
        assert self.used <= self.limit

    def make_room(self, size: int) -> bool:
        assert self.residency is not None
        while self.free < size:
            if not self.residency.free_idle(size):
                return False
        return True


class House:
    """Toy models that share a thread, driven round by round in the test's own thread."""

    concurrency = 8

    def __init__(self, memory: Memory | None = None, **idle_s: float):
        self.clock = Clock()
        self.memory = memory
        self.residency = Residency(memory, self.clock)  # type: ignore[arg-type]
        if memory is not None:
            memory.residency = self.residency
        self.rounds = Rounds(self.residency, self.clock)
        self.idle_s = idle_s
        self.residents: dict[str, Resident] = {}
        self.benches: dict[str, Bench] = {}

    def add(
        self,
        name: str,
        path: Path,
        *,
        loaded: bool = True,
        disk: Path | None = None,
        adapter: Path | None = None,
        **options: Any,
    ) -> Bench:
        use = BaseUse(self.residency.account.bases, name)
        spec = ModelSpec(str(path), adapter=str(adapter) if adapter else None)
        bench = Bench(path, loaded=load(spec, use=use), concurrency=self.concurrency)
        bench.rounds, bench.thread = self.rounds, self.rounds.thread
        if disk is None:
            bench.use(self.open_cache(bench))
        else:
            bench.open_disk(disk)
        assert bench.loaded is not None
        weights = Weights(bench.loaded, spec, use)
        resident = Resident(
            name,
            weights,
            bench.scheduler,
            reserved={"transient": 1000},
            idle_s=self.idle_s.get(name),
            **options,
        )
        bench.kv.budget.charge("transient", 1000)
        self.residency.add(resident)
        self.residents[name], self.benches[name] = resident, bench
        if not loaded:
            assert self.residency.unload(bench.scheduler)
        return bench

    def open_cache(self, bench: Bench) -> KVCache:
        """Return the cache of a new model, which has a budget of its own."""
        return bench.kv

    def works(self) -> bool:
        """Return whether the thread would not sleep."""
        waits = self.residency.wait_s()
        if self.rounds.thread.has_posted or self.residency.busy or waits == 0.0:
            return True
        admits = self.residency.admits
        return any(
            bench.scheduler.has_work(admitting=admits(bench.scheduler))
            for bench in self.benches.values()
        )

    def run(self, *tasks: Task, rounds: int = 5000) -> None:
        for _ in range(rounds):
            if all(task.over for task in tasks):
                return
            self.rounds.tick()
            self.clock.now += 0.01
        raise AssertionError("the tasks do not end")


def ids(seed: int, n: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(10, 400, n).tolist()


def last_of(task: Task) -> Any:
    return task.events[-1]  # type: ignore[attr-defined]


def states(house: House) -> dict[str, str]:
    return {name: one.state for name, one in house.residents.items()}


class TestIdle:
    def test_a_model_is_unloaded_after_its_time_and_is_warm_afterwards(
        self, toy: ToyMaker, tmp_path: Path
    ) -> None:
        house = House(a=60.0)
        bench = house.add("a", toy("llama"))
        prompt = ids(1)
        first = bench.put(prompt, tokens=8)
        house.run(first)
        house.clock.now += 59.0
        assert 0.9 < (house.residency.wait_s() or 0) < 1.1
        house.rounds.thread.post(lambda: None)
        house.rounds.tick()
        assert states(house) == {"a": "loaded"}
        house.clock.now += 1.1
        assert house.residency.wait_s() == 0.0
        house.rounds.tick()  # it wakes by itself
        assert states(house) == {"a": "unloaded"}
        assert house.residents["a"].cause == "idle"
        assert house.residency.wait_s() is None
        again = bench.put([*prompt, *first.out, *ids(2, 20)], tokens=8)
        house.run(again)
        assert again.record.fed_tokens <= 21
        assert again.out == bench.cold(again.ids.tolist(), 8)
        assert house.residents["a"].loads == 1

    def test_kv_leaves_memory_once_it_is_on_disk(
        self, toy: ToyMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if it is being written when the model is unloaded, and no request comes."""
        house = House(a=0.0)
        bench = house.add("a", toy("llama"), disk=tmp_path)
        assert bench.kv.disk is not None
        free, write = threading.Event(), bench.kv.disk.store.write_run

        def wait(*args: object) -> None:
            free.wait(60.0)
            write(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(bench.kv.disk.store, "write_run", wait)
        trims: list[int] = []
        monkeypatch.setattr("mlxcache.residency.residency.trim_heap", lambda: trims.append(1))
        prompt = ids(1, 400)
        first = bench.put(prompt, tokens=4)
        house.run(first)
        while states(house) == {"a": "loaded"}:
            house.rounds.tick()
        assert bench.kv.writing
        assert bench.kv.ram.idle_bytes > 0
        trims.clear()
        free.set()
        while bench.kv.ram.idle_bytes:
            until(house.works, 5, lambda: "the thread sleeps, and the KV is still in memory")
            house.rounds.tick()
        assert trims
        assert mx.get_cache_memory() == 0
        again = bench.put([*prompt, *first.out, *ids(2, 20)], tokens=8)
        house.run(again)
        assert again.record.restored_tokens >= 400
        assert again.record.fed_tokens <= 24
        bench.kv.close(1.0)

    def test_kv_that_cannot_be_written_stays_in_memory(
        self, toy: ToyMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        house = House(a=5.0)
        bench = house.add("a", toy("llama"), disk=tmp_path)
        assert bench.kv.disk is not None

        def fail(*args: object) -> None:
            raise StoreError("the disk is full")

        monkeypatch.setattr(bench.kv.disk.store, "write_run", fail)
        prompt = ids(1, 400)
        first = bench.put(prompt, tokens=4)
        house.run(first)
        while bench.kv.writing:
            until(house.works, 5, lambda: "the thread sleeps, and a path waits to be written")
            house.rounds.tick()
        assert bench.kv.disk.write_behind.backoff.failing
        house.clock.now += 10.0
        house.residency.step()
        house.residency.step()
        assert states(house) == {"a": "unloaded"}
        again = bench.put([*prompt, *first.out, *ids(2, 20)], tokens=8)
        house.run(again)
        assert again.record.fed_tokens <= 24
        bench.kv.close(0.0)

    def test_a_running_request_keeps_its_model(self, toy: ToyMaker) -> None:
        house = House(a=5.0)
        bench = house.add("a", toy("llama"))
        task = bench.put(ids(1), tokens=40)
        while not task.over:
            house.rounds.tick()
            house.clock.now += 10.0
            assert task.over or states(house) == {"a": "loaded"}

    def test_one_that_is_kept_stays(self, toy: ToyMaker) -> None:
        house = House(a=5.0)
        house.add("a", toy("llama"), keep=True)
        assert house.residency.wait_s() is None
        house.clock.now += 1000.0
        house.residency.step()
        assert states(house) == {"a": "loaded"}


class TestMemory:
    """A budget that holds the weights of one model alone."""

    @pytest.fixture
    def house(self, toy: ToyMaker) -> House:
        weights = Weights(*_opened(toy("llama"))).nbytes
        house = House(Memory(int(1.6 * weights)))
        house.add("a", toy("llama"), loaded=False)
        house.add("b", toy("llama", seed=7), loaded=False)
        return house

    def test_models_take_turns_and_each_stays_warm(self, house: House) -> None:
        assert house.memory is not None
        history = {name: ids(i) for i, name in enumerate(house.benches)}
        for turn in range(4):
            for name, bench in house.benches.items():
                task = bench.put(history[name], tokens=6)
                house.run(task)
                assert states(house)[name] == "loaded"
                assert task.out == bench.cold(history[name], 6)
                if turn:
                    assert task.record.fed_tokens <= 12
                history[name] = [*history[name], *task.out, *ids(100 + turn, 10)]
        assert [one.loads for one in house.residents.values()] == [4, 4]
        assert house.memory.highest <= house.memory.limit

    def test_a_busy_model_stays_for_a_while_and_then_gives_way(self, house: House) -> None:
        """Its running request ends first; its waiting ones come after the other model's."""
        a, b = house.benches.values()
        running = a.put(ids(1), tokens=200)
        while not running.out:
            house.rounds.tick()
            house.clock.now += 0.01
        house.residents["a"].load_s = 5.0
        other = b.put(ids(2), tokens=4)
        house.rounds.tick()
        assert not house.residents["a"].draining
        later = a.put(ids(3), tokens=4)
        house.rounds.tick()
        assert later in a.scheduler.active  # it may still start
        house.clock.now += 25.0
        house.rounds.tick()
        assert house.residents["a"].draining
        last = a.put(ids(4), tokens=4)
        ends: list[Task] = []
        for _ in range(5000):
            house.rounds.tick()
            house.clock.now += 0.01
            ends += [t for t in (running, other, later, last) if t.over and t not in ends]
            if len(ends) == 4:
                break
        assert ends.index(last) == 3
        assert ends.index(other) == 2
        assert all(isinstance(last_of(t), Finished) for t in ends)

    def test_a_model_that_can_never_fit_is_refused_with_the_figures(self, toy: ToyMaker) -> None:
        weights = Weights(*_opened(toy("llama"))).nbytes
        house = House(Memory(int(1.6 * weights)))
        b = house.add("b", toy("llama", seed=7), loaded=False)
        house.add("a", toy("llama"), keep=True)
        task = b.put(ids(1), tokens=4)
        house.run(task)
        error = last_of(task)
        assert isinstance(error, BadRequest)
        assert "The model b needs" in str(error)
        assert states(house) == {"b": "unloaded", "a": "loaded"}

    def test_idle_models_are_unloaded_only_if_that_suffices(self, toy: ToyMaker) -> None:
        """Those used least recently go first, without any that the others make unnecessary."""
        small = Weights(*_opened(toy("llama"))).nbytes
        house = House(Memory(20 * small))
        for i, name in enumerate("abc"):
            house.add(name, toy("llama", seed=i))
            house.clock.now += 1.0
        house.add("large", toy("llama", intermediate=3000))
        house.add("kept", toy("llama", seed=5), keep=True)
        large, size = house.residents["large"].size, house.residents["a"].size
        assert large > 2 * size
        residency, loaded = house.residency, "loaded"
        assert not residency.free_idle(large + 3 * size + 1)
        assert set(states(house).values()) == {loaded}
        assert residency.free_idle(size + 1)
        assert [name for name, state in states(house).items() if state == loaded] == [
            *("c", "large", "kept")
        ]
        residency.ask(house.benches["a"].scheduler)
        while states(house)["a"] != loaded:
            residency.step()
        # the large one alone suffices, so the older one stays
        assert residency.free_idle(large)
        assert states(house) | {"b": ""} == {
            **dict.fromkeys(("a", "c", "kept"), loaded),
            **{"b": "", "large": "unloaded"},
        }

    def test_models_that_are_kept_leave_the_others_what_they_do_not_take(
        self, toy: ToyMaker
    ) -> None:
        memory = Memory(100_000_000)
        house = House(memory)
        a, b = (house.add(name, toy("llama", seed=i)) for i, name in enumerate("ab"))
        one, other = house.residents["a"], house.residents["b"]
        assert house.residency.ceiling(a.kv.ram) == memory.limit - one.nbytes
        kept = house.add("kept", toy("llama", seed=5), keep=True)
        taken = house.residents["kept"].size
        assert house.residency.ceiling(b.kv.ram) == memory.limit - other.nbytes - taken
        assert house.residency.size_beside_kept(other.weights) == other.nbytes + taken
        assert house.residency.unload(kept.scheduler)
        assert house.residency.ceiling(b.kv.ram) == memory.limit - other.nbytes

    def test_withheld_memory_is_used_when_a_model_needs_it(self, house: House) -> None:
        assert house.memory is not None
        house.memory.withheld = house.memory.limit // 2
        b = house.benches["b"]
        task = b.put(ids(1), tokens=4)
        house.run(task)
        assert task.out == b.cold(ids(1), 4)
        assert house.memory.withheld == 0

    def test_the_thread_sleeps_while_nothing_can_be_done(self, house: House) -> None:
        """A model waits for memory that no one else is about to release."""
        assert house.memory is not None
        house.memory.charge("other", house.memory.limit)
        task = house.benches["b"].put(ids(1), tokens=4)
        for _ in range(3):
            house.rounds.thread.wake()
            house.rounds.tick()
        assert not house.residency.busy
        assert not any(one.scheduler.has_work(admitting=False) for one in house.residents.values())
        house.memory.charge("other", -house.memory.limit)
        house.rounds.thread.wake()
        house.run(task)

    def test_a_model_that_need_not_load_any_more_does_not(self, house: House) -> None:
        a, residency = house.benches["a"], house.residency
        residency.ask(a.scheduler)
        assert residency.unload(a.scheduler)
        residency.step()
        assert states(house)["a"] == "unloaded"

    def test_a_newcomer_that_has_left_takes_no_memory(self, house: House) -> None:
        assert house.memory is not None
        for size in (1000, 10 * house.memory.limit):
            use = BaseUse(house.residency.account.bases, "c")
            newcomer = Newcomer(use, (None for _ in range(9)))
            newcomer.estimate([], size, 0)
            house.residency.welcome(newcomer)
            assert newcomer.served.cancel()
            house.residency.step()
        assert house.memory.used == 0
        assert not house.residency.busy

    @pytest.mark.parametrize("damage", ["truncated", "deleted", "moved"])
    def test_damaged_files_fail_the_requests_and_not_the_thread(
        self, house: House, toy: ToyMaker, tmp_path: Path, damage: str
    ) -> None:
        assert house.memory is not None
        path = tmp_path / "model"
        shutil.copytree(toy("llama", seed=9), path)
        bench = house.add("c", path, loaded=False)
        file = path / "model.safetensors"
        whole, stat = file.read_bytes(), file.stat()
        if damage == "deleted":
            file.unlink()
        elif damage == "moved":
            path.rename(tmp_path / "elsewhere")
        else:
            file.write_bytes(whole[: stat.st_size // 2])
        task = bench.put(ids(1), tokens=4)
        house.run(task)
        assert isinstance(error := last_of(task), NotReady)
        assert ("has changed since the model was" in str(error)) == (damage == "truncated")
        assert house.memory.used == 0
        if damage == "moved":
            (tmp_path / "elsewhere").rename(path)
        file.write_bytes(whole)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        again = bench.put(ids(1), tokens=4)
        house.run(again)
        assert again.out == bench.cold(ids(1), 4)

    @pytest.mark.parametrize("error", ["[METAL] Command buffer execution failed: x", "[read] no"])
    def test_errors_while_weights_are_read(
        self, house: House, monkeypatch: pytest.MonkeyPatch, error: str
    ) -> None:
        """After an error of the device they are read again; any other fails the requests."""
        assert house.memory is not None
        evaluate, failures = mx.eval, [error]

        def fails(*arrays: Any) -> None:
            if failures and house.residents["b"].state == "loading":
                raise RuntimeError(failures.pop())
            evaluate(*arrays)

        b = house.benches["b"]
        task = b.put(ids(1), tokens=4)
        with monkeypatch.context() as patch:
            patch.setattr("mlxcache.model.weights.mx.eval", fails)
            house.run(task)
        assert not failures
        if error.startswith("[METAL]"):
            assert task.out == b.cold(ids(1), 4)
        else:
            assert isinstance(last_of(task), NotReady)
            assert house.memory.used == 0


def test_other_replies_go_on_while_weights_are_read(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Weights.read
    monkeypatch.setattr(Weights, "read", lambda self: read(self, Pace(200_000, 200_000)))
    house = House()
    a = house.add("a", toy("llama"))
    b = house.add("b", toy("llama", seed=7), loaded=False)
    running = a.put(ids(1), tokens=300)
    while not running.out:
        house.rounds.tick()
    task = b.put(ids(2), tokens=4)
    house.rounds.tick()
    assert states(house) == {"a": "loaded", "b": "loading"}
    before, shares = len(running.out), list[float | None]()
    while states(house)["b"] == "loading":
        shares.append(house.residency.residents[1].progress)
        house.rounds.tick()
    assert len(running.out) > before + 2
    assert house.residency.residents[1].progress is None
    told = [share for share in shares if share is not None]
    assert told == sorted(told)
    assert len(set(told)) == len(told) > 2
    assert 0 < told[0] < told[-1] <= 1
    house.run(task)
    assert task.out == b.cold(ids(2), 4)


class TestSharedBase:
    """A base and two adapters over it, with the bytes of its weights charged once."""

    @pytest.fixture
    def adapters(self, toy: ToyMaker, tmp_path: Path) -> dict[str, Path | None]:
        made = {
            name: make_adapter(toy("llama"), tmp_path / name, seed=seed)
            for seed, name in enumerate(("coder", "writer"))
        }
        return {"base": None, **made}

    @pytest.fixture
    def weights(self, toy: ToyMaker) -> int:
        return Weights(*_opened(toy("llama"))).nbytes

    def house(self, path: Path, adapters: dict[str, Path | None], limit: int) -> House:
        house = House(Memory(limit))
        for name, adapter in adapters.items():
            house.add(name, path, loaded=False, adapter=adapter)
        return house

    def test_the_base_is_charged_once_until_its_last_user_is_unloaded(
        self, toy: ToyMaker, adapters: dict[str, Path | None], weights: int
    ) -> None:
        house = self.house(toy("llama"), adapters, 2 * weights)
        memory = house.memory
        assert memory is not None
        assert not any(memory.kinds.values())
        for name, bench in house.benches.items():
            task = bench.put(ids(1), tokens=6)
            house.run(task)
            assert task.out == bench.cold(ids(1), 6), name
        outs = {tuple(bench.cold(ids(1), 6)) for bench in house.benches.values()}
        assert len(outs) == 3  # no reply came from the KV of another
        own = {name: one.nbytes - weights for name, one in house.residents.items()}
        assert own["base"] == 0 < own["coder"] == own["writer"] < 0.2 * weights
        shared = "weights:toy (shared)"
        used = {kind: n for kind, n in memory.kinds.items() if n}
        assert used == {
            shared: weights,
            "weights:coder": own["coder"],
            "weights:writer": own["writer"],
        }
        assert memory.highest == memory.used
        order = ["base", "coder", "writer"]
        for left, name in ((2, "base"), (1, "coder"), (0, "writer")):
            one = house.residents[name]
            assert one.shared_bytes == (weights if left else 0)
            assert house.residency.unload(one.scheduler)
            rest = sum(own[other] for other in order[3 - left :])
            assert memory.used == (weights if left else 0) + rest
        assert memory.used == 0

    def test_the_base_stays_while_adapters_take_turns(
        self, toy: ToyMaker, adapters: dict[str, Path | None], weights: int
    ) -> None:
        """A budget for one of them: the next one takes over the base of the one that goes."""
        house = self.house(toy("llama"), adapters, 2 * weights)
        coder, writer = (house.residents[name] for name in ("coder", "writer"))
        assert house.memory is not None
        house.memory.limit = coder.size + (coder.nbytes - weights) // 2
        read: list[int] = []
        for turn in range(4):
            for name in ("coder", "writer"):
                bench = house.benches[name]
                before = _evaluated(house)
                task = bench.put(ids(turn), tokens=4)
                house.run(task)
                assert task.out == bench.cold(ids(turn), 4)
                assert [n for n, state in states(house).items() if state == "loaded"] == [name]
                read.append(len(_evaluated(house) - before))
                assert house.memory.used == coder.nbytes
        assert (coder.loads, writer.loads) == (4, 4)
        assert read[0] > 0
        assert not any(read[1:])

    def test_one_that_never_fits_beside_those_kept_is_told_what_it_needs_of_its_own(
        self, toy: ToyMaker, adapters: dict[str, Path | None], weights: int
    ) -> None:
        house = House(Memory(10 * weights))
        house.add("base", toy("llama"), keep=True)
        coder = house.add("coder", toy("llama"), loaded=False, adapter=adapters["coder"])
        other = house.add("other", toy("llama", seed=7), loaded=False)
        assert house.memory is not None
        house.memory.limit = int(1.5 * weights)
        fits, refused = coder.put(ids(1), tokens=4), other.put(ids(1), tokens=4)
        house.run(fits, refused)
        assert fits.out == coder.cold(ids(1), 4)
        assert isinstance(last_of(refused), BadRequest)

    def test_unloading_one_of_two_sharers_is_not_promised_to_free_the_base(
        self, toy: ToyMaker, adapters: dict[str, Path | None], weights: int
    ) -> None:
        """A third model waits while one of them is busy, and nothing is unloaded in vain."""
        house = House(Memory(10 * weights))
        base = house.add("base", toy("llama"))
        house.add("coder", toy("llama"), adapter=adapters["coder"])
        other = house.add("other", toy("llama", seed=7), loaded=False)
        assert house.memory is not None
        house.memory.limit = int(1.9 * weights)
        running = base.put(ids(1), tokens=60)
        while not running.out:
            house.rounds.tick()
        waiting = other.put(ids(2), tokens=4)
        for _ in range(10):
            house.rounds.tick()
            assert states(house) == {"base": "loaded", "coder": "loaded", "other": "unloaded"}
        house.run(running, waiting)
        assert waiting.out == other.cold(ids(2), 4)
        assert states(house)["base"] == states(house)["coder"] == "unloaded"
        assert house.memory.used == weights


def _evaluated(house: House) -> set[int]:
    """Return the ids of the base arrays in memory."""
    bases = house.residency.account.bases
    found = bases.find(Path(house.benches["base"].loaded.path))
    return {id(found.get(name)) for name in found.names()}


def _opened(path: Path) -> Any:
    spec = ModelSpec(str(path))
    return load(spec), spec
