"""The random weights of a toy: each token it says depends on hundreds before it."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlxcache.model.backend import choose_backend

LOGIT_SPREAD = 3.0
GAINS = {"lm_head": LOGIT_SPREAD, "o_proj": 3.0, "out_proj": 3.0, "down_proj": 2.0}
"""The spread of each projection's output for inputs of spread 1; 1.3 for those not named."""
NORMS = dict.fromkeys(("q_norm", "k_norm", "q_layernorm", "k_layernorm"), 1.3)
"""Mean factor of each norm; 1 for those not named."""
UNSCALED = ("gemma4",)
"""Families whose scores are not divided by the root of a head's width: norms do it instead."""
FROM_ONE = ("gemma3_text", "recurrent_gemma")
"""Families whose norms multiply by one plus their weight."""
WIDE_INPUT = ("gemma3_text", "gemma4", "recurrent_gemma")
"""Families that multiply their embeddings by the root of their width."""
FEW_SEE_ALL = ("llama4",)
"""Families of which each fourth layer alone sees the whole context: it must say more."""
RANGES = {
    "A_log": (-7.0, -3.5),
    "recurrent_param": (-8.0, -5.0),
    "w_lora.lora.2.bias": (-7.0, -4.0),
    "a_lora.lora.2.bias": (-4.0, -2.0),
    **{f"attn.x_{one}": (0.0, 1.0) for one in "rwkvag"},
    "ffn.x_k": (0.0, 1.0),
    "attn.k_k": (0.9, 1.1),
}
"""Ranges of uniform draws, by the end of the parameter's name. Decay is slow, so that a state
remembers hundreds of tokens."""


def random_model(config: dict[str, Any], seed: int, *, images: bool = False) -> nn.Module:
    """The family's model, its weights drawn from `seed` alone; with `images`, its vision tower."""
    model = _made(config, images)
    found = sorted(tree_flatten(model.parameters()))
    parameters = [(name, value) for name, value in found if mx.issubdtype(value.dtype, mx.floating)]
    tied = not any(name.endswith("lm_head.weight") for name, _ in parameters)
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    drawn = []
    for (name, value), key in zip(parameters, keys, strict=True):
        new = _fitted(config["model_type"], name, draw(name, value, key))
        if tied and name.endswith("embed_tokens.weight"):
            new = new * (LOGIT_SPREAD / math.sqrt(value.shape[-1]))
        drawn.append((name, new))
    model.load_weights(drawn, strict=len(drawn) == len(found))
    return model


def _made(config: dict[str, Any], images: bool) -> nn.Module:
    if choose_backend(config, "a toy", images=images) == "mlx-vlm":
        from mlxcache.model.vlm import make_model

        return make_model(config, images=images)
    model_class, args_class = _get_classes(config)
    return model_class(args_class.from_dict(config))


def _fitted(family: str, name: str, new: mx.array) -> mx.array:
    """One parameter's values as its family uses them."""
    if family in FROM_ONE and "norm" in name:
        # one of Gemma 3's follows the attention
        return new - (0.0 if "post_attention" in name else 1.0)
    if family in WIDE_INPUT and name.endswith("embed_tokens.weight"):
        return new / math.sqrt(new.shape[-1])
    if family in FEW_SEE_ALL and name.endswith("layers.3.self_attn.o_proj.weight"):
        return new * 3.0
    if family in UNSCALED and name.endswith(("q_norm.weight", "k_norm.weight")):
        return new * (1.3 / math.sqrt(math.sqrt(new.shape[-1])) / NORMS["q_norm"])
    return new


def draw(name: str, value: mx.array, key: mx.array) -> mx.array:
    """One parameter's random values.

    Attention scores get a standard deviation near 1.7: enough that some positions weigh much more
    than others, little enough that hundreds of them count.
    """
    for end, (low, high) in RANGES.items():
        if name.endswith(end):
            return mx.random.uniform(low, high, value.shape, key=key)
    noise = mx.random.normal(value.shape, key=key)
    owner, leaf = (*name.split("."), "")[-3:-1]
    if "norm" in owner and leaf != "bias":
        return NORMS.get(owner, 1.0) + 0.1 * noise
    if value.ndim == 1:  # mlx draws new biases itself, and not from this seed
        return (0.0 if leaf == "bias" else value) + 0.1 * noise
    if owner in ("embed_tokens", "embeddings"):
        return noise
    if value.ndim == 5:  # a vision tower's patches
        return noise / math.sqrt(math.prod(value.shape[1:]))
    fan_in = value.shape[1] if owner in ("conv1d", "conv_1d", "conv") else value.shape[-1]
    return noise * (GAINS.get(owner, 1.3) / math.sqrt(fan_in))
