"""Shapes of the models with random weights that `prove` makes. Without MLX, for its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weights = Literal["bfloat16", "4bit"]
WEIGHTS: tuple[Weights, ...] = ("bfloat16", "4bit")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3 model without experts. `tied`: the head has the embeddings' weights."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151936
    tied: bool = True


SIZES = {
    "tiny": Shape(64, 4, 128, 4, 2, head_dim=32, vocabulary=3072),
    "0.6b": Shape(1024, 28, 3072, 16, 8),
    "1.7b": Shape(2048, 28, 6144, 16, 8),
    "4b": Shape(2560, 36, 9728, 32, 8),
    "8b": Shape(4096, 36, 12288, 32, 8, tied=False),
}
"""Shapes by name, as published in config.json of Qwen3-0.6B, -1.7B, -4B and -8B; `tiny` is ours."""
