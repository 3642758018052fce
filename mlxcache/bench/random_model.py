"""Models with random weights and the shapes of real ones, for measurements without a download.

Their replies have no meaning, but every token depends on the whole context, and a forward pass
costs what it costs in the real model: same layers, same bytes. The tokenizer is that of the demo
model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from mlxcache.bench.context import SIZES, Shape, Weights
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

    One layer at a time is held in memory. The text of a reply encodes to exactly the tokens that
    were generated, as that of a trained model mostly does. Replies never end by themselves. Blocks;
    MLX thread only.
    """
    shape = SIZES[size]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = (demo.DATA / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = Tokenizer.from_str(tokenizer).get_vocab()
    spoken = [vocabulary[letter] for letter in lonely_letters(vocabulary)]
    files: dict[str, str] = {}
    total = 0
    parts = list(_parts(shape))
    for number, (part, key) in enumerate(
        zip(parts, mx.random.split(mx.random.key(0), len(parts)), strict=True), 1
    ):
        arrays = _drawn(part, key, spoken, tokens=len(vocabulary), tied=shape.tied)
        if weights == "4bit":
            arrays = _quantised(arrays)
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        mx.save_safetensors(str(folder / name), arrays, metadata={"format": "mlx"})
        files |= dict.fromkeys(arrays, name)
        total += sum(array.nbytes for array in arrays.values())
        del arrays
        mx.clear_cache()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    _write(folder / "model.safetensors.index.json", index)
    _write(folder / "config.json", _config(shape, vocabulary[demo.TURN_END], weights))
    demo.write_tokenizer(folder, tokenizer, context=CONTEXT, thinking=False)
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


def _config(shape: Shape, eos: int, weights: Weights) -> dict[str, Any]:
    config: dict[str, Any] = {
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
    if weights == "4bit":
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": BITS}
    return config


def _parts(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the shapes of the parameters, without the final `.weight`, one dict for each file."""
    hidden, inner = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (shape.vocabulary, hidden),
        "model.norm": (hidden,),
    }
    if not shape.tied:
        ends["lm_head"] = (shape.vocabulary, hidden)
    yield ends
    for layer in range(shape.layers):
        of_one: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (shape.head_dim,),
            "self_attn.k_norm": (shape.head_dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        yield {f"model.layers.{layer}.{name}": size for name, size in of_one.items()}


def _drawn(
    part: Mapping[str, tuple[int, ...]],
    key: mx.array,
    spoken: list[int],
    *,
    tokens: int,
    tied: bool,
) -> dict[str, mx.array]:
    """Draw the random bfloat16 parameters of one file.

    In the embeddings and the output head, only the rows of the tokenizer's ids are drawn. The other
    rows are zeros: no prompt contains their ids, and no reply should.
    """
    found = {}
    for (name, size), one in zip(part.items(), mx.random.split(key, len(part)), strict=True):
        owner = name.rpartition(".")[2]
        if len(size) == 1:
            mean = 1.3 if owner in ("q_norm", "k_norm") else 1.0
            value = mean + 0.1 * mx.random.normal(size, key=one)
        elif owner in ("embed_tokens", "lm_head"):
            value = mx.random.normal((tokens, size[1]), key=one)
            if tied or owner == "lm_head":
                value = value * _head_scales(value.shape, spoken, quiet=QUIET if tied else 0.0)
            value = mx.concatenate([value, mx.zeros((size[0] - tokens, size[1]))])
        else:
            value = mx.random.normal(size, key=one) * (GAINS.get(owner, 1.3) / math.sqrt(size[1]))
        found[f"{name}.weight"] = value.astype(mx.bfloat16)
        mx.eval(found)
    return found


def _head_scales(size: tuple[int, ...], spoken: list[int], *, quiet: float) -> mx.array:
    """Return factors for the rows of an output head: only `spoken` ids are ever the likeliest."""
    factors = mx.full((size[0], 1), quiet)
    factors[mx.array(spoken)] = 1.0
    return factors * (LOGIT_SPREAD / math.sqrt(size[1]))


def _quantised(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            found[name] = array
            continue
        packed, scales, biases = mx.quantize(array, group_size=GROUP_SIZE, bits=BITS)
        owner = name.removesuffix(".weight")
        found |= {name: packed, f"{owner}.scales": scales, f"{owner}.biases": biases}
    mx.eval(found)
    return found


def _write(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")
