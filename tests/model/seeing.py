"""mlx-vlm's own model of a family that takes images, fed a whole prompt in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlxcache.model.vision import decode
from mlxcache.types import ImageSpan, Tokens, join_ids, token_ids


class Whole:
    """The model in folder `path`, and its image processor, loaded as mlx-vlm loads them."""

    def __init__(self, path: Path):
        from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as processing
        from mlx_vlm.utils import load_model

        self.model: Any = load_model(path)
        settings = processing._qwen_vl_image_kwargs(str(path))
        self.processor: Any = processing.Qwen3VLImageProcessor(**settings)

    def logits(self, ids: Tokens, spans: tuple[ImageSpan, ...] = ()) -> mx.array:
        from mlx_vlm.models.cache import make_prompt_cache

        own = self.model.language_model
        own._rope_deltas = own._position_ids = None
        more: dict[str, Any] = {}
        if spans:
            shown = [decode(span.image.data).transpose(2, 0, 1) for span in spans]
            made = self.processor(shown)
            more["image_grid_thw"] = mx.array(made["image_grid_thw"])
            more["pixel_values"] = mx.array(made["pixel_values"])
        tokens = mx.array(ids.astype(np.int32))[None]
        out: mx.array = self.model(tokens, cache=make_prompt_cache(own), **more).logits[0]
        mx.eval(out)
        return out

    def greedy(self, ids: Tokens, spans: tuple[ImageSpan, ...], count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count):
            all_ids = join_ids(ids, token_ids(found))
            found.append(int(mx.argmax(self.logits(all_ids, spans)[-1])))
        return found


def poison(model: nn.Module) -> int:
    """Leave positions in the modules as another sequence would; how many have a place for them."""
    found = 0
    for _, module in model.named_modules():
        if hasattr(module, "_rope_deltas"):
            module._rope_deltas = mx.array([[321]])
            module._position_ids = mx.broadcast_to(mx.arange(4096) * 3 + 7, (3, 1, 4096))
            found += 1
    return found
