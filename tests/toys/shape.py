"""Size of a toy, and the fields that nearly every family's config.json has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a toy. `window`, in tokens, matters to families that have one."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    window: int

    def turns(self, odd: str, even: str) -> list[str]:
        """One word per layer, `odd` first and then in turn."""
        return [odd, even] * (self.layers // 2)


Config = dict[str, Any]


def dense(shape: Shape) -> Config:
    """The fields that a llama's config has, and most others too."""
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


def experts(shape: Shape) -> Config:
    """Four experts of which each token takes two, as the Qwen and GLM families name them."""
    return {
        "moe_intermediate_size": shape.intermediate // 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }


def routed_experts(shape: Shape) -> Config:
    """Four experts and a shared one, as the DeepSeek and GLM families name them."""
    return {
        "moe_intermediate_size": shape.intermediate // 2,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
