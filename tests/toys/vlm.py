"""Families that mlx-vlm runs. Their fields are those that its configurations read.

Those of `SEEING` take images; the names of the fields are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.toys.shape import Config, Shape, dense, experts, routed_experts


def _rope(shape: Shape) -> Config:
    """Rotary positions of three axes, on half of a head."""
    half = shape.head_dim // 4
    sections = [half - 2 * (half // 4), half // 4, half // 4]
    return {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": sections,
    }


def _qwen3_5(shape: Shape) -> Config:
    return dense(shape) | {
        "linear_num_value_heads": shape.heads,
        "linear_num_key_heads": shape.kv_heads,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "rope_parameters": _rope(shape),
    }


def qwen3_5_text(shape: Shape) -> Config:
    """Gated delta rule and full attention in turn."""
    return _qwen3_5(shape) | {"model_type": "qwen3_5_text"}


def qwen3_5_moe_text(shape: Shape) -> Config:
    """The same with experts."""
    return (
        _qwen3_5(shape)
        | experts(shape)
        | {
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": shape.intermediate // 2,
        }
    )


def cohere2_moe(shape: Shape) -> Config:
    """Sliding windows and full attention, and experts; the head tied to the embedding."""
    return dense(shape) | {
        "model_type": "cohere2_moe",
        "logit_scale": 1.0,
        "sliding_window": shape.window,
        "layer_types": shape.turns("sliding_attention", "full_attention"),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_num_shared_experts": 1,
        "tie_word_embeddings": True,
    }


def mimo_v2(shape: Shape) -> Config:
    """Sliding windows with sinks and full attention, of other heads, and experts."""
    return dense(shape) | {
        "model_type": "mimo_v2",
        "layernorm_epsilon": 1e-5,
        "v_head_dim": shape.head_dim,
        "swa_head_dim": shape.head_dim,
        "swa_v_head_dim": shape.head_dim,
        "swa_num_attention_heads": shape.heads,
        "swa_num_key_value_heads": shape.kv_heads,
        "swa_rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "sliding_window_size": shape.window,
        "hybrid_layer_pattern": [1, 0] * (shape.layers // 2),
        "moe_layer_freq": [0] + [1] * (shape.layers - 1),
        "moe_intermediate_size": shape.intermediate // 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 1, "qk_channels": 64}
        | {"num_key_value_heads": 1, "num_query_groups": 1, "intermediate_size": 64}
        | {"out_hidden_size": 64, "fullatt_block_indexes": [0], "vit_window_attn_types": [-1]},
        "audio_config": {"out_hidden_size": 64, "input_local_dim": 64, "input_local_layers": 1}
        | {"input_local_attn_heads": 1, "input_local_head_dim": 64, "audio_channels": 0}
        | {"input_local_intermediate_size": 64, "speech_vocab_size": 8, "speech_zeroemb_idx": 4},
    }


def step3p7(shape: Shape) -> Config:
    """Sliding windows and full attention, of other heads, gated, and experts."""
    text = dense(shape) | {
        "model_type": "step3p5",
        "num_attention_groups": shape.kv_heads,
        "layer_types": shape.turns("sliding_attention", "full_attention"),
        "sliding_window": shape.window,
        "attention_other_setting": {
            "num_attention_heads": shape.heads,
            "num_attention_groups": shape.kv_heads,
        },
        "use_head_wise_attn_gate": True,
        "moe_layers_enum": list(range(1, shape.layers)),
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": shape.intermediate // 2,
        "share_expert_dim": shape.intermediate // 2,
    }
    vision = {"width": 64, "layers": 1, "heads": 1, "image_size": 28}
    return {
        "model_type": "step3p7",
        "vocab_size": shape.vocab_size,
        "text_config": text,
        "vision_config": vision,
    }


def minimax_m3(shape: Shape) -> Config:
    """Full attention, then attention to the best blocks of keys, and experts."""
    return dense(shape) | {
        "model_type": "minimax_m3",
        "rotary_dim": shape.head_dim // 2,
        "moe_layer_freq": [0] + [1] * (shape.layers - 1),
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * (shape.layers - 1),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "shared_intermediate_size": shape.intermediate // 2,
        "intermediate_size": shape.intermediate // 2,
        "dense_intermediate_size": shape.intermediate,
        "index_n_heads": shape.kv_heads,
        "index_head_dim": shape.head_dim,
        "index_block_size": 8,
        "index_topk_blocks": 4,
        "index_local_blocks": 1,
    }


def qwen4_exp(shape: Shape) -> Config:
    """Gated delta rule with n-grams, attention to the best blocks of keys, and experts."""
    text = (
        _qwen3_5(shape)
        | experts(shape)
        | {
            "model_type": "qwen4_exp_text",
            "shared_expert_intermediate_size": shape.intermediate // 2,
            "hc_count": 2,
            "hc_lowrank": 16,
            "ple_layer_ids": [1],
            "ple_embed_dim": 64,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 997,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 2,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": shape.head_dim,
            "indexer_budget": 32,
            "indexer_compress_ratio": 4,
            "eos_token_id": 0,
        }
    )
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1}
    return {
        "model_type": "qwen4_exp",
        "vocab_size": shape.vocab_size,
        "text_config": text,
        "vision_config": vision | {"out_hidden_size": shape.hidden},
    }


def hy_v4(shape: Shape) -> Config:
    """Latent attention to the best keys, with a layer that shares them, and experts."""
    return (
        dense(shape)
        | routed_experts(shape)
        | {
            "model_type": "hy_v4",
            "num_key_value_heads": 1,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "index_head_dim": 32,
            "index_n_heads": 2,
            "index_topk": 32,
            "indexer_types": shape.turns("full", "shared"),
            "hc_mult": 2,
        }
    )


def glm5_next(shape: Shape) -> Config:
    """A delta rule and latent attention to the best groups of keys in turn, and experts."""
    text = (
        dense(shape)
        | routed_experts(shape)
        | {
            "model_type": "glm5_next_text",
            "num_key_value_heads": shape.heads,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "index_head_dim": 32,
            "index_n_heads": 2,
            "index_topk": 32,
            "index_kpool": 4,
            "mla_use_nope": True,
            "layer_types": shape.turns("linear_attention", "deepseek_sparse_attention"),
            "indexer_types": ["full"] * shape.layers,
            "linear_num_heads": shape.heads,
            "linear_head_dim": 32,
        }
    )
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1}
    return {
        "model_type": "glm5_next",
        "vocab_size": shape.vocab_size,
        "text_config": text,
        "vision_config": vision | {"out_hidden_size": shape.hidden},
    }


def _vision(shape: Shape, **more: object) -> Config:
    """A vision tower of two layers, with a token for each 32 x 32 pixels."""
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 64,
        "out_hidden_size": shape.hidden,
        "deepstack_visual_indexes": [],
    } | more


def _seeing(kind: str, shape: Shape, text: Config, **vision: object) -> Config:
    return {
        "model_type": kind,
        "vocab_size": shape.vocab_size,
        "text_config": text,
        "vision_config": _vision(shape, model_type=kind, **vision),
    }


def _qwen3_vl(shape: Shape) -> Config:
    half = shape.head_dim // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "type": "default", "mrope_section": sections}
    return dense(shape) | {"model_type": "qwen3_vl_text", "rope_scaling": rope}


def qwen3_vl(shape: Shape) -> Config:
    """Full attention; the first layers are given rows of images too (deepstack)."""
    return _seeing("qwen3_vl", shape, _qwen3_vl(shape), deepstack_visual_indexes=[0, 1])


def qwen3_vl_moe(shape: Shape) -> Config:
    """The same with experts."""
    text = (
        _qwen3_vl(shape)
        | experts(shape)
        | {"model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1, "mlp_only_layers": []}
    )
    return _seeing("qwen3_vl_moe", shape, text, deepstack_visual_indexes=[0, 1])


def qwen3_5(shape: Shape) -> Config:
    """Gated delta rule and full attention in turn, with images."""
    return _seeing("qwen3_5", shape, qwen3_5_text(shape))


def qwen3_5_moe(shape: Shape) -> Config:
    """The same with experts."""
    return _seeing("qwen3_5_moe", shape, qwen3_5_moe_text(shape))


def qwen4_exp_images(shape: Shape) -> Config:
    """Qwen4 with images."""
    return _seeing("qwen4_exp", shape, qwen4_exp(shape)["text_config"])


SEEING: dict[str, Callable[[Shape], Config]] = {
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen4_exp": qwen4_exp_images,
}
"""Families that take images: what `make_toy` makes with `images`."""
