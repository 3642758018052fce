"""Families whose layers all keep something for every token: keys and values, latents, indices."""

from __future__ import annotations

from tests.toys.shape import Config, Shape, dense, experts, routed_experts


def llama(shape: Shape) -> Config:
    """Plain attention."""
    return dense(shape) | {"model_type": "llama"}


def qwen3(shape: Shape) -> Config:
    """Plain attention with norms on queries and keys."""
    return dense(shape) | {"model_type": "qwen3"}


def qwen3_moe(shape: Shape) -> Config:
    """Plain attention and experts."""
    more = {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []}
    return dense(shape) | experts(shape) | more


def glm4_moe(shape: Shape) -> Config:
    """Plain attention with partly rotated positions, and experts."""
    return (
        dense(shape)
        | routed_experts(shape)
        | {
            "model_type": "glm4_moe",
            "rope_scaling": None,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        }
    )


def minimax(shape: Shape) -> Config:
    """Plain attention with partly rotated positions, and experts chosen by a sigmoid."""
    return dense(shape) | {
        "model_type": "minimax",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 0,
        "rotary_dim": shape.head_dim // 2,
    }


def mistral3(shape: Shape) -> Config:
    """Windows as masks: in this wrapper mlx-lm keeps every token also where few are seen."""
    return {"model_type": "mistral3", "text_config": mistral_windows(shape)}


def mistral_windows(shape: Shape) -> Config:
    """Sliding windows and full attention, whose queries grow with the position."""
    return dense(shape) | {
        "model_type": "ministral3",
        "sliding_window": shape.window,
        "layer_types": shape.turns("sliding_attention", "full_attention"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 2 * shape.window,
        },
    }


def _latent(shape: Shape) -> Config:
    return {
        "kv_lora_rank": 2 * shape.head_dim,
        "q_lora_rank": 2 * shape.head_dim,
        "qk_rope_head_dim": shape.head_dim,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
    }


def deepseek_v3(shape: Shape) -> Config:
    """One latent per token instead of keys and values."""
    return dense(shape) | routed_experts(shape) | _latent(shape) | {"model_type": "deepseek_v3"}


def deepseek_v32(shape: Shape) -> Config:
    """A latent per token, and an index by which each token chooses those it sees."""
    return deepseek_v3(shape) | {
        "model_type": "deepseek_v32",
        "index_head_dim": shape.head_dim,
        "index_n_heads": shape.heads,
        "index_topk": 2 * shape.window,
    }


def glm_moe_dsa(shape: Shape) -> Config:
    """DeepSeek V3.2 by another name, with interleaved positions."""
    return deepseek_v32(shape) | {
        "model_type": "glm_moe_dsa",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
