"""A tiny Muse Spark, the model that mlx-lm has images for: its text model, its vision tower."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer

from mlxcache.model import demo
from mlxcache.model.vision import encode
from mlxcache.types import Image
from tests.muse import plain
from tests.toys.images import take_parts
from tests.toys.tokenizer import CONTROL, MARKS, toy_tokenizer
from tests.toys.weights import draw

IMAGE_MARKS = ("<|image_start|>", "<|patch|>", "<|image_end|>")
VOCABULARY = 520


def make_muse(path: Path) -> Path:
    """Write the model's folder at `path` and return it. Windows of 64 tokens in half of the layers;
    an image has a token for each 28 x 28 pixels."""
    tokenizer = Tokenizer.from_str(toy_tokenizer(512, False))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in IMAGE_MARKS])
    config = _config(tokenizer)
    model = plain.Model(plain.ModelArgs.from_dict(config))
    parameters = sorted(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(0), len(parameters))
    drawn = dict(
        (name, draw(name, value, key)) for (name, value), key in zip(parameters, keys, strict=True)
    )
    head = drawn["lm_head.weight"]
    controls = [tokenizer.token_to_id(t) for t in CONTROL + MARKS + IMAGE_MARKS]
    head[mx.array([*controls, *range(tokenizer.get_vocab_size(), VOCABULARY)])] = 0.0
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), drawn, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "plain.py").write_text(Path(plain.__file__).read_text("utf-8"), encoding="utf-8")
    demo.write_tokenizer(path, tokenizer.to_str(), context=8192, thinking=False)
    take_parts(path, "<|patch|>")
    return path


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    layers = 4
    text = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 0] * (layers // 2),
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": 64,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_hidden_size": 32,
        "moe_intermediate_size": 32,
        "qk_scale_factor": 3.0,
        "max_position_embeddings": 8192,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 14,
        "merge_size": 2,
    }
    return {
        "model_type": "muse_spark",
        "model_file": "plain.py",
        "text_config": text,
        "vision_config": vision,
        "audio_config": {"out_hidden_size": text["hidden_size"]},
        "image_token_id": tokenizer.token_to_id("<|patch|>"),
        "eos_token_id": tokenizer.token_to_id(demo.TURN_END),
    }


def picture(seed: int, width: int = 140, height: int = 112) -> bytes:
    """Noise as a PNG file; 20 tokens, if no size is given."""
    noise = np.random.default_rng(seed)
    # larger than a token's pixels, so that it survives the resizing
    coarse = noise.integers(0, 256, (-(-height // 14), -(-width // 14), 3), dtype=np.uint8)
    return encode(coarse.repeat(14, axis=0).repeat(14, axis=1)[:height, :width])


def image(seed: int, width: int = 140, height: int = 112) -> Image:
    data = picture(seed, width, height)
    return Image(data, hashlib.sha256(data).digest())
