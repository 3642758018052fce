"""A device that fails in silence: no wrong token is sent or kept, and every request is answered."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.bench.device_faults import ERRORS, FailingDevice, failing
from mlxcache.engine.task import Task
from mlxcache.errors import GenerationFailed
from mlxcache.model import device
from mlxcache.types import Finished, Sampling, Text
from tests.conftest import ToyMaker
from tests.scheduled import Bench

FAMILIES = ("llama", "gemma3", "qwen3_5", "deepseek_v3")
RUNS = int(os.environ.get("MLXCACHE_DEVICE_RUNS", "0"))
TOLERANCE = 1e-3
"""By how much of a logit a greedy token may fall short of the best one: float32 sums differ."""

SAMPLINGS = (
    Sampling(),
    Sampling(),
    Sampling(temperature=0.8, seed=11),
    Sampling(temperature=1.1, seed=12, top_p=0.9, presence_penalty=0.5),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.3),
)


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

    def __init__(self, path: Path):
        self.bench = Bench(path)

    def check(self, ids: list[int], out: list[int], sampling: Sampling) -> None:
        """`out` is the reply to `ids`, or the beginning of it."""
        if not out:
            return
        if sampling != Sampling():
            alone = self.bench.twin().ask(ids, tokens=len(out), sampling=sampling)
            assert alone.out == out, f"another reply to {len(ids)} tokens, {sampling}"
            return
        model = self.bench.model
        logits = model(mx.array([ids + out[:-1]]), cache=make_prompt_cache(model))[0]
        rows = np.asarray(logits[len(ids) - 1 :].astype(mx.float32))
        best, drawn = rows.max(axis=-1), rows[np.arange(len(out)), out]
        wrong = np.flatnonzero(drawn < best - TOLERANCE)
        assert not len(wrong), f"wrong from token {wrong[0]} on, after {len(ids)} tokens"

    def check_task(self, task: Task) -> None:
        """All that the client was sent is right, and the request has ended."""
        end = last(task)
        assert isinstance(end, Finished | BaseException), end
        if isinstance(end, Finished):
            assert text(task) == task.out
            assert end.generated_tokens == len(task.out) == task.limit
        elif not device.is_device_error(end):
            assert isinstance(end, GenerationFailed)
        self.check(task.job.prompt.ids.tolist(), text(task), task.job.sampling)


class Unlucky:
    """A bench on a device of which some evaluations fail, with a disk tier or without."""

    def __init__(self, path: Path, on: FailingDevice, folder: Path | None, chunk: int = 64):
        self.bench = Bench(path, chunk=chunk)
        self.bench.model = on.watch(self.bench.model)
        self.on = on
        self.died = False
        if folder is not None:
            self.bench.open_disk(folder)
        else:
            self.bench.use(self.bench.kv)

    def run(self, tasks: Sequence[Task]) -> None:
        """Work until all has ended, or the scheduler gives the device up."""
        try:
            with failing(self.on):
                self.bench.run()
        except RuntimeError as error:
            if not device.is_device_error(error):
                raise
            self.died = True
            for task in tasks:
                if not isinstance(last(task), Finished | BaseException):
                    task.push(error)  # as the engine does when its thread dies
        self.bench.check()


def tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(10, 400, n)]


def live(path: Path, judge: Judge, seed: int, folder: Path) -> int:
    """One random life; returns the failures of the device. Later requests use what was kept."""
    rng = np.random.default_rng(seed)
    picked = {int(n) for n in rng.integers(1, rng.choice([20, 60, 200]), rng.integers(1, 5))}
    if rng.random() < 0.2:  # several in a row
        start = int(rng.integers(1, 80))
        picked |= set(range(start, start + int(rng.integers(2, 9))))
    on = FailingDevice(
        picked.__contains__,
        delay=int(rng.integers(0, 2)),
        in_place=bool(rng.integers(0, 2)),
        message=ERRORS[rng.integers(len(ERRORS))],
    )
    disk = bool(rng.integers(0, 2))
    unlucky = Unlucky(path, on, folder if disk else None, chunk=int(rng.choice([16, 64])))
    chats = [tokens(rng, int(rng.integers(5, 150)))]
    tasks: list[Task] = []
    for _ in range(3):
        now = []
        for _ in range(int(rng.choice([1, 1, 2, 4]))):
            chat = chats[rng.integers(len(chats))]
            ids = [*chat[: int(rng.integers(1, len(chat) + 1))], *tokens(rng, 20)]
            marks = sorted({int(m) for m in rng.integers(1, len(ids) + 1, 2)})
            sampling = SAMPLINGS[rng.integers(len(SAMPLINGS))]
            count = int(rng.choice([1, 3, 12, 40]))
            now.append(unlucky.bench.put(ids, tokens=count, marks=marks, sampling=sampling))
        unlucky.run(now)
        tasks += now
        chats += [[*task.job.prompt.ids.tolist(), *text(task)] for task in now]
        if unlucky.died:
            break
    for task in tasks:
        judge.check_task(task)
    kept = [*map(tuple, chats)]
    if not unlucky.died:
        again(unlucky.bench, judge, kept)
    if disk:
        unlucky.bench.kv.close(10.0)
        fresh = Bench(path)
        fresh.open_disk(folder)
        again(fresh, judge, kept)
        fresh.kv.close(1.0)
    return on.failures


def again(bench: Bench, judge: Judge, chats: Sequence[Sequence[int]]) -> None:
    """On a device that works: what the cache kept of each conversation gives the right reply."""
    for chat in chats[-4:]:
        ids = [*chat, 7, 8, 9]
        judge.check(ids, bench.ask(ids, tokens=6).out, Sampling())


@pytest.fixture(scope="module")
def judges(toy: ToyMaker) -> Callable[[str], Judge]:
    """A judge of each family, made once."""
    made: dict[str, Judge] = {}

    def judge(family: str) -> Judge:
        if family not in made:
            made[family] = Judge(toy(family))
        return made[family]

    return judge


@pytest.mark.parametrize("seed", range(RUNS // len(FAMILIES) or 8))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_life_on_a_failing_device(
    toy: ToyMaker, judges: Callable[[str], Judge], tmp_path: Path, family: str, seed: int
) -> None:
    """`MLXCACHE_DEVICE_RUNS=500` runs so many in all."""
    live(toy(family), judges(family), seed, tmp_path)
