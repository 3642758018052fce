"""What a toy needs beyond its weights to take images: marks, a template, a processor's settings."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

from mlxcache.model.vision import encode
from mlxcache.types import Image

IMAGE_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SIDE = 32
"""Pixels along each side of the square behind one token."""

_LINE = "message.content + '<|im_end|>\\n' -}}\n{%- endif -%}"
_PARTS = """'' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- part.text if part.type == 'text' else 'IMAGE' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}"""


def with_image_marks(tokenizer: str) -> str:
    """The text of tokenizer.json, with the tokens around images and in place of them."""
    found = Tokenizer.from_str(tokenizer)
    found.add_special_tokens([AddedToken(mark, special=True) for mark in IMAGE_MARKS])
    return found.to_str()


def image_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The fields of a configuration that name these tokens."""
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {name: tokenizer.token_to_id(m) for name, m in zip(names, IMAGE_MARKS, strict=True)}


def write_processor(path: Path) -> None:
    """Write the processor's settings to the folder, and a template that takes parts of content."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": SIDE // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * SIDE * SIDE, "longest_edge": 1024 * SIDE * SIDE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    take_parts(path, "<|vision_start|><|image_pad|><|vision_end|>")


def take_parts(path: Path, image: str) -> None:
    """Let the template in the folder take parts of content; it writes `image` for an image."""
    file = path / "tokenizer_config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    template = fields["chat_template"]
    assert _LINE in template
    fields["chat_template"] = template.replace(_LINE, _PARTS.replace("IMAGE", image))
    file.write_text(json.dumps(fields), encoding="utf-8")


def screenshot(seed: int, columns: int = 5, rows: int = 4) -> Image:
    """Noise in squares of half a token's side, as a PNG file of `columns` x `rows` tokens."""
    noise = np.random.default_rng(seed).integers(0, 256, (2 * rows, 2 * columns, 3), np.uint8)
    data = encode(noise.repeat(SIDE // 2, axis=0).repeat(SIDE // 2, axis=1))
    return Image(data, hashlib.sha256(data).digest())
