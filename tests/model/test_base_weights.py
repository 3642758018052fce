"""Adapters over one base in memory: each computes what it does alone; the base is there once."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxcache.errors import ModelError
from mlxcache.model.load import Loaded, ModelSpec, load
from mlxcache.model.weights import Bases, BaseUse, Pace, Weights
from tests.conftest import ToyMaker
from tests.scheduling.drafts import make_draft
from tests.toys.adapter import convert, make_adapter

IDS = [[5, 17, 300, 21, 99, 4]]
SLACK = 100_000
"""Bytes of a model besides its parameters: tables of rotations, empty arrays."""


def active() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def logits(loaded: Loaded) -> mx.array:
    model = loaded.model if loaded.draft is None else loaded.model.model
    found: mx.array = model(mx.array(IDS)).astype(mx.float32)
    mx.eval(found)
    return found


def read(file: Path) -> dict[str, mx.array]:
    found = mx.load(str(file))
    assert isinstance(found, dict)
    return found


def sizes(loaded: Loaded) -> int:
    return sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))


class Shelf:
    """Models by name that share bases, each loaded at its first use.

    `alone` and `nbytes`: the logits and the size of each when it is loaded by itself.
    """

    def __init__(self, **specs: ModelSpec):
        self.before = active()
        self.specs = specs
        self.bases = Bases()
        self.models: dict[str, tuple[Loaded, Weights]] = {}
        self.alone: dict[str, np.ndarray] = {}
        self.nbytes: dict[str, int] = {}
        for name, spec in specs.items():
            loaded = load(spec)
            self.alone[name], self.nbytes[name] = np.array(logits(loaded)), sizes(loaded)
            del loaded

    def load(self, name: str) -> None:
        if name not in self.models:
            use = BaseUse(self.bases, name)
            loaded = load(self.specs[name], use=use)
            self.models[name] = loaded, Weights(loaded, self.specs[name], use)
        elif not self.weights(name).resident:
            list(self.weights(name).read(Pace(1 << 18, 1 << 18)))

    def weights(self, name: str) -> Weights:
        return self.models[name][1]

    @property
    def resident(self) -> set[str]:
        return {name for name, (_, weights) in self.models.items() if weights.resident}

    @property
    def held(self) -> int:
        return active() - self.before

    def check(self) -> None:
        for name in self.resident:
            loaded, weights = self.models[name]
            assert np.array_equal(np.array(logits(loaded)), self.alone[name]), name
            assert weights.nbytes == self.nbytes[name]
        base = max((self.weights(n).use.held_bytes for n in self.resident), default=0)
        own = sum(self.nbytes[n] - self.weights(n).use.held_bytes for n in self.resident)
        assert abs(self.held - base - own) < SLACK * len(self.models)
        assert sum(self.bases.charges().values()) == base


@pytest.fixture(scope="module")
def base(toy: ToyMaker) -> Path:
    return toy("llama", intermediate=2000)


@pytest.mark.parametrize(
    ("dtype", "kind", "steps"),
    [
        ("4", "lora", 4),
        *(
            pytest.param(dtype, kind, 20, marks=pytest.mark.slow)
            for dtype in ("float32", "bf16", "4")
            for kind in ("lora", "dora")
        ),
    ],
)
def test_in_any_order_each_is_itself_and_the_base_is_in_memory_once(
    base: Path, tmp_path: Path, dtype: str, kind: str, steps: int
) -> None:
    folder = base if dtype == "float32" else convert(base, tmp_path / "base", dtype)
    adapters = {
        name: make_adapter(folder, tmp_path / name, kind, seed)
        for seed, name in enumerate(("coder", "writer"))
    }
    shelf = Shelf(
        base=ModelSpec(str(folder)),
        **{name: ModelSpec(str(folder), adapter=str(path)) for name, path in adapters.items()},
    )
    assert not np.array_equal(shelf.alone["coder"], shelf.alone["writer"])
    assert not np.array_equal(shelf.alone["coder"], shelf.alone["base"])
    rng = np.random.default_rng(len(dtype) + len(kind))
    for name in rng.permutation(list(shelf.specs)):
        shelf.load(str(name))
        shelf.check()
    assert shelf.held < 1.2 * shelf.nbytes["base"] + 3 * SLACK
    for _ in range(steps):
        name = str(rng.choice(list(shelf.specs)))
        if name in shelf.resident:
            shelf.weights(name).drop()
        else:
            shelf.load(name)
        shelf.check()
    for name in shelf.resident:
        shelf.weights(name).drop()
    assert shelf.held < 3 * SLACK
    assert shelf.bases.charges() == {}


@pytest.mark.parametrize("first", ["full", pytest.param("base", marks=pytest.mark.slow)])
def test_weights_that_a_fine_tune_replaces_are_its_own(
    base: Path, tmp_path: Path, first: str
) -> None:
    full = make_adapter(base, tmp_path / "full", "full")
    own = sum(array.nbytes for array in read(full / "adapters.safetensors").values())
    shelf = Shelf(base=ModelSpec(str(base)), full=ModelSpec(str(base), adapter=str(full)))
    shelf.load(first)
    assert abs(shelf.held - shelf.nbytes["base"]) < SLACK  # what it replaces is not read
    for name in shelf.specs:
        shelf.load(name)
    assert abs(shelf.held - shelf.nbytes["base"] - own) < 2 * SLACK
    for name in (first, *shelf.specs):
        shelf.weights(name).drop()
        shelf.load(name)
        for other, (loaded, _) in shelf.models.items():
            assert np.array_equal(np.array(logits(loaded)), shelf.alone[other])
    assert abs(shelf.held - shelf.nbytes["base"] - own) < 2 * SLACK
    assert shelf.weights("full").use.shared_bytes == shelf.nbytes["base"] - own


@pytest.mark.slow
def test_adapters_of_experts_share_the_rest(toy: ToyMaker, tmp_path: Path) -> None:
    path = toy("gpt_oss")
    adapter = make_adapter(path, tmp_path / "adapter")
    shelf = Shelf(base=ModelSpec(str(path)), adapted=ModelSpec(str(path), adapter=str(adapter)))
    for name in shelf.specs:
        shelf.load(name)
        shelf.check()
    shelf.weights("base").drop()
    shelf.check()
    shelf.load("base")
    shelf.check()


@pytest.mark.slow
def test_a_draft_model_is_shared_with_the_same_model(base: Path, tmp_path: Path) -> None:
    draft = make_draft(base, tmp_path / "draft", "same")
    shelf = Shelf(
        small=ModelSpec(str(draft)),
        pair=ModelSpec(str(base), draft=str(draft)),
        other=ModelSpec(str(base)),
    )
    for name in shelf.specs:
        shelf.load(name)
    assert abs(shelf.held - shelf.nbytes["pair"]) < 3 * SLACK
    shelf.weights("pair").drop()
    assert abs(shelf.held - shelf.nbytes["pair"]) < 3 * SLACK
    shelf.weights("other").drop()
    assert abs(shelf.held - shelf.nbytes["small"]) < 3 * SLACK


def test_a_base_whose_files_changed_is_another_one(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    spec = ModelSpec(str(folder))
    shelf = Shelf(old=spec, new=spec)
    shelf.load("old")
    file = next(folder.glob("model*.safetensors"))
    weights = read(file)
    mx.eval(weights)
    changed = {name: array * 1.5 for name, array in weights.items()}
    mx.save_safetensors(str(folder / "next.safetensors"), changed, metadata={"format": "mlx"})
    os.replace(folder / "next.safetensors", file)
    del weights, changed
    shelf.load("new")
    now = load(spec)
    assert np.array_equal(np.array(logits(shelf.models["new"][0])), np.array(logits(now)))
    del now
    assert np.array_equal(np.array(logits(shelf.models["old"][0])), shelf.alone["old"])
    assert shelf.held > 1.9 * shelf.nbytes["old"]
    shelf.weights("old").drop()
    with pytest.raises(ModelError, match="has changed"):
        shelf.load("old")
    assert not shelf.weights("old").resident
    assert abs(shelf.held - shelf.nbytes["new"]) < 2 * SLACK


def test_a_load_that_fails_keeps_nothing(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base, tmp_path / "adapter")
    shelf = Shelf(base=ModelSpec(str(base)), adapted=ModelSpec(str(base), adapter=str(adapter)))
    alien = Path(shutil.copytree(adapter, tmp_path / "alien"))
    mx.save_safetensors(str(alien / "adapters.safetensors"), {"x.lora_a": mx.zeros((2, 2))})
    use = BaseUse(shelf.bases, "alien")
    with pytest.raises(ModelError, match="does not fit"):
        load(ModelSpec(str(base), adapter=str(alien)), use=use)
    use.release()
    assert shelf.held < SLACK
    shelf.load("adapted")
    shelf.weights("adapted").drop()
    (adapter / "adapters.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="has changed"):
        shelf.load("adapted")
    assert shelf.held < 2 * SLACK
    assert shelf.bases.charges() == {}
    shelf.load("base")
    shelf.check()
