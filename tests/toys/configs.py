"""The config.json of a tiny model for each family that mlx-lm runs, by kind of cache.

Names of fields are those of the families' own configurations, as mlx-lm's model modules read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.toys import recurrent, sliceable, vlm, windows
from tests.toys.shape import Config, Shape

Family = Callable[[Shape], Config]

SLICEABLE: dict[str, Family] = {
    "llama": sliceable.llama,
    "qwen3": sliceable.qwen3,
    "qwen3_moe": sliceable.qwen3_moe,
    "glm4_moe": sliceable.glm4_moe,
    "minimax": sliceable.minimax,
    "mistral3": sliceable.mistral3,
    "deepseek_v3": sliceable.deepseek_v3,
    "deepseek_v32": sliceable.deepseek_v32,
    "glm_moe_dsa": sliceable.glm_moe_dsa,
}
"""Any position can be cut out of every layer."""

WINDOWS: dict[str, Family] = {
    "gemma3": windows.gemma3,
    "gemma4": windows.gemma4,
    "gpt_oss": windows.gpt_oss,
    "ministral3": windows.ministral3,
    "cohere2": windows.cohere2,
    "olmo3": windows.olmo3,
}
"""Half the layers see a sliding window."""

CHUNKED: dict[str, Family] = {"llama4": windows.llama4}
"""Some layers see a chunk, which cannot be batched."""

COMPRESSED: dict[str, Family] = {"deepseek_v41": windows.deepseek_v41}
"""Layers see a window and compressed KV, which cannot be batched."""

RECURRENT: dict[str, Family] = {
    "qwen3_5": recurrent.qwen3_5,
    "qwen3_next": recurrent.qwen3_next,
    "kimi_linear": recurrent.kimi_linear,
    "mamba": recurrent.mamba,
    "mamba2": recurrent.mamba2,
    "jamba": recurrent.jamba,
    "nemotron_h": recurrent.nemotron_h,
    "falcon_h1": recurrent.falcon_h1,
    "granitemoehybrid": recurrent.granitemoehybrid,
    "lfm2": recurrent.lfm2,
    "lfm2_moe": recurrent.lfm2_moe,
    "rwkv7": recurrent.rwkv7,
    "recurrent_gemma": recurrent.recurrent_gemma,
}
"""Some or all layers keep a state that stands for one position."""

FAMILIES: dict[str, Family] = SLICEABLE | WINDOWS | CHUNKED | COMPRESSED | RECURRENT
"""Families that `make_toy` can make, by name: functions from a shape to a config."""

VLM: dict[str, Family] = {
    "cohere2_moe": vlm.cohere2_moe,
    "glm5_next": vlm.glm5_next,
    "hy_v4": vlm.hy_v4,
    "mimo_v2": vlm.mimo_v2,
    "minimax_m3": vlm.minimax_m3,
    "qwen3_5_moe_text": vlm.qwen3_5_moe_text,
    "qwen3_5_text": vlm.qwen3_5_text,
    "qwen4_exp": vlm.qwen4_exp,
    "step3p7": vlm.step3p7,
}
"""Families that only mlx-vlm has, which `make_toy` can make where it is installed."""

SEEING = tuple(f"{name}+images" for name in vlm.SEEING)
"""Names, for `toy_options`, of the toys that mlx-vlm runs with their images."""


def toy_options(name: str) -> dict[str, Any]:
    """The arguments of `make_toy` for a key of `FAMILIES` or `VLM`, or a name in `SEEING`."""
    family, plus, _ = name.partition("+")
    return {"family": family} | ({"images": True} if plus else {})


UNBATCHED = {
    *CHUNKED,
    *COMPRESSED,
    "glm5_next",
    "minimax_m3",
    "qwen4_exp",
    "qwen4_exp+images",
}
"""Families whose requests are decoded in turn. mlx-vlm's batches of the last four are wrong."""
