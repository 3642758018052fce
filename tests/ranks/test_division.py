"""KV of ranks is joined to that of the whole model, and cut out of it, for each class of cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mlxcache.errors import StoreError, Unsupported
from mlxcache.ranks.division import Part, find_division, packed_state, split_state
from mlxcache.safetensors import Tensor
from mlxcache.store.parts import Mode
from tests.conftest import ToyMaker
from tests.ranks.shards import Shards, values
from tests.ranks.two_stores import some_ids

TOKENS = 70


def check_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """The very same tensors."""
    assert [(t.name, t.dtype, t.shape) for t in some] == [
        (t.name, t.dtype, t.shape) for t in others
    ]
    assert all(a.bytes == b.bytes for a, b in zip(some, others, strict=True))


def check_close(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """The same tensors but for rounding, which parts of layers do in another order."""
    for a, b in zip(some, others, strict=True):
        assert (a.name, a.dtype, a.shape) == (b.name, b.dtype, b.shape)
        np.testing.assert_allclose(values(a), values(b), rtol=1e-3, atol=1e-3)


def check(shards: Shards) -> None:
    """What ranks have is what is cut out of the whole, and together they are the whole."""
    division, whole = shards.division, shards.whole.rows(TOKENS)
    parts = [rank.rows(TOKENS) for rank in shards.ranks]
    joined = []
    for tensor in whole:
        held = division.rows[tensor.name]
        each = [_named(parts[one.rank], one.name).bytes for one in held]
        data = memoryview(division.join_rows(tensor.name, [bytes(data) for data in each]))
        joined.append(Tensor(tensor.name, tensor.dtype, tensor.shape, data))
    check_close(joined, whole)
    states = [rank.state() for rank in shards.ranks]
    state = division.join_states(states)
    check_close(state, shards.whole.state())
    for rank in range(division.size):
        check_same(division.cut_rows(joined, rank), parts[rank])
        check_same(division.cut_states(state, rank), states[rank])


def _named(tensors: Sequence[Tensor], name: str) -> Tensor:
    return next(tensor for tensor in tensors if tensor.name == name)


@pytest.mark.parametrize(
    ("family", "mode", "size"),
    [
        ("llama", "tensor", 2),
        ("llama", "tensor", 4),
        ("gpt_oss", "tensor", 2),
        ("deepseek_v3", "tensor", 2),
        ("qwen3_5", "tensor", 2),
        ("qwen3_5", "pipeline", 2),
        ("deepseek_v32", "tensor", 2),
        ("deepseek_v41", "tensor", 2),
    ],
)
def test_parts_are_joined_and_cut(toy: ToyMaker, family: str, mode: Mode, size: int):
    """KV by heads, windows, MLA, recurrent and convolution states; and layer by layer."""
    layers = 8 if family == "qwen3_5" else 4
    model = toy(family, heads=4, kv_heads=4, layers=layers, intermediate=256)
    check(Shards(model, mode, size, some_ids(TOKENS).tolist()))


def test_states_of_other_classes_are_refused_by_name():
    """As are KV and numbers of slots that do not fit."""
    whole = Part(states=[[("F32", (1, 4, 8)), ("F32", (1, 4, 2, 2))]], classes=["ArraysCache"])
    half = Part(states=[[("F32", (1, 4, 4)), ("F32", (1, 2, 2, 2))]], classes=["ArraysCache"])
    with pytest.raises(Unsupported, match="class ArraysCache of mamba2"):
        find_division(whole, [half, half], "tensor", "mamba2")
    with pytest.raises(Unsupported, match=r"kv\.0\.0 is not divided evenly"):
        find_division(
            Part([("kv.0.0", "F32", 4, 8)]), [Part([("kv.0.0", "F32", 3, 8)])] * 2, "tensor", "x"
        )
    with pytest.raises(Unsupported, match="do not cache what the whole"):
        find_division(whole, [half, half], "pipeline", "qwen3_5")


def test_checkpoints_that_contradict_each_other_are_not_joined(toy: ToyMaker):
    """Nor is one cut that does not have the form of the model."""
    model = toy("qwen3_5", heads=4, kv_heads=4, layers=4, intermediate=256)
    shards = Shards(model, "tensor", 2, some_ids(8).tolist())
    good = shards.ranks[0].state()
    slots = split_state(good)
    with pytest.raises(StoreError, match="different numbers of layers"):
        shards.division.join_states([good, packed_state(slots[1:])])
    with pytest.raises(StoreError, match="other shapes"):
        shards.division.cut_states(good, 0)
    with pytest.raises(StoreError, match="skeleton does not fit"):
        split_state(good[:-1])
