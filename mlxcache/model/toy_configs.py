"""The config.json of a tiny model for each family that mlx-lm runs, by kind of cache.

Names of fields are those of the families' own configurations, as mlx-lm's model modules read them.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxcache.model import toy_recurrent, toy_sliceable, toy_windows
from mlxcache.model.toy_shape import Config, Shape

Family = Callable[[Shape], Config]

SLICEABLE: dict[str, Family] = {
    "llama": toy_sliceable.llama,
    "qwen3": toy_sliceable.qwen3,
    "qwen3_moe": toy_sliceable.qwen3_moe,
    "glm4_moe": toy_sliceable.glm4_moe,
    "minimax": toy_sliceable.minimax,
    "mistral3": toy_sliceable.mistral3,
    "deepseek_v3": toy_sliceable.deepseek_v3,
    "deepseek_v32": toy_sliceable.deepseek_v32,
    "glm_moe_dsa": toy_sliceable.glm_moe_dsa,
}
"""Any position can be cut out of every layer."""

WINDOWS: dict[str, Family] = {
    "gemma3": toy_windows.gemma3,
    "gemma4": toy_windows.gemma4,
    "gpt_oss": toy_windows.gpt_oss,
    "ministral3": toy_windows.ministral3,
    "cohere2": toy_windows.cohere2,
    "olmo3": toy_windows.olmo3,
}
"""Half the layers see a sliding window."""

CHUNKED: dict[str, Family] = {"llama4": toy_windows.llama4}
"""Some layers see a chunk, which cannot be batched."""

RECURRENT: dict[str, Family] = {
    "qwen3_5": toy_recurrent.qwen3_5,
    "qwen3_next": toy_recurrent.qwen3_next,
    "kimi_linear": toy_recurrent.kimi_linear,
    "mamba": toy_recurrent.mamba,
    "mamba2": toy_recurrent.mamba2,
    "jamba": toy_recurrent.jamba,
    "nemotron_h": toy_recurrent.nemotron_h,
    "falcon_h1": toy_recurrent.falcon_h1,
    "granitemoehybrid": toy_recurrent.granitemoehybrid,
    "lfm2": toy_recurrent.lfm2,
    "lfm2_moe": toy_recurrent.lfm2_moe,
    "rwkv7": toy_recurrent.rwkv7,
    "recurrent_gemma": toy_recurrent.recurrent_gemma,
}
"""Some or all layers keep a state that stands for one position."""

FAMILIES: dict[str, Family] = SLICEABLE | WINDOWS | CHUNKED | RECURRENT
"""What `make_toy` can make: the family's name, and its config for a shape."""
