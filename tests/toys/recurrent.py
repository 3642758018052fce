"""Families with layers whose state stands for one position: recurrences and convolutions."""

from __future__ import annotations

from tests.toys.shape import Config, Shape, dense, experts

STATE = 32
"""Size of the states that Metal's kernel steps: its threads take whole groups of 32 of them.

Source: `ssm_update_kernel` of https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/models/ssm.py
"""


def _gated_delta(shape: Shape) -> Config:
    return {
        "linear_num_value_heads": shape.heads,
        "linear_num_key_heads": shape.kv_heads,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
    }


def qwen3_5(shape: Shape) -> Config:
    """Gated delta rule and full attention in turn."""
    rope = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    text = dense(shape) | _gated_delta(shape) | {"rope_parameters": rope}
    return {"model_type": "qwen3_5", "text_config": text | {"model_type": "qwen3_5_text"}}


def qwen3_next(shape: Shape) -> Config:
    """Gated delta rule and full attention in turn, and experts."""
    return (
        dense(shape)
        | _gated_delta(shape)
        | experts(shape)
        | {
            "model_type": "qwen3_next",
            "partial_rotary_factor": 0.5,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": shape.intermediate // 2,
            "mlp_only_layers": [],
        }
    )


def kimi_linear(shape: Shape) -> Config:
    """A delta rule with a gate per channel, latent attention, and experts."""
    return dense(shape) | {
        "model_type": "kimi_linear",
        "linear_attn_config": {
            "kda_layers": list(range(1, shape.layers + 1, 2)),
            "num_heads": shape.heads,
            "head_dim": shape.head_dim,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": shape.context,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": shape.intermediate // 2,
        "kv_lora_rank": 2 * shape.head_dim,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
    }


def mamba(shape: Shape) -> Config:
    """A selective state space, nothing else."""
    return {
        "model_type": "mamba",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.heads * shape.head_dim,
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "use_bcdt_rms": True,
        "time_step_rank": 8,
        "tie_word_embeddings": False,
        "max_position_embeddings": shape.context,
    }


def mamba2(shape: Shape) -> Config:
    """A state space with one decay per head, nothing else."""
    return {
        "model_type": "mamba2",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.heads * shape.head_dim,
        "num_heads": shape.heads,
        "head_dim": shape.head_dim,
        "expand": shape.heads * shape.head_dim // shape.hidden,
        "state_size": STATE,
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


def jamba(shape: Shape) -> Config:
    """Selective state spaces and full attention without positions, and experts."""
    return dense(shape) | {
        "model_type": "jamba",
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }


def nemotron_h(shape: Shape) -> Config:
    """State spaces, attention, MLPs and experts, a layer each; only two kinds have a cache."""
    return dense(shape) | {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "mlp", "attention", "moe"] * (shape.layers // 2),
        "num_hidden_layers": 2 * shape.layers,
        "attention_bias": False,
        "mamba_num_heads": shape.heads,
        "mamba_head_dim": shape.head_dim,
        "mamba_proj_bias": False,
        "ssm_state_size": STATE,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": shape.intermediate,
    }


def falcon_h1(shape: Shape) -> Config:
    """A state space beside attention in every layer."""
    return dense(shape) | {
        "model_type": "falcon_h1",
        "mamba_d_conv": 4,
        "mamba_d_head": shape.head_dim,
        "mamba_d_ssm": shape.heads * shape.head_dim,
        "mamba_d_state": STATE,
        "mamba_n_groups": 1,
        "mamba_n_heads": shape.heads,
        "mamba_rms_norm": True,
    }


def granitemoehybrid(shape: Shape) -> Config:
    """State spaces and full attention in turn, experts beside a shared MLP."""
    return dense(shape) | {
        "model_type": "granitemoehybrid",
        "layer_types": shape.turns("mamba", "attention"),
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": (shape.hidden // shape.heads) ** -0.5,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": shape.intermediate,
        "mamba_n_heads": shape.heads,
        "mamba_d_head": shape.head_dim,
        "mamba_expand": shape.heads * shape.head_dim // shape.hidden,
        "mamba_proj_bias": False,
        "mamba_d_state": STATE,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    }


def lfm2(shape: Shape) -> Config:
    """Short convolutions and full attention in turn, the head tied to the embedding."""
    return dense(shape) | {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 4,
        "block_dim": shape.hidden,
        "block_ff_dim": shape.intermediate,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": shape.turns("conv", "full_attention"),
        "tie_word_embeddings": True,
    }


def lfm2_moe(shape: Shape) -> Config:
    """LFM2 with experts."""
    return (
        dense(shape)
        | experts(shape)
        | {
            "model_type": "lfm2_moe",
            "num_dense_layers": 1,
            "use_expert_bias": True,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 4,
            "layer_types": shape.turns("conv", "full_attention"),
            "tie_word_embeddings": True,
        }
    )


def rwkv7(shape: Shape) -> Config:
    """A delta rule with a decay per channel, nothing else."""
    return {
        "model_type": "rwkv7",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "head_dim": shape.head_dim,
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 8,
        "tie_word_embeddings": False,
        "max_position_embeddings": shape.context,
    }


def recurrent_gemma(shape: Shape) -> Config:
    """Gated linear recurrences and sliding windows in turn."""
    return dense(shape) | {
        "model_type": "recurrent_gemma",
        "attention_bias": False,
        "conv1d_width": 4,
        "intermediate_size": 2 * shape.intermediate,
        "logits_soft_cap": 30.0,
        "attention_window_size": shape.window,
        "block_types": ["recurrent", "attention"],
    }
