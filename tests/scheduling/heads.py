"""Toys with heads for multi-token prediction, and heads that are right as often as is wanted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache

from mlxcache.model import kv
from mlxcache.model.heads import Heads, HeadsDraft, KnownRows, WithHeads
from mlxcache.model.kv import Caches
from mlxcache.model.load import Loaded, ModelSpec, load
from tests.scheduled import Bench
from tests.toys.weights import draw


def head_weights(target: Path) -> dict[str, mx.array]:
    """Random weights of heads for the toy at `target`, by their names in `Heads`."""
    model: Any = load(ModelSpec(str(target), images=False), lazy=True).model
    found = sorted(tree_flatten(Heads(model.language_model.args).parameters()))
    return {name: draw(name, value, mx.random.key(n)) for n, (name, value) in enumerate(found)}


def add_heads(target: Path, path: Path, weights: dict[str, mx.array] | None = None) -> Path:
    """Copy the toy at `target` to `path`, with heads of these weights in its own files."""
    shutil.copytree(target, path)
    weights = head_weights(target) if weights is None else weights
    own = {f"mtp.{name}": array for name, array in weights.items()}
    mx.save_safetensors(str(path / "model-mtp.safetensors"), own, metadata={"format": "mlx"})
    return path


def apart(target: Path, path: Path, weights: dict[str, mx.array]) -> Path:
    """A folder of heads for the toy at `target`, as mlx-vlm writes it."""
    path.mkdir()
    for file in target.glob("*token*"):
        shutil.copy(file, path)
    config = json.loads((target / "config.json").read_text())
    made = {"model_type": "qwen3_5_mtp", "text_config": config["text_config"]}
    (path / "config.json").write_text(json.dumps(made))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def with_heads(path: Path) -> Loaded:
    return load(ModelSpec(str(path), heads=True, images=False))


def drafted(path: Path) -> Bench:
    """A bench whose replies check what the model's heads draft."""
    return Bench(path, loaded=with_heads(path))


def oracle(wrong: float) -> Callable[..., HeadsDraft]:
    """Return drafts that are fed to the heads, but drawn from the model's own logits.

    `wrong`: the share of tokens that are drawn from noise.
    """
    keys = iter(mx.random.split(mx.random.key(3), 10_000))

    class Knowing(HeadsDraft):
        def __init__(self, model: WithHeads, cache: Caches, known: KnownRows):
            super().__init__(model, cache, known)
            self.caches = [_twin(slot) for slot in cache[:-2]]

        def feed(self, token: mx.array) -> mx.array:
            super().feed(token)
            logits: mx.array = self._model.model(token[None], cache=self.caches)[:, -1, :]
            noise = mx.random.normal(logits.shape, key=next(keys))
            return mx.where(mx.random.uniform(key=next(keys)) < wrong, noise, logits)

    return Knowing


def _twin(slot: Any) -> Any:
    if isinstance(slot, ArraysCache):
        twin = ArraysCache(len(slot.cache))
        twin.cache = list(slot.cache)
        return twin
    kept = KVCache()
    kept.keys, kept.values = (array[..., : slot.offset, :] + 0 for array in kv.arrays_of(slot))
    kept.offset = slot.offset
    return kept
