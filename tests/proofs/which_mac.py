"""The figures of the page "Which Mac do I need?".

    python -m tests.proofs.which_mac

Plans the same made days of one agent for Macs of several sizes and models, from the models'
configurations. Speeds are assumptions: `Mac` and `Model` have what they are computed from.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from mlxcache.cli.show import format_duration
from mlxcache.config.sizes import memory_for, ram_limit
from mlxcache.errors import ConfigError
from mlxcache.model.examine import examine
from mlxcache.model.kv import Layout
from mlxcache.model.load import ModelSpec
from mlxcache.plan.agents import CONTEXT, agents_trace
from mlxcache.plan.cache import Memory
from mlxcache.plan.plan import Plan, make_plan
from mlxcache.plan.simulate import Speed

GB = 10**9

PREFILL, DECODE = 0.3, 0.4
"""Shares of a chip's arithmetic that prefill reaches, and of its bandwidth that decoding does."""

DISK = 3 * GB
"""Bytes per second restored from an SSD."""

DAYS = 2
"""Days of one agent that are played, each with other draws."""


@dataclass(frozen=True)
class Mac:
    """A Mac with `memory` GB, `bandwidth` in GB/s, and `tflops` of 16-bit arithmetic."""

    name: str
    memory: int
    bandwidth: float
    tflops: float

    @property
    def working_set(self) -> int:
        return int(self.memory * (1 << 30) * (0.67 if self.memory <= 36 else 0.75))


MACS = (
    Mac("M4, 16 GB", 16, 120, 4.3),
    Mac("M4 Pro, 24 GB", 24, 273, 8.6),
    Mac("M4 Pro, 48 GB", 48, 273, 8.6),
    Mac("M4 Max, 64 GB", 64, 546, 18),
    Mac("M3 Ultra, 96 GB", 96, 819, 28),
    Mac("M4 Max, 128 GB", 128, 546, 18),
    Mac("M3 Ultra, 256 GB", 256, 819, 28),
    Mac("M3 Ultra, 512 GB", 512, 819, 28),
)


@dataclass(frozen=True)
class Model:
    """`weights`: GB in 4 bits; `active`: parameters, in billions, that a token is computed with.

    `pairs`: operations of attention for each pair of a token and one before it: four for each
    element of the queries of all layers with full attention.
    """

    name: str
    weights: float
    active: float
    pairs: float
    config: dict[str, Any] = field(hash=False)

    def speed(self, mac: Mac) -> Speed:
        flops = 2 * self.active * 1e9
        read = self.weights * min(1.0, self.active / TOTAL[self.name])
        return Speed(
            prefill=PREFILL * mac.tflops * 1e12 / flops,
            decode=DECODE * mac.bandwidth / read,
            disk=DISK,
            growth=self.pairs / flops,
        )


TOTAL = {
    "Qwen3-Coder-30B-A3B": 30.5,
    "Qwen3.5-35B-A3B": 35.0,
    "gpt-oss-120b": 117.0,
    "gemma-3-27b": 27.4,
    "GLM-4.7-Flash (MLA)": 30.0,
}
"""Parameters of all experts, in billions."""

MODELS = (
    Model(
        "Qwen3-Coder-30B-A3B", 17.2, 3.3, 4 * 48 * 32 * 128,
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
            "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "norm_topk_prob": True, "vocab_size": 151936, "rms_norm_eps": 1e-6,
            "rope_theta": 1e7, "max_position_embeddings": 262144, "tie_word_embeddings": False,
        },
    ),
    Model(
        "Qwen3.5-35B-A3B", 20.0, 3.0, 4 * 10 * 16 * 256,
        {
            "model_type": "qwen3_5_moe",
            "text_config": {
                "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
                "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 2,
                "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
                "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
                "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "vocab_size": 248320,
                "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
                "rope_parameters": {
                    "type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10],
                },
                "tie_word_embeddings": False,
            },
        },
    ),
    Model(
        "gpt-oss-120b", 63.4, 5.1, 4 * 18 * 64 * 64,
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
            "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
            "sliding_window": 128, "vocab_size": 201088, "rms_norm_eps": 1e-5,
            "rope_theta": 150000, "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
            },
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
    ),
    Model(
        "gemma-3-27b", 15.5, 27.4, 4 * 10 * 32 * 128,
        {
            "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62,
            "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16,
            "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6,
            "vocab_size": 262208, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "query_pre_attn_scalar": 168, "max_position_embeddings": 131072,
        },
    ),
    Model(
        "GLM-4.7-Flash (MLA)", 17.0, 3.6, 4 * 47 * 20 * 256,
        {
            "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 47,
            "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_attention_heads": 20,
            "num_key_value_heads": 20, "n_shared_experts": 1, "n_routed_experts": 64,
            "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "kv_lora_rank": 512,
            "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
            "v_head_dim": 256, "first_k_dense_replace": 1, "vocab_size": 154880,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 202752,
        },
    ),
)  # fmt: skip


def layout_of(model: Model) -> tuple[Layout, int]:
    """Return a model's layout in 16 bits, and its context length."""
    with tempfile.TemporaryDirectory() as folder:
        config = model.config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        found = examine(ModelSpec(folder), needs_weights=False)
    return found.layout, min(CONTEXT, found.info.context_length)


def ram_of(model: Model, mac: Mac) -> int | None:
    """Return the bytes of `--ram auto`, None if the weights do not fit beside it."""
    memory, weights = mac.memory * (1 << 30), int(model.weights * GB)
    if memory_for(memory, mac.working_set) - weights < 2 * GB:
        return None
    return ram_limit(
        "auto", machine_bytes=memory, working_set_bytes=mac.working_set, weights_bytes=weights
    )


def plan(
    model: Model, layout: Layout, context: int, mac: Mac, users: int
) -> tuple[Plan, int] | None:
    """Plan days of `users` agents, with the longest context that fits, in steps of 10,000."""
    ram = ram_of(model, mac)
    while ram is not None and context >= 30_000:
        trace = agents_trace(users, context, sessions=3 if users > 1 else 3 * DAYS)
        try:
            memory = Memory(ram, disk=200 * GB)
            speed = model.speed(mac)
            return make_plan(trace, layout, memory, speed, users=users, disk_sizes=False), context
        except ConfigError:
            context = (context - 1) // 10_000 * 10_000
    return None


def rows() -> Iterator[str]:
    layouts = {model.name: layout_of(model) for model in MODELS}
    yield "| Mac | " + " | ".join(model.name for model in MODELS) + " |"
    yield "|---|" + "---|" * len(MODELS)
    for mac in MACS:
        yield (
            f"| {mac.name} | "
            + " | ".join(_cell(one, *layouts[one.name], mac) for one in MODELS)
            + " |"
        )


def _cell(model: Model, layout: Layout, context: int, mac: Mac) -> str:
    found = plan(model, layout, context, mac, 1)
    if found is None:
        return "-"
    made, context = found
    waits = made.waits()
    assert waits is not None
    return (
        f"{format_duration(waits.uncached / DAYS)} → {format_duration(waits.total / DAYS)}; "
        f"{context // 1000}k; {made.users_per_machine() or 0:.0f}"
    )


def ram_rows() -> Iterator[str]:
    """RAM for conversations with which some agents at once reach 95% of the ceiling, in GB."""
    yield "| agents at once | " + " | ".join(model.name for model in MODELS) + " |"
    yield "|---|" + "---|" * len(MODELS)
    layouts = [layout_of(model) for model in MODELS]
    for agents in (1, 2, 4):
        enough = [_enough(*one, agents) for one in layouts]
        yield f"| {agents} | " + " | ".join(f"{(one or 0) / GB:.1f}" for one in enough) + " |"


def _enough(layout: Layout, context: int, agents: int) -> int | None:
    trace, speed = agents_trace(agents, context), Speed(1000, 50)
    return make_plan(trace, layout, Memory(1 << 60), speed, users=agents).ram.enough[1]


if __name__ == "__main__":
    for row in chain(rows(), [""], ram_rows()):
        print(row, flush=True)
