"""Models with random weights and the shapes of real ones, for measurements without a download.

Their replies have no meaning, but every token depends on the whole context, and a forward pass
costs what it costs in the real model: same layers, same bytes. The tokenizer is that of the demo
model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from mlx_lm.utils import save_model
from tokenizers import Tokenizer

from mlxcache.bench.shapes import SIZES, Shape, Weights
from mlxcache.model import demo

CONTEXT = 131072
GROUP_SIZE, BITS = 64, 4
LOGIT_SPREAD = 3.0
QUIET = 0.2
"""Factor of embeddings whose tokens must not be the likeliest, if the output head shares them."""

GAINS = {"o_proj": 3.0, "down_proj": 2.0}
"""Spread of a projection's output for inputs of spread 1; 1.3 for those not named.

With these, attention scores have a deviation near 1.7: some positions weigh more than others, and
hundreds of them count."""

LETTERS = [c for c in punctuation + ascii_letters + digits if c not in "<'"]
"""Characters for replies, without `<`, which opens markers, and `'`, which has its own rule."""


def make_random(folder: Path, size: str, weights: Weights = "bfloat16") -> Path:
    """Write the folder of a random model for `mlx_lm.load`, and return the folder.

    The weights of one file, 5 GB at most, are held in memory. The text of a reply encodes to
    exactly the tokens that were generated, as that of a trained model mostly does. Replies never
    end by themselves. Blocks; MLX thread only.
    """
    shape = SIZES[size]
    tokenizer = (demo.DATA / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = Tokenizer.from_str(tokenizer).get_vocab()
    spoken = [vocabulary[letter] for letter in lonely_letters(vocabulary)]
    config = config_of(shape, vocabulary[demo.TURN_END])
    model = Model(ModelArgs.from_dict(config))
    sizes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    keys = mx.random.split(mx.random.key(0), len(sizes))
    model.load_weights([
        (name, _drawn(name, one, key, spoken, tokens=len(vocabulary), tied=shape.tied))
        for (name, one), key in zip(sizes.items(), keys, strict=True)
    ])  # fmt: skip
    if weights == "4bit":
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": BITS}
        nn.quantize(model, GROUP_SIZE, BITS)
    save_model(folder, model, donate_model=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    demo.write_tokenizer(folder, tokenizer, context=CONTEXT, thinking=False)
    mx.clear_cache()
    return folder


def lonely_letters(vocabulary: Mapping[str, int]) -> list[str]:
    """Choose characters, each a token, that a tokenizer never merges with each other."""
    chosen: list[str] = []
    for letter in LETTERS:
        among = [*chosen, letter]
        joins = any(letter + c in vocabulary or c + letter in vocabulary for c in among)
        if letter in vocabulary and not joins:
            chosen.append(letter)
    return chosen


def config_of(shape: Shape, eos: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }


def _drawn(
    name: str,
    size: tuple[int, ...],
    key: mx.array,
    spoken: list[int],
    *,
    tokens: int,
    tied: bool,
) -> mx.array:
    """Draw a random bfloat16 parameter, not evaluated yet.

    In the embeddings and the output head, only the rows of the tokenizer's ids are drawn. The other
    rows are zeros: no prompt contains their ids, and no reply should.
    """
    owner = name.split(".")[-2]
    if len(size) == 1:
        mean = 1.3 if owner in ("q_norm", "k_norm") else 1.0
        value = mean + 0.1 * mx.random.normal(size, key=key)
    elif owner in ("embed_tokens", "lm_head"):
        value = mx.random.normal((tokens, size[1]), key=key)
        if tied or owner == "lm_head":
            value = value * _head_scales(value.shape, spoken, quiet=QUIET if tied else 0.0)
        value = mx.concatenate([value, mx.zeros((size[0] - tokens, size[1]))])
    else:
        value = mx.random.normal(size, key=key) * (GAINS.get(owner, 1.3) / math.sqrt(size[1]))
    return value.astype(mx.bfloat16)


def _head_scales(size: tuple[int, ...], spoken: list[int], *, quiet: float) -> mx.array:
    """Return factors for the rows of an output head: only `spoken` ids are ever the likeliest."""
    factors = mx.full((size[0], 1), quiet)
    factors[mx.array(spoken)] = 1.0
    return factors * (LOGIT_SPREAD / math.sqrt(size[1]))
