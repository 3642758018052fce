"""Steps that are built while a pass still runs, which holds the KV that it reads, as on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.model import device
from mlxcache.scheduling import decoder
from mlxcache.scheduling.decoder import Decoder
from mlxcache.scheduling.task import Task
from tests.scheduled import Bench
from tests.toys.toy import make_toy

LENGTH = 2000


class Running:
    """A device whose passes hold the KV until they are waited for, as completion handlers do.

    `waits`: how often that was.
    """

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch):
        self._bench = bench
        self._eval, self._async_eval = mx.eval, mx.async_eval
        self._synchronize = mx.synchronize
        self._held: list[mx.array] = []
        self.waits = 0
        monkeypatch.setattr(device, "holds_inputs", lambda: True)
        monkeypatch.setattr(mx, "eval", self.eval)
        monkeypatch.setattr(mx, "async_eval", self.async_eval)
        monkeypatch.setattr(mx, "synchronize", self.synchronize)

    def eval(self, *arrays: Any) -> None:
        self._eval(*arrays)
        self._hold()

    def async_eval(self, *arrays: Any) -> None:
        self._async_eval(*arrays)
        self._hold()

    def synchronize(self) -> None:
        self.waits += 1
        self._synchronize()
        self._held.clear()

    def _hold(self) -> None:
        slots = [slot for line in self._bench.kv.ram.busy.values() for slot in line.linear]
        views = [array[..., :8, :] for slot in slots for array in (slot.keys, slot.values)]
        self._eval(views)
        self._held = views


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A model with much KV for its size, fed in one chunk."""
    path = tmp_path_factory.mktemp("dense") / "toy"
    shape: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 8, "kv_heads": 8, "head_dim": 64}
    return Bench(make_toy(path, "llama", **shape), chunk=LENGTH)


def peaks(bench: Bench, ids: Sequence[int], steps: int) -> list[int]:
    """By how many bytes each step of decoding exceeds what was resident before it."""
    task = bench.put(ids, tokens=steps + 4)
    bench.run(until=lambda: not bench.scheduler.waiting and task.remaining <= 1)
    found = []
    for _ in range(steps):
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        bench.tick()
        found.append(mx.get_peak_memory() - before)
    bench.run()
    return found


def no_wait(self: Decoder, *arrays: object) -> None:
    mx.async_eval(*arrays)


def test_no_step_copies_a_layers_kv(dense: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of a first token nor a later one; without the wait for the pass, each does."""
    monkeypatch.setattr(decoder, "WAIT_BYTES", 1 << 20)
    bench = dense.twin()
    one = LENGTH * bench.kv.layout.widest // 2
    ids = np.random.default_rng(1).integers(10, 400, LENGTH).tolist()
    with monkeypatch.context() as patch:
        Running(bench, patch)
        assert max(peaks(bench, ids, 6)) < one
    control = dense.twin()
    with monkeypatch.context() as patch:
        Running(control, patch)
        patch.setattr(Decoder, "_begin", no_wait)
        assert min(peaks(control, ids, 6)) >= one


def test_steps_that_wait_draw_the_same_tokens(
    bench: Bench, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, and after leaving one."""
    prompts = [rng.integers(10, 400, n).tolist() for n in (150, 151, 152)]
    expected = [bench.cold(ids, n) for ids, n in zip(prompts, (20, 12, 12), strict=True)]
    monkeypatch.setattr(decoder, "WAIT_BYTES", 0)
    running = Running(bench, monkeypatch)
    assert bench.ask(prompts[0], tokens=20).out == expected[0]
    assert running.waits >= len(expected[0]) - 1
    pairs = zip(prompts, expected, strict=True)
    tasks: list[Task] = [bench.put(ids, tokens=len(out)) for ids, out in pairs]
    batched = set()
    while not all(task.over for task in tasks):
        bench.tick()
        batched |= {lane.batched for lane in bench.scheduler.lanes.all}
    assert batched == {False, True}
    assert [task.out for task in tasks] == expected
