"""A tiny model of every kind that mlx-lm has, random weights and all: to see how each one caches.

Their configs are made by the names of the fields that mlx-lm's `ModelArgs` have. Nothing is read
from disk, and nothing that they say makes sense.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx_lm.models
from mlx import nn

Config = dict[str, Any]

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 128, 128, 4, 4, 2, 32, 8

_MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_HYBRID = ["conv", "full_attention"] * (LAYERS // 2)
_ROPE = {"type": "default", "rope_type": "default", "rope_theta": 10000.0}
_LINEAR = {
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
}
_YARN = {
    "type": "yarn",
    "factor": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 512,
}

_ALPHA = {"alpha": 2.0, "factor": 1.0}
_SCALED = _ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512}
_LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}

_VALUES: Mapping[str, Any] = {
    name: value
    for value, names in (
        (VOCABULARY, "vocab_size num_vocab vocab_size_per_layer_input embedding_size"),
        (HIDDEN, "hidden_size hidden_dim d_model n_embd model_dim block_dim mlp_hidden_size"),
        (LAYERS, "num_hidden_layers num_layers n_layers n_layer num_transformer_layers"),
        (HEADS, "num_attention_heads num_heads n_heads n_head swa_num_attention_heads"),
        (KV_HEADS, "num_key_value_heads num_kv_heads n_kv_heads swa_num_key_value_heads"),
        (KV_HEADS, "num_attention_groups"),
        (HEAD_DIM, "head_dim swa_head_dim swa_v_head_dim v_head_dim qk_nope_head_dim"),
        (HEAD_DIM, "kv_channels hidden_size_per_head global_head_dim"),
        (HEAD_DIM, "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim"),
        (HEAD_DIM, "qk_rope_head_dim rotary_dim"),
        (32, "mamba_d_state state_size ssm_state_size"),
        (8, "hidden_size_per_layer_input laurel_rank dim_model_base"),
        (16, "a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim time_step_rank"),
        (64, "kv_lora_rank q_lora_rank index_head_dim o_lora_rank"),
        (2, "index_n_heads linear_num_key_heads linear_num_value_heads loop_num num_loops"),
        (2, "o_groups hc_mult"),
        (1, "n_groups mamba_n_groups n_group topk_group n_shared_experts num_shared_experts"),
        (1, "num_shared_expert num_kv_shared_layers num_kv_reuse_layers first_k_dense_replace"),
        (1, "num_dense_layers moe_layer_freq decoder_sparse_step"),
        (4, "mamba_d_conv conv_kernel conv1d_width conv_L_cache linear_conv_kernel_dim"),
        (4, "mamba_n_heads mamba_num_heads index_topk num_experts n_routed_experts"),
        (4, "num_local_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k"),
        (2, "sliding_window_pattern full_attention_interval layer_group_size mamba_expand"),
        (2, "ngram_vocab_size_ratio emb_split_num"),
        (HIDDEN, "intermediate_size moe_intermediate_size shared_expert_intermediate_size"),
        (HIDDEN, "intermediate_size_mlp n_inner ffn_hidden_size expert_ffn_hidden_size"),
        (HIDDEN, "moe_hidden_size share_expert_dim shared_intermediate_size mamba_d_ssm"),
        (HIDDEN, "dense_intermediate_size ff_intermediate_size block_ff_dim"),
        (WINDOW, "sliding_window sliding_window_size window_size attention_window_size"),
        (WINDOW, "loop_window_size attention_chunk_size"),
        (1024, "max_position_embeddings n_positions n_ctx model_max_length block_size"),
        (10000.0, "rope_theta"),
        (_MIXED, "layer_types"),
        (_ROPE, "rope_parameters"),
        ([], "mlp_only_layers"),
    )
    for name in names.split()
}
"""Values of fields by name, for every model."""

_OWN: Mapping[str, Config] = {
    "afm7": {"num_layers": 5},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": HIDDEN, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "deepseek_v41": {
        "compress_ratios": (0, 4, 4, 0),
        "kv_source_layer_ids": (1, 2),
        "index_source_layer_ids": (1, 2),
    },
    "exaone4": {"sliding_window_pattern": "LLLG", "rope_scaling": _ROPE},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["conv_mixer", *_MIXED[:2], "conv_mixer"]},
    "glm_moe_dsa": {"topk_method": "noaux_tc"},
    "gemma3n": {
        "num_hidden_layers": 6,
        "layer_types": [*_MIXED, *_MIXED[:2]],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 6,
        "altup_num_inputs": 2,
        "altup_active_idx": 0,
    },
    "gemma4": {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "rope_parameters": None}
    | {"layer_types": [*_MIXED, *_MIXED[:2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {"cla_share_factor": 2, "rope_scaling": {"type": "dynamic"} | _ALPHA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}
    | {"expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_k3": {"linear_attn_config": _LINEAR, "activation_situ_beta": 1.0},
    "kimi_linear": {"linear_attn_config": _LINEAR},
    "lfm2": {"layer_types": _HYBRID},
    "lfm2_moe": {"layer_types": _HYBRID},
    "llama": {"layer_types": None},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "llama4": {"num_experts_per_tok": 1, "num_key_value_heads": KV_HEADS}
    | {"interleave_moe_layer_step": 2},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba2": {"time_step_limit": (0.0, 1e9), "num_heads": HEADS, "intermediate_size": HIDDEN},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0, 1, 0], "moe_layer_freq": [0, 1, 1, 1]}
    | {"partial_rotary_factor": 0.5, "topk_method": "noaux_tc"},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1],
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "sparse_attention_freq": [0, 1, 1, 1],
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 512}},
    "mellum": {"rope_parameters": dict.fromkeys(_MIXED, _ROPE)},
    "ministral3": {"rope_parameters": _SCALED},
    "mistral4": {"rope_parameters": _SCALED},
    "muse_spark": {"layer_rope_theta": [10000.0] * LAYERS, "num_shared_experts": 0},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        ]
        * 2
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "E", "-"], "layer_types": None}
    | {"routed_scaling_factor": 1.0, "norm_topk_prob": True},
    "openelm": {
        "num_query_heads": [HEADS] * LAYERS,
        "num_kv_heads": [KV_HEADS] * LAYERS,
        "ffn_multipliers": [1.0] * LAYERS,
    },
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "hidden_size": 128,
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False} | {"dtype": "float16", "block": 0}],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"] * 2},
    "spark2_5": {"rope_parameters": dict.fromkeys(_MIXED, _ROPE)},
}
"""Further fields of single models, by module; for text_config where there is one."""

_TEXT: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "llama",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5_moe": "qwen3_5",
    "prism_hadamard_qwen35": "qwen3_5",
}
"""Modules of wrapped text models, for modules without a dataclass of their own."""


UNFED: Mapping[str, str] = {
    "bitnet": "its matrix product runs on Metal alone",
    "muse_spark": "its rotary embedding runs on Metal alone",
    "olmo": "mlx-lm's attention fails there on more than one token at once",
    "phi3small": "mlx-lm's block mask crashes MLX on a CPU now and then",
}
"""Models that are made and not fed, and why."""


def module_names() -> list[str]:
    """Every module of `mlx_lm.models` that holds a model, in alphabetical order."""
    names = [info.name for info in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return sorted(name for name in names if _holds_a_model(name))


def _holds_a_model(name: str) -> bool:
    spec = importlib.util.find_spec(f"mlx_lm.models.{name}")
    text = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    return "class Model(" in text


def module(name: str) -> ModuleType:
    """Module `name` of `mlx_lm.models`, imported."""
    if name != "olmo" or "hf_olmo" in sys.modules:
        return importlib.import_module(f"mlx_lm.models.{name}")
    # it only looks whether its old package is there, and ends the process where it is not
    sys.modules["hf_olmo"] = ModuleType("hf_olmo")
    try:
        return importlib.import_module(f"mlx_lm.models.{name}")
    finally:
        del sys.modules["hf_olmo"]
        sys.modules.pop("mlx_lm.models.olmo", None)  # it is to fail again without


def make_tiny(name: str) -> nn.Module:
    """A model of module `name` with random weights."""
    owner = module(name)
    config = config_of(name)
    model: nn.Module = owner.Model(owner.ModelArgs.from_dict(config))
    return model


def config_of(name: str) -> Config:
    """A tiny config.json for module `name`."""
    args = module(name).ModelArgs
    own = _OWN.get(name, {})
    if "text_config" not in inspect.signature(args).parameters:
        return _filled(args, name) | own
    text = _TEXT.get(name, name)
    inner = _filled(_text_args(text), text) | _OWN.get(text, {}) | own
    return _filled(args, name) | own | {"text_config": inner}


def _text_args(name: str) -> Any:
    owner = module(name)
    found = ("TextArgs", "TextConfig", "TextModelArgs", "ModelArgs")
    return next(getattr(owner, text) for text in found if hasattr(owner, text))


def _filled(args: Any, name: str) -> Config:
    """A value for each field of a dataclass that is known by name, or has to have one."""
    made: Config = {"model_type": name}
    for field in dataclasses.fields(args):
        required = field.default is field.default_factory is dataclasses.MISSING
        if field.name in _VALUES:
            made[field.name] = copy.deepcopy(_VALUES[field.name])
        elif required and field.name not in made:
            made[field.name] = _guess(field.name, str(field.type))
    return made


def _guess(name: str, kind: str) -> Any:
    if "bool" in kind:
        return False
    if "int" in kind:
        return 4
    if "float" not in kind:
        return None
    if "eps" in name:
        return 1e-5
    return 10000.0 if "theta" in name or "freq" in name else 1.0
