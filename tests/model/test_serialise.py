"""Arrays are restored from files bit for bit, and files of another shape are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlxcache.errors import Corrupt
from mlxcache.model import kv
from mlxcache.model import serialise as wire
from mlxcache.model.lineage import Lineage
from mlxcache.safetensors import Tensor
from tests.conftest import ToyMaker
from tests.kinds import CACHE_KINDS

STREAM = mx.Device(mx.cpu)
"""Files are read by the CPU: MLX has no `Load` on Metal."""


def save(path: Path, tensors: Iterable[Tensor]) -> Path:
    arrays = {}
    for t in tensors:
        raw = mx.array(np.frombuffer(t.data, np.uint8).copy())
        arrays[t.name] = raw.view(wire.DTYPES[t.dtype]).reshape(t.shape)
    path = path.with_suffix(".safetensors")  # mx.save_safetensors would add it
    mx.save_safetensors(str(path), arrays)
    return path


def run_of(lineage: Lineage, start: int, end: int) -> list[Tensor]:
    out = memoryview(bytearray(wire.run_bytes(lineage.layout, end - start)))
    return wire.copied_run(lineage.layout, [(lineage, start, end)], out)


def fed(toy: Path, tokens: int) -> Lineage:
    model = mlx_lm.load(str(toy))[0]
    lineage = Lineage(kv.survey(model))
    ids = mx.random.randint(0, 200, (1, tokens), key=mx.random.key(3))
    model(ids, cache=lineage.caches)
    kv.eval_states(lineage.caches)
    lineage.length = tokens
    return lineage


def same(a: Any, b: Any) -> bool:
    if isinstance(a, mx.array):
        return isinstance(b, mx.array) and a.dtype == b.dtype and bool(mx.array_equal(a, b))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("family", CACHE_KINDS)
def test_runs_and_states_come_back_as_they_were(toy: ToyMaker, family: str, tmp_path: Path) -> None:
    lineage = fed(toy(family), 150)
    layout = lineage.layout
    if layout.specs:
        tensors = run_of(lineage, 64, 150)
        assert {t.name: (t.dtype, t.shape[1:]) for t in tensors} == wire.run_spec(layout)
        assert all(t.shape[0] == 86 for t in tensors)
        run = wire.load_run(save(tmp_path / "run", tensors), layout, STREAM)
        for i, slot in enumerate(wire.row_major(run, 10, 86)):
            for j, array in enumerate(slot):
                assert mx.array_equal(array, lineage.view(i, j, 74, 150))
    state = lineage.capture()
    path = save(tmp_path / "state", wire.state_tensors(state))
    assert same(wire.load_state(path, layout, STREAM), state)


@pytest.mark.parametrize("dtype", wire.DTYPES.values())
def test_every_dtype_comes_back(dtype: mx.Dtype, tmp_path: Path) -> None:
    array = mx.array([[0, 1, 1], [0, 0, 1]]).astype(dtype)
    empty = mx.zeros((0, 3), dtype)
    mx.eval(array, empty)
    tensors = wire.to_tensors([("full", array), ("empty", empty)])
    assert [t.data.nbytes for t in tensors] == [6 * dtype.size, 0]
    found = mx.load(str(save(tmp_path / "x", tensors)), format="safetensors")
    assert isinstance(found, dict)
    assert found["full"].dtype == dtype
    assert mx.array_equal(found["full"], array)
    assert found["empty"].shape == (0, 3)


def test_a_tensor_shares_the_buffer_of_its_array() -> None:
    before = mx.get_active_memory()
    array = mx.ones((1 << 20,), mx.bfloat16)
    mx.eval(array)
    (tensor,) = wire.to_tensors([("a", array)])
    assert mx.get_active_memory() - before < array.nbytes * 1.5
    assert tensor.data.nbytes == array.nbytes


def test_what_is_not_contiguous_is_not_written_scrambled() -> None:
    array = mx.arange(12).reshape(3, 4).T
    mx.eval(array)
    with pytest.raises(ValueError, match="not row-contiguous"):
        wire.to_tensors([("a", array)])


def test_a_state_of_other_things_has_no_file() -> None:
    with pytest.raises(ValueError, match="str"):
        wire.state_tensors(("text",))
    with pytest.raises(ValueError, match="complex64"):
        wire.state_tensors((mx.zeros(2, mx.complex64),))


def damaged_run(tensors: list[Tensor], how: str) -> list[Tensor]:
    first, *rest = tensors
    heads, dim = first.shape[1:]
    n = first.shape[0]
    return {
        "lacks one": rest,
        "one more": [*tensors, replace(first, name="kv.99.0")],
        "dtype": [replace(first, dtype="I32"), *rest],
        "heads": [replace(first, shape=(n, heads * 2, dim // 2)), *rest],
        "flat": [replace(first, shape=(n * heads * dim,)), *rest],
        "fewer": [
            replace(first, shape=(n // 2, heads, dim), data=first.data[: first.data.nbytes // 2]),
            *rest,
        ],
    }[how]


@pytest.mark.parametrize("how", ["lacks one", "one more", "dtype", "heads", "flat", "fewer"])
def test_a_run_of_other_shapes_is_refused(toy_llama: Path, how: str, tmp_path: Path) -> None:
    lineage = fed(toy_llama, 64)
    tensors = run_of(lineage, 0, 64)
    path = save(tmp_path / "run", damaged_run(tensors, how))
    with pytest.raises(Corrupt):
        wire.load_run(path, lineage.layout, STREAM)


SKELETONS = [
    b"",
    b"{",
    b"[",
    b"[]",
    b"null",
    b"[" * 100_000,
    b'[[[{"array":0},{"array":0}],null,null],[[{"array":2},{"array":3}],null,null]]',
    b'[[[{"array":0},{"array":9}],null,null],[[{"array":2},{"array":3}],null,null]]',
    b'[[[{"array":0},{"array":1}],0,null],[[{"array":2},{"array":3}],null,null]]',
    b'[[[{"array":0},{"array":1}],null,null],[[{"array":2},null],null,null]]',
    b'[[[{"array":2},{"array":3}],null],[[{"array":0},{"array":1}],null,null]]',
    b'[[[{"array":1},{"array":0}],null,null],[[{"array":2},{"array":3}],null,null]]',
]


@pytest.mark.parametrize("skeleton", SKELETONS, ids=range(len(SKELETONS)))
def test_a_state_of_another_shape_is_refused(
    toy_qwen3_5: Path, skeleton: bytes, tmp_path: Path
) -> None:
    lineage = fed(toy_qwen3_5, 64)
    first, *rest = wire.state_tensors(lineage.capture())
    other = replace(first, shape=(len(skeleton),), data=memoryview(skeleton))
    path = save(tmp_path / "state", [other, *rest])
    with pytest.raises(Corrupt):
        wire.load_state(path, lineage.layout, STREAM)


@pytest.mark.parametrize(("at", "value"), [(2, 0), (2, 10**9), (3, 1 << 30), (4, -64)])
def test_a_state_whose_numbers_lie_is_refused(
    toy: ToyMaker, at: int, value: int, tmp_path: Path
) -> None:
    lineage = fed(toy("llama4"), 100)
    (slot, *rest) = lineage.capture()
    lying = (*slot[:at], value, *slot[at + 1 :])
    path = save(tmp_path / "state", wire.state_tensors((lying, *rest)))
    with pytest.raises(Corrupt):
        wire.load_state(path, lineage.layout, STREAM)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}"])
def test_a_file_that_is_none_is_refused(toy_llama: Path, content: bytes, tmp_path: Path) -> None:
    lineage = fed(toy_llama, 2)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(Corrupt):
        wire.load_run(tmp_path / "file", lineage.layout, STREAM)
    with pytest.raises(Corrupt):
        wire.load_state(tmp_path / "file", lineage.layout, STREAM)
    with pytest.raises(Corrupt):
        wire.load_run(tmp_path / "none", lineage.layout, STREAM)


def test_equal_layouts_have_equal_keys(toy_llama: Path, toy_gemma3: Path) -> None:
    keys = [wire.layout_key(fed(toy, n).layout) for toy in (toy_llama, toy_gemma3) for n in (2, 9)]
    assert keys[0] == keys[1] != keys[2] == keys[3]
