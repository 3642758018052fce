"""How several schedulers share the MLX thread: even time, device errors of all, the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mlxcache.errors import Inconsistent
from mlxcache.residency.residency import Rounds

DEVICE_ERROR = "[METAL] Command buffer execution failed: Ignored"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Model:
    """A stand-in for a scheduler, whose steps take `seconds` each and which has `steps` of them."""

    def __init__(self, clock: Clock, seconds: float, steps: int):
        self._clock, self._seconds = clock, seconds
        self.steps, self.done = steps, 0
        self.used = 0.0
        self.shared: list[bool] = []
        self.recovered: list[BaseException] = []
        self.fails: BaseException | None = None

    def has_work(self, *, admitting: bool) -> bool:
        return self.done < self.steps

    def step(self, *, sharing: bool, admitting: bool) -> None:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self._clock.now += self._seconds
        self.used += self._seconds
        self.done += 1
        self.shared.append(sharing)

    def recover(self, error: RuntimeError) -> None:
        self.recovered.append(error)

    def publish(self) -> None:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rounds_of(clock: Clock, *models: Any) -> Rounds:
    rounds = Rounds(clock=clock)
    for model in models:
        rounds.add(model)
    return rounds


def test_a_slow_and_a_fast_model_get_the_same_time(clock: Clock) -> None:
    slow, fast = Model(clock, 0.05, 10_000), Model(clock, 0.004, 10_000)
    rounds = rounds_of(clock, slow, fast)
    for _ in range(2000):
        rounds.tick()
    assert abs(slow.used - fast.used) <= 0.05
    assert all(slow.shared)
    assert all(fast.shared)


def test_a_model_that_had_no_work_does_not_catch_up(clock: Clock) -> None:
    busy, later = Model(clock, 0.01, 10_000), Model(clock, 0.01, 0)
    rounds = rounds_of(clock, busy, later)
    for _ in range(1000):
        rounds.tick()
    assert not any(busy.shared)  # alone: it is not hurried
    later.steps = 10_000
    before = busy.used
    for _ in range(100):
        rounds.tick()
    assert abs((busy.used - before) - later.used) <= 0.02


def test_every_model_recovers_from_a_device_error(clock: Clock) -> None:
    """It is not known whose command failed."""
    one, other = Model(clock, 0.01, 5), Model(clock, 0.01, 5)
    rounds = rounds_of(clock, one, other)
    one.fails = error = RuntimeError(DEVICE_ERROR)
    rounds.tick()
    assert one.recovered == other.recovered == [error]
    rounds.tick()
    assert one.done + other.done == 1


def test_another_error_is_survived_and_what_is_inconsistent_ends_the_loop(clock: Clock) -> None:
    one, other = Model(clock, 0.01, 5), Model(clock, 0.01, 5)
    rounds = rounds_of(clock, one, other)
    one.fails = ValueError("no device's")
    rounds.tick()
    rounds.tick()
    assert one.done + other.done == 1
    one.fails = Inconsistent("on purpose")
    seen: list[BaseException] = []
    over = threading.Event()
    rounds.on_death(seen.append)
    rounds.on_death(lambda error: over.set())
    rounds.start()
    assert over.wait(10)
    rounds.thread.join(10)
    assert [type(error) for error in seen] == [Inconsistent]
    assert not other.recovered
    assert not rounds.thread.alive


def test_the_thread_ends_with_the_last_scheduler(clock: Clock) -> None:
    one, other = Model(clock, 0.0, 0), Model(clock, 0.0, 0)
    rounds = rounds_of(clock, one, other)
    rounds.start()
    rounds.start()  # each engine starts it
    for last, model in ((False, one), (True, other)):
        rounds.thread.post(lambda model=model: rounds.remove(model))  # type: ignore[misc]
        rounds.end()
        rounds.thread.join(10 if last else 0.2)
        assert rounds.thread.alive is not last
