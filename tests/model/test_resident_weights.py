"""Weights that are dropped from memory and read back: the same model, and no byte left."""

from __future__ import annotations

import gc
import shutil
from io import StringIO
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from mlxcache.errors import ModelError
from mlxcache.model.load import ModelSpec, load
from mlxcache.model.weights import Pace, Weights, split
from tests.conftest import ToyMaker
from tests.scheduling.drafts import make_draft
from tests.toys.configs import FAMILIES

IDS = [[5, 17, 300, 21, 99, 4]]


def opened(path: Path, **options: str) -> tuple[Weights, object]:
    spec = ModelSpec(str(path), **options)  # type: ignore[arg-type]
    loaded = load(spec)
    return Weights(loaded, spec), loaded.model


def logits(model: object) -> mx.array:
    found: mx.array = model(mx.array(IDS))  # type: ignore[operator]
    mx.eval(found)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_is_there_again(toy: ToyMaker, family: str) -> None:
    gc.collect()
    before = mx.get_active_memory()
    weights, model = opened(toy(family))
    assert weights.resident
    first = logits(model)
    held = mx.get_active_memory()
    for _ in range(2):
        weights.drop()
        assert not weights.resident
        assert held - mx.get_active_memory() > 0.9 * weights.nbytes
        parts = list(weights.read(Pace(size := weights.nbytes // 5, size)))
        assert len(parts) > 2
        assert parts[-1] == weights.nbytes
        assert weights.resident
        assert mx.array_equal(logits(model), first)
        assert mx.get_active_memory() <= held + 1024  # a few scalars come and go
    weights.drop()
    assert mx.get_active_memory() - before < 0.1 * weights.nbytes + (1 << 20)


def test_reading_leaves_no_graph_of_initial_values_behind(toy: ToyMaker) -> None:
    """Layers draw initial values that nobody evaluates; MLX's random state refers to the draws."""
    weights, _ = opened(toy("llama"))

    def graph() -> int:
        text, state = StringIO(), cast(list[mx.array], mx.random.state)
        mx.export_to_dot(text, state[0])
        return len(text.getvalue())

    empty = StringIO()
    mx.export_to_dot(empty, mx.array(0))
    for _ in range(2):
        weights.drop()
        list(weights.read())
        assert graph() <= len(empty.getvalue()) + 8


def test_a_draft_is_read_back_too(toy: ToyMaker, tmp_path: Path) -> None:
    draft = make_draft(toy("llama"), tmp_path / "draft", "same")
    spec = ModelSpec(str(toy("llama")), draft=str(draft))
    loaded = load(spec)
    weights = Weights(loaded, spec)
    first = logits(loaded.model.draft)
    weights.drop()
    list(weights.read())
    assert mx.array_equal(logits(loaded.model.draft), first)


def test_files_that_changed_are_refused(toy: ToyMaker, tmp_path: Path) -> None:
    """The KV in the cache belongs to the weights that were there first."""
    folder = Path(shutil.copytree(toy("llama"), tmp_path / "model"))
    weights, _ = opened(folder)
    weights.drop()
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ModelError, match=r"config\.json .* has changed"):
        list(weights.read())
    assert not weights.resident
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match=r"config\.json .* cannot be read"):
        list(weights.read())


def test_parts_hold_every_array_once() -> None:
    arrays = [mx.zeros((n,)) for n in (1, 2, 300, 4, 5, 600)]
    parts = list(split(arrays, Pace(1000, 1000)))
    assert [id(a) for part in parts for a in part] == [id(a) for a in arrays]
    assert all(sum(a.nbytes for a in part) >= 1000 for part in parts[:-1])
    assert list(split([], Pace())) == []


def test_as_much_is_read_at_once_as_takes_a_quarter_of_a_second() -> None:
    pace = Pace(1000, 50_000)
    assert pace.nbytes == 1000
    for seconds, then in ((0.1, 2500), (0.001, 50_000), (10.0, 1000)):
        pace.note(1000, seconds)
        assert pace.nbytes == then


def test_weights_of_a_lazy_model_are_read_the_first_time(toy: ToyMaker) -> None:
    spec = ModelSpec(str(toy("llama")))
    first = logits(load(spec).model)
    gc.collect()
    before = mx.get_active_memory()
    loaded = load(spec, lazy=True)
    weights = Weights(loaded, spec, resident=False)
    assert not weights.resident
    assert mx.get_active_memory() - before < 0.1 * weights.nbytes
    assert list(weights.read(Pace(size := weights.nbytes // 5, size)))[-1] == weights.nbytes
    assert weights.resident
    assert mx.get_active_memory() - before >= weights.nbytes
    assert mx.array_equal(logits(loaded.model), first)
