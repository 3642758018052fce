"""Adapters of toy models with random weights, and toys with fewer bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, quantize_model, save_model

LAYERS = 2
"""Newest layers of the base that an adapter changes."""


def make_adapter(base: Path, folder: Path, kind: str = "lora", seed: int = 1) -> Path:
    """Write an adapter over the model in `base`, and return its folder.

    `kind`: "lora", "dora", or "full" for new weights of whole layers.
    """
    folder.mkdir(parents=True)
    lora = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    config = {"fine_tune_type": kind, "num_layers": LAYERS, "lora_parameters": lora}
    model, _ = load_model(base, lazy=True)
    count = len(model.layers)
    if kind != "full":
        linear_to_lora_layers(model, LAYERS, lora, use_dora=kind == "dora")
    mx.random.seed(seed)
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        leaf = name.rsplit(".", 1)[-1]
        if kind == "full" and f"layers.{count - 1}.mlp" in name:
            weights[name] = array + 0.1 * mx.random.normal(array.shape).astype(array.dtype)
        elif leaf in ("lora_a", "lora_b"):
            weights[name] = 0.1 * mx.random.normal(array.shape)
        elif leaf == "m":
            weights[name] = array
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def convert(base: Path, folder: Path, to: str) -> Path:
    """Write the model in `base` to `folder` as "bf16" or with "4" or "8" bits; return `folder`.

    "half": as "bf16", but experts with 8 bits, because MLX computes no others in bfloat16 on a CPU.
    """
    model, config = load_model(base)
    if to == "bf16":
        model.set_dtype(mx.bfloat16)
    elif to == "half":
        model.set_dtype(mx.bfloat16)
        if any(isinstance(one, SwitchLinear) for one in model.modules()):
            model, config = quantize_model(
                model, config, 32, 8, quant_predicate=lambda _, one: isinstance(one, SwitchLinear)
            )
    else:
        model, config = quantize_model(model, config, 32, int(to))
    shutil.copytree(base, folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
