"""Toy families, one for each way in which mlx-lm's models cache."""

CACHE_KINDS = (
    "llama",
    "gemma3",
    "gpt_oss",
    "qwen3_5",
    "mamba2",
    "llama4",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v41",
    "falcon_h1",
    "rwkv7",
)
