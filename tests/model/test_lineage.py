"""Lineages wait for the device a few times, and take no more memory than they were given."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.model import arrays, device, kv, lineage, serialise
from mlxcache.model.lineage import Lineage
from mlxcache.tree.budget import Budget
from mlxcache.types import token_ids
from tests.model.test_serialise import save
from tests.toys.toy import make_toy

LAYERS = 32
ARRAYS = 2 * LAYERS
LENGTH = 100
ONE = 2 * 16 * 4
"""Bytes of one position in one array."""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> kv.Layout:
    shape: dict[str, Any] = {"hidden": 32, "layers": LAYERS, "heads": 2, "kv_heads": 2}
    path = make_toy(tmp_path_factory.mktemp("deep") / "toy", "llama", head_dim=16, **shape)
    found = kv.survey(mlx_lm.load(str(path))[0])
    assert found.widest == ONE
    return found


class Waits:
    """Counts the evaluations, each of which waits for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        self._eval = mx.eval
        monkeypatch.setattr(mx, "eval", self.evaluate)

    def evaluate(self, *arrays: Any) -> None:
        self.count += 1
        self._eval(*arrays)

    def during(self, action: Callable[[], object]) -> int:
        before = self.count
        action()
        return self.count - before


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


def filled(layout: kv.Layout, copy_bytes: int, *, capacity: int = LENGTH) -> Lineage:
    line = Lineage(layout, copy_bytes)
    line.grow(capacity)
    tail = [
        [mx.random.normal((1, heads, LENGTH, dim)).astype(dtype) for heads, dim, dtype in spec]
        for spec in layout.specs
    ]
    mx.eval(tail)
    line.append(tail, LENGTH)
    return line


def content(line: Lineage) -> list[Any]:
    return [
        np.array(line.view(i, j, line.base, line.length))
        for i, spec in enumerate(line.layout.specs)
        for j in range(len(spec))
    ]


def same(line: Lineage, expected: list[Any], start: int = 0, end: int = LENGTH) -> bool:
    return all(
        np.array_equal(mine, theirs[:, :, start:end])
        for mine, theirs in zip(content(line), expected, strict=True)
    )


def test_growing_copying_and_appending_wait_for_few_evaluations(
    layout: kv.Layout, waits: Waits
) -> None:
    line = filled(layout, 1 << 30)
    expected = content(line)
    assert waits.during(lambda: line.grow(300)) == 1
    assert same(line, expected)
    twin = Lineage(layout, 1 << 30)
    assert waits.during(lambda: twin.fill([(line, 0, 40)], 200)) == 1
    assert waits.during(lambda: twin.append_span((line, 40, LENGTH))) == 1
    assert same(twin, expected)
    assert waits.during(lambda: line.compact(20, 70)) == 1
    assert same(line, expected, 20, 70)
    assert waits.during(lambda: twin.detach(10, 60)) == 1


def test_a_growth_that_fails_half_way_leaves_the_buffers_as_they_were(
    layout: kv.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = filled(layout, 8 * ONE * LENGTH)
    expected = content(line)
    calls = iter(range(ARRAYS))

    def fail_late(parts: list[mx.array]) -> mx.array:
        if next(calls) == ARRAYS // 2:
            raise MemoryError
        return arrays.joined(parts)

    monkeypatch.setattr(lineage, "joined", fail_late)
    with pytest.raises(MemoryError):
        line.grow(300)
    assert {a.shape[2] for slot in line.linear for a in kv.arrays_of(slot)} == {LENGTH}
    assert same(line, expected)


def test_the_lineages_of_a_cache_copy_as_much_at_once_as_it_was_given(layout: kv.Layout) -> None:
    cache = KVCache.open(layout, Budget(1 << 30), copy_bytes=12345)
    lease = cache.acquire(token_ids(range(50)), 10)
    assert lease is not None
    lease.lineage.advance(50)
    assert lease.lineage.copy_bytes == lease.lineage.detach(10, 20).copy_bytes == 12345
    cache.release(lease)


def test_a_copy_for_the_disk_and_its_restore_wait_for_few_evaluations(
    layout: kv.Layout, waits: Waits, tmp_path: Path
) -> None:
    line = filled(layout, 1 << 30)
    expected = content(line)
    out = memoryview(bytearray(serialise.run_bytes(layout, LENGTH)))
    spans = [(line, 0, 40), (line, 40, LENGTH)]
    assert waits.during(lambda: serialise.copied_run(layout, spans, out)) == 1
    tensors = serialise.copied_run(layout, spans, out)
    path = save(tmp_path / "run", tensors)
    again = Lineage(layout, 1 << 30)
    again.grow(LENGTH)
    run = serialise.load_run(path, layout, mx.cpu)
    rows = serialise.row_major(run, 0, LENGTH)
    assert waits.during(lambda: again.append(rows, LENGTH)) == 1
    assert same(again, expected)


def test_the_arrays_of_a_checkpoint_are_waited_for_once(waits: Waits) -> None:
    arrays = [(f"state.{i}", mx.full((4, 4), i, mx.bfloat16)) for i in range(64)]
    mx.eval([array for _, array in arrays])
    assert waits.during(lambda: serialise.to_tensors(arrays)) == 1
    assert [t.data.nbytes for t in serialise.to_tensors(arrays)] == [32] * 64


@pytest.mark.parametrize("arrays", [0, 1, 4, 10, 200])
def test_what_is_evaluated_at_once_is_bounded_by_bytes(
    layout: kv.Layout, waits: Waits, arrays: int
) -> None:
    copied = 412 + 512 - LENGTH  # of each array: the buffer before, and the zeros behind its end
    line = filled(layout, arrays * ONE * copied, capacity=412)
    per_wait = max(1, min(arrays, ARRAYS))
    assert waits.during(lambda: line.grow(512)) == -(-ARRAYS // per_wait)
    layers = max(1, min(arrays // 2, LAYERS))
    tail = [[mx.ones((1, h, 512 - LENGTH, d), t) for h, d, t in spec] for spec in layout.specs]
    waited = waits.during(lambda: line.append(tail, 512 - LENGTH, held=copied))
    assert waited == -(-LAYERS // layers)


@pytest.mark.parametrize("arrays", [0, 8])
def test_the_peak_of_growing_and_restoring_is_what_was_given(
    layout: kv.Layout, arrays: int, tmp_path: Path
) -> None:
    """Above the result, in bytes: `copy_bytes`, or one array."""
    length = 8192
    one = length * ONE
    line = Lineage(layout, arrays * one)
    line.grow(length)
    line.append([[mx.ones((1, 2, 1, 16))] * 2] * LAYERS, 1)
    line.truncate(length)
    allowed = max(arrays, 1) * one + one // 4
    assert _above(line, lambda: line.grow(length + 64)) <= allowed
    out = memoryview(bytearray(serialise.run_bytes(layout, length)))
    path = save(tmp_path / "run", serialise.copied_run(layout, [(line, 0, length)], out))
    line.truncate(0)
    run = serialise.load_run(path, layout, mx.cpu)

    def restore() -> None:
        slots = (serialise.row_major([run.pop(0)], 0, length)[0] for _ in range(LAYERS))
        line.append(slots, length)

    assert _above(line, restore) <= max(2, arrays) * one + one // 4  # a layer has two arrays


def _above(line: Lineage, action: Callable[[], object]) -> int:
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory() - line.nbytes
    mx.reset_peak_memory()
    action()
    return mx.get_peak_memory() - before - line.nbytes


def test_where_buffers_are_is_read_with_one_wait(
    layout: kv.Layout, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "defers_errors", lambda: True)
    line = filled(layout, 0)
    line.note_pass()
    assert waits.during(line.mark_confirmed) == 1
    assert line.survives_failure()
