"""The config.json of a tiny model for each family that mlx-lm runs.

Names of fields are those of the families' own configurations, as mlx-lm's model modules read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a toy is. `window` counts tokens; it matters to families that have one."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    window: int


Config = dict[str, Any]


def _dense(shape: Shape) -> Config:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
    }


def _llama(shape: Shape) -> Config:
    return _dense(shape) | {"model_type": "llama"}


def _qwen3(shape: Shape) -> Config:
    return _dense(shape) | {"model_type": "qwen3"}


def _gemma3(shape: Shape) -> Config:
    return _dense(shape) | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": shape.window,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
    }


def _gpt_oss(shape: Shape) -> Config:
    return _dense(shape) | {
        "model_type": "gpt_oss",
        "sliding_window": shape.window,
        "layer_types": ["sliding_attention", "full_attention"] * (shape.layers // 2),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _linear_attention(shape: Shape) -> Config:
    return {
        "linear_num_value_heads": shape.heads,
        "linear_num_key_heads": shape.kv_heads,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
    }


def _qwen3_5(shape: Shape) -> Config:
    rope = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    text = _dense(shape) | _linear_attention(shape) | {"rope_parameters": rope}
    return {"model_type": "qwen3_5", "text_config": text | {"model_type": "qwen3_5_text"}}


def _qwen3_next(shape: Shape) -> Config:
    return (
        _dense(shape)
        | _linear_attention(shape)
        | {
            "model_type": "qwen3_next",
            "partial_rotary_factor": 0.5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": shape.intermediate // 2,
            "moe_intermediate_size": shape.intermediate // 2,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    )


def _mamba2(shape: Shape) -> Config:
    return {
        "model_type": "mamba2",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.heads * shape.head_dim,
        "num_heads": shape.heads,
        "head_dim": shape.head_dim,
        "state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": "auto",
        "max_position_embeddings": shape.context,
    }


def _llama4(shape: Shape) -> Config:
    text = _dense(shape) | {
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": shape.window,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": shape.intermediate,
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "rope_scaling": None,
        "use_qk_norm": True,
    }
    return {"model_type": "llama4", "text_config": text}


def _deepseek_v3(shape: Shape) -> Config:
    return _dense(shape) | {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": shape.intermediate // 2,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 2 * shape.head_dim,
        "q_lora_rank": 2 * shape.head_dim,
        "qk_rope_head_dim": shape.head_dim,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
    }


FAMILIES: dict[str, Callable[[Shape], Config]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "qwen3_5": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "mamba2": _mamba2,
    "llama4": _llama4,
    "deepseek_v3": _deepseek_v3,
}
"""What `make_toy` can make: the family's name, and its config for a shape."""
