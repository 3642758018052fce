"""Families of which half the layers see a window of the latest tokens, or a chunk."""

from __future__ import annotations

from tests.toys.shape import Config, Shape, dense
from tests.toys.sliceable import mistral_windows


def gemma3(shape: Shape) -> Config:
    """Sliding windows and full attention in turn."""
    return dense(shape) | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": shape.window,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
    }


def gemma4(shape: Shape) -> Config:
    """Heads of two sizes, and later layers that read what the first half has cached."""
    text = dense(shape) | {
        "model_type": "gemma4_text",
        "global_head_dim": 2 * shape.head_dim,
        "num_kv_shared_layers": shape.layers // 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": shape.vocab_size,
        "sliding_window": shape.window,
        "layer_types": shape.turns("sliding_attention", "full_attention"),
    }
    return {"model_type": "gemma4", "vocab_size": shape.vocab_size, "text_config": text}


def gpt_oss(shape: Shape) -> Config:
    """Sliding windows with sinks, and experts."""
    return dense(shape) | {
        "model_type": "gpt_oss",
        "sliding_window": shape.window,
        "layer_types": shape.turns("sliding_attention", "full_attention"),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
    }


def ministral3(shape: Shape) -> Config:
    """Sliding windows and full attention, whose queries grow with the position."""
    return mistral_windows(shape)


def cohere2(shape: Shape) -> Config:
    """Attention beside the MLP, positions in the windows alone, the head tied to the embedding."""
    return dense(shape) | {
        "model_type": "cohere2",
        "head_dim": shape.hidden // shape.heads,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "sliding_window": shape.window,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    }


def olmo3(shape: Shape) -> Config:
    """Sliding windows and full attention, norms after each block."""
    return dense(shape) | {
        "model_type": "olmo3",
        "sliding_window": shape.window,
        "layer_types": shape.turns("sliding_attention", "full_attention"),
    }


def llama4(shape: Shape) -> Config:
    """Attention within chunks and full attention."""
    text = dense(shape) | {
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


def deepseek_v41(shape: Shape) -> Config:
    """A window in every layer; beside it compressed KV, of four tokens a vector or of each.

    Layers share the compressed KV of an earlier one, and a choice of it by an index. Heads are 8
    wider than the shape's: mlx-lm rounds vectors of whole groups of 16 or 32 numbers to 4 or 8
    bits, and then the least difference of a sum can become a large one.
    """
    width = shape.head_dim + 8
    last = shape.layers - 1
    plain = 1 if shape.layers > 2 else 0
    return dense(shape) | {
        "model_type": "deepseek_v41",
        "compress_ratios": [0] * plain + [4] * (last - plain) + [1],
        "kv_source_layer_ids": [plain, last],
        "index_source_layer_ids": [plain, last],
        "candidate_source_layer_id": last,
        "candidate_topk_blocks": shape.window // 2,
        "candidate_block_size": 8,
        "head_dim": width,
        "index_head_dim": width,
        "index_n_heads": shape.heads,
        "index_topk": 2 * shape.window,
        "q_lora_rank": 2 * width,
        "o_lora_rank": 2 * width,
        "o_groups": max(2, shape.heads // 2),
        "qk_rope_head_dim": shape.head_dim,
        "moe_intermediate_size": shape.intermediate // 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": shape.window,
        "hc_mult": 2,
    }
