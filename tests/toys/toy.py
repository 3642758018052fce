"""Tiny models with random weights, made in a second, that mlx-lm loads like any other.

They generate gibberish, but each greedy token depends on the whole context, so a wrong cache shows
as wrong text. Float32, so that greedy output does not depend on rounding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer

from mlxcache.model import demo
from tests.toys.configs import FAMILIES, VLM
from tests.toys.images import IMAGE_MARKS, image_ids, with_image_marks, write_processor
from tests.toys.shape import Shape
from tests.toys.tokenizer import CONTROL, MARKS, THINK_MARKS, toy_tokenizer
from tests.toys.vlm import SEEING
from tests.toys.weights import random_model

FIRST_CANDIDATE, CANDIDATES = 8, 240  # ids of single bytes, which every vocabulary has
FUSED: dict[str, Any] = {"hidden": 256, "head_dim": 64, "intermediate": 128}
"""Sizes for `make_toy` at which Metal's fused attention takes the heads of each family."""
TIED = 0.2
"""Scale of an embedding that is also a row of the head and must not win."""


def make_toy(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 512,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int | None = None,
    context: int = 65536,
    window: int = 64,
    thinking: bool = False,
    images: bool = False,
    emits: Mapping[str, int] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model directory at `path` that `mlx_lm.load` loads, and return `path`.

    `family` is a key of `configs.FAMILIES` or `configs.VLM`. `layers` must be even (ValueError).
    `context` and `window` are in tokens. `thinking` adds think tokens and a template that opens a
    think block. `images`: it takes images; `family` is then a key of `vlm.SEEING`, and the
    vocabulary has 8 tokens more. Control tokens are never the likeliest, so greedy replies run to
    their limit, except those in `emits`: a token's text, and after how many tokens it comes on
    average. `{"<|im_end|>": 20}` makes a model that ends its turns. `more`: further keys of its
    configuration. Raises KeyError for an unknown family.
    """
    if layers % 2:
        raise ValueError("a toy needs an even number of layers: half of them are the special kind")
    tokenizer = toy_tokenizer(vocab_size, thinking)
    if images:
        tokenizer, vocab_size = with_image_marks(tokenizer), vocab_size + 8
    shape = Shape(
        vocab_size, hidden, layers, heads, kv_heads, head_dim, intermediate or 2 * hidden,
        context, window,
    )  # fmt: skip
    ids = Tokenizer.from_str(tokenizer)
    config = (SEEING if images else FAMILIES | VLM)[family](shape)
    config |= {"eos_token_id": ids.token_to_id(demo.TURN_END)} | dict(more or {})
    if images:
        config |= image_ids(ids)
    model = random_model(config, seed, images=images)
    _shape_head(model, ids, emits or {})
    _write(path, model, config)
    demo.write_tokenizer(path, tokenizer, context=context, thinking=thinking)
    if images:
        write_processor(path)
    return path


def _write(path: Path, model: nn.Module, config: Mapping[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def make_bench_toy(path: Path, *, seed: int = 0, vocab_size: int = 4096) -> Path:
    """A llama-shaped toy of about 5 million parameters whose prefill takes measurable time."""
    return make_toy(
        path, "llama", seed=seed, vocab_size=vocab_size, hidden=256, layers=4, heads=8,
        kv_heads=4, head_dim=32, intermediate=768, context=131072,
    )  # fmt: skip


def _shape_head(model: nn.Module, ids: Tokenizer, emits: Mapping[str, int]) -> None:
    """Give the output head its rows for control tokens and for ids that no token has.

    A row of zeros gives a logit of 0, well under the best of the others; where the head is the
    embedding too, short rows do. The row of a token in `emits` is that of an ordinary token, scaled
    so that it wins as often as asked for in the model's own greedy text; of many ordinary tokens,
    the one that least wins at a reply's start.
    """
    parameters = dict(tree_flatten(model.parameters()))
    name = next(
        name
        for end in ("lm_head.weight", "embed_tokens.weight")
        for name in parameters
        if name.endswith(end)
    )
    head = parameters[name]
    silent = [_token_id(ids, token) for token in CONTROL + MARKS]
    silent += [row for row in map(ids.token_to_id, THINK_MARKS + IMAGE_MARKS) if row is not None]
    silent += range(ids.get_vocab_size(), head.shape[0])
    rows = mx.array(silent)
    head[rows] = 0.0 if name.endswith("lm_head.weight") else TIED * head[rows]
    if emits:
        model.load_weights([(name, head)], strict=False)
        turn = ids.encode(f"{demo.TURN_END}\n{demo.TURN_START}assistant\n").ids
        winning = np.asarray(_winning_scales(model, head.shape[0], turn))
        at_start = winning[:8].min(axis=(0, 1))
        ascending = np.sort(winning.reshape(-1, CANDIDATES), axis=0)
        for token, every in emits.items():
            often = ascending[len(ascending) // every]
            best = int(np.argmax(at_start / often))
            head[_token_id(ids, token)] = head[FIRST_CANDIDATE + best] * float(often[best])
            at_start[best] = 0.0  # taken
    model.load_weights([(name, head)], strict=False)


def _token_id(ids: Tokenizer, token: str) -> int:
    row = ids.token_to_id(token)
    if row is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return int(row)


def _winning_scales(model: nn.Module, vocab_size: int, turn: list[int]) -> mx.array:
    """Factors by which each candidate row must be scaled to win, shape (64, 16, CANDIDATES).

    Over 16 greedy texts of 64 tokens that follow a random prompt and `turn`.
    """
    prompt = mx.random.randint(0, vocab_size, (16, 48), key=mx.random.key(1))
    tokens = mx.concatenate([prompt, mx.broadcast_to(mx.array(turn), (16, len(turn)))], axis=1)
    cache = make_prompt_cache(model)
    scales = []
    for _ in range(64):
        logits = model(tokens, cache=cache)[:, -1]
        own = logits[:, FIRST_CANDIDATE : FIRST_CANDIDATE + CANDIDATES]
        tokens = mx.argmax(logits, axis=-1, keepdims=True)
        best = mx.take_along_axis(logits, tokens, axis=-1)
        scales.append(mx.where(own > 0, best / own, 1e3))
        mx.eval(tokens, scales[-1])
    return mx.stack(scales)
