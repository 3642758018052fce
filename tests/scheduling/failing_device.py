"""Requests on a device of which some evaluations fail, and a judge of their replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.bench.device_faults import FailingDevice, failing
from mlxcache.errors import DeadlineExceeded, MlxcacheError
from mlxcache.model import device
from mlxcache.model.lineage import Lineage
from mlxcache.model.pair import Pair
from mlxcache.scheduling.speculation import Speculation
from mlxcache.scheduling.task import Task
from mlxcache.types import Finished, Sampling, Text
from tests.conftest import ToyMaker
from tests.scheduled import Bench

TOLERANCE = 1e-3
"""By how much of a logit a greedy token may fall short of the best one: float32 sums differ."""

QUANTISED_TOLERANCE = 0.1
"""The same for quantised KV, in which such differences decide how a number is rounded."""


def text(task: Task) -> list[int]:
    """The tokens that the client was sent: each is a piece of its own."""
    events = task.events  # type: ignore[attr-defined]
    return [int(event.text) for event in events if isinstance(event, Text)]


def last(task: Task) -> object:
    """The last event of a task, or None before the first."""
    events = task.events  # type: ignore[attr-defined]
    return events[-1] if events else None


class Judge:
    """Says what a model would have answered, alone and on a device that works."""

    def __init__(self, path: Path, *, kv_bits: int | None = None):
        self.bench = Bench(path, kv_bits=kv_bits)
        self.tolerance = TOLERANCE if kv_bits is None else QUANTISED_TOLERANCE

    def check(self, ids: list[int], out: list[int], sampling: Sampling) -> None:
        """`out` is the reply to `ids`, or the beginning of it."""
        if not out:
            return
        if sampling != Sampling():
            alone = self.bench.twin().ask(ids, tokens=len(out), sampling=sampling)
            assert alone.out == out, f"another reply to {len(ids)} tokens, {sampling}"
            return
        caches = self.bench.kv.layout.make()
        logits = self.bench.model(mx.array([ids + out[:-1]]), cache=caches)[0]
        rows = np.asarray(logits[len(ids) - 1 :].astype(mx.float32))
        best, drawn = rows.max(axis=-1), rows[np.arange(len(out)), out]
        wrong = np.flatnonzero(drawn < best - self.tolerance)
        assert not len(wrong), f"wrong from token {wrong[0]} on, after {len(ids)} tokens"

    def check_task(self, task: Task) -> None:
        """All that the client was sent is right, and the request has ended."""
        end = last(task)
        assert isinstance(end, Finished | BaseException), end
        if isinstance(end, Finished):
            assert text(task) == task.out
            assert end.generated_tokens == len(task.out)
            assert end.reason == "cancelled" or len(task.out) == task.limit
        elif not device.is_device_error(end):
            assert isinstance(end, DeadlineExceeded) or "again and again" in str(end), end
        self.check(task.job.prompt.ids.tolist(), text(task), task.job.sampling)


def make_judges(toy: ToyMaker) -> Callable[[str], Judge]:
    """A judge of each family, made once."""
    made: dict[str, Judge] = {}

    def judge(family: str) -> Judge:
        if family not in made:
            made[family] = Judge(toy(family))
        return made[family]

    return judge


class Unlucky:
    """A bench on a device of which some evaluations fail, with a disk tier or without.

    `speculation`: makes guesses of its replies.
    """

    def __init__(
        self,
        path: Path,
        on: FailingDevice,
        folder: Path | None,
        chunk: int = 64,
        speculation: Speculation | None = None,
        **options: Any,
    ):
        self.bench = Bench(path, chunk=chunk, **options)
        self.bench.speculation = speculation
        if isinstance(pair := self.bench.model, Pair):
            pair.model, pair.draft = on.watch(pair.model), on.watch(pair.draft)
        else:
            self.bench.model = on.watch(self.bench.model)
        self.on = on
        self.died = False
        self.ticks = 0
        self.ends: list[tuple[int, Task, MlxcacheError | None]] = []
        if folder is not None:
            self.bench.open_disk(folder)
        else:
            self.bench.use(self.bench.kv)

    def run(self, tasks: Sequence[Task]) -> None:
        """Work until all has ended, or the scheduler gives the device up."""
        try:
            with failing(self.on):
                self.bench.run(until=self._tick)
        except RuntimeError as error:
            if not device.is_device_error(error):
                raise
            self.died = True
            for task in tasks:
                if not isinstance(last(task), Finished | BaseException):
                    task.push(error)  # as the engine does when its thread dies
        self.bench.check()
        if not self.died:
            assert not self.bench.kv.ram.busy

    def _tick(self) -> bool:
        """Post what clients do at this tick: they leave, or their time is over. False."""
        self.ticks += 1
        scheduler = self.bench.scheduler
        for at, task, why in self.ends:
            if at == self.ticks:
                self.bench.thread.post(lambda t=task, w=why: scheduler.cancel(t, w))  # type: ignore[misc]
        return False


def check_unlocked(bench: Bench) -> None:
    """Nothing in the tree is locked once all requests and writes are over."""
    nodes = list(bench.kv.tree.root.children.values())
    for node in nodes:
        assert not node.locks
        nodes += node.children.values()


def tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(10, 400, n)]


class Once:
    """Picks the first evaluation for which `when()` holds; `rest` of them with `times`."""

    def __init__(self, times: int = 1):
        self.when: Callable[[], bool] = lambda: False
        self.left = times

    def __call__(self, number: int) -> bool:
        if self.left and self.when():
            self.left -= 1
            return True
        return False


def decoding(bench: Bench, rows: int, after: int) -> bool:
    """True while a lane of `rows` rows has drawn `after` tokens for each."""
    lanes = bench.scheduler.lanes.all
    return any(
        len(lane.tasks) == rows and all(len(task.out) >= after for task in lane.tasks)
        for lane in lanes
    )


def prefilling(bench: Bench, after: int, *, restoring: bool = False) -> bool:
    """True while a prompt of which `after` tokens are computed is fed, or restored."""
    tasks = bench.scheduler.prefilling
    return any(t.restoring == restoring and t.held.length >= after for t in tasks)


def growing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """True while the buffers of a lineage are enlarged."""
    now: list[int] = []
    grow = Lineage.grow

    def noted(lineage: Lineage, capacity: int) -> None:
        now.append(capacity)
        grow(lineage, capacity)
        now.pop()

    monkeypatch.setattr(Lineage, "grow", noted)
    return lambda: len(now) > 0


def failing_once(
    path: Path, folder: Path | None = None, *, chunk: int = 64, **device_options: Any
) -> tuple[Once, Unlucky]:
    """A device that fails once, and a bench of the model at `path` on it. Set `when` before a run.

    `folder`: that of a disk tier. `device_options`: those of `FailingDevice`.
    """
    once = Once()
    return once, Unlucky(path, FailingDevice(once, **device_options), folder, chunk)


def check_restored(judge: Judge, path: Path, folder: Path, ids: list[int], least: int) -> None:
    """A new process restores at least `least` tokens of `ids` from `folder`, and replies right."""
    fresh = Bench(path)
    fresh.open_disk(folder)
    found = fresh.ask(ids)
    assert found.record.restored_tokens >= least
    judge.check_task(found)
    fresh.kv.close(1.0)
