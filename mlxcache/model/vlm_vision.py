"""Images of the Qwen models that mlx-vlm runs: from pixels to what their layers are fed.

The processor is made directly from the settings in the model's folder. transformers' own way would
need PyTorch, and might run Python code from that folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

from mlxcache.model.backend import PROCESSOR_FILES
from mlxcache.model.vision import Grid, Pixels, Processed, Rows, Vision
from mlxcache.model.vlm import VlmModel
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.model")

_SAME = ("do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std")
"""Settings that mlx-vlm's processor has under the names that they have in the files."""


class QwenImages:
    """Image processor and vision tower of Qwen3-VL, Qwen3.5 and Qwen4; see `vision.ImageModel`.

    `processor`: mlx-vlm's image processor. `image_token`, `token_id`: the token that stands for an
    image. An image is resized to whole squares of pixels, each of which becomes one token.
    """

    def __init__(self, model: VlmModel, processor: Any, image_token: str, token_id: int):
        self.image_token = image_token
        self.token_id = token_id
        self._model, self._processor = model, processor
        self._merge = int(processor.merge_size)
        side = processor.patch_size * processor.merge_size
        self.most_tokens = int(processor.max_pixels) // side**2

    def count(self, height: int, width: int) -> int:
        """Return the number of positions that an image of this size in pixels takes in a prompt.

        Raises ValueError if one side is over 200 times the other.
        """
        sides = self._processor._resolved_size(height, width)
        side = self._processor.patch_size * self._merge
        return int(sides[0] // side * (sides[1] // side))

    def process(self, rgb: npt.NDArray[np.uint8]) -> Processed:
        """Return the pixels for the vision tower, the text for the prompt, and the grid.

        `rgb`: shape (height, width, 3). Raises ValueError if one side is over 200 times the other.
        """
        made = self._processor([rgb.transpose(2, 0, 1)])
        _, rows, columns = (int(n) for n in made["image_grid_thw"][0])
        grid = rows // self._merge, columns // self._merge
        text = self.image_token * (grid[0] * grid[1])
        return Processed(text, np.asarray(made["pixel_values"], np.float32), grid)

    def rows(self, ids: Tokens, pixels: Pixels, grid: Grid | None) -> Rows:
        """Return the model's inputs at the tokens of an image, lazily. MLX thread only.

        `ids`: the image's token ids, shape (tokens,). `pixels`, `grid`: those that `process`
        returned. The result has `input_embeddings`, shape (tokens, hidden). If the vision tower
        also makes vectors that are added to the outputs of the first layers, it has `deepstack`,
        shape (tokens, layers, hidden).
        """
        assert grid is not None
        tower: Any = self._model.vision_tower
        sides = mx.array([[1, *(side * self._merge for side in grid)]])
        dtype = self._model.embed(mx.array(ids[:1])).dtype
        inputs = mx.array(pixels).astype(tower.patch_embed.proj.weight.dtype)
        found, deep = tower(inputs, sides)
        rows = {"input_embeddings": found.astype(dtype)}
        if self._levels:
            rows["deepstack"] = mx.stack(list(deep), axis=1).astype(dtype)
        return rows

    def embed(self, ids: Tokens) -> Rows:
        """Return the model's inputs at tokens of text, in the form of `rows`, lazily.

        `ids`: shape (tokens,). `deepstack`, if the result has it, is 0. MLX thread only.
        """
        rows = {"input_embeddings": self._model.embed(mx.array(ids))}
        if self._levels:
            count, hidden = rows["input_embeddings"].shape
            empty = mx.zeros((count, self._levels, hidden), rows["input_embeddings"].dtype)
            rows["deepstack"] = empty
        return rows

    @property
    def _levels(self) -> int:
        """Number of layers to whose outputs vectors of an image are added; 0 if there are none."""
        tower: Any = self._model.vision_tower
        return len(tower.deepstack_visual_indexes or ())


def load_vision(
    model: VlmModel,
    tokenizer: Any,
    config: Mapping[str, Any],
    path: Path,
    *,
    label: str = "unnamed",
) -> Vision | None:
    """Make the image processor of a model that mlx-vlm has loaded from the folder `path`.

    `tokenizer`: mlx-lm's TokenizerWrapper. `config`: content of the model's `config.json`. `label`:
    its name, for the log. Returns None if the model has no vision tower. Also returns None, with a
    warning in the log, if settings of its image processor are missing, cannot be read, or do not
    fit the vision tower.
    """
    if model.vision_tower is None:
        return None
    try:
        processor = Qwen3VLImageProcessor(**_settings(path))
        _check(processor, config["vision_config"])
        token_id = int(config["image_token_id"])
        image_token = str(tokenizer.convert_ids_to_tokens(token_id))
        found = QwenImages(model, processor, image_token, token_id)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        log.warning("model %s: images disabled: %s: %s", label, type(error).__name__, error)
        return None
    return Vision(found)


def _settings(path: Path) -> dict[str, Any]:
    """Return the settings of a model's image processor, as arguments of mlx-vlm's class for it.

    `path`: the model's folder, with one or both of the files `PROCESSOR_FILES`. Raises OSError if a
    file cannot be read, LookupError if a required setting is in neither file, and ValueError,
    TypeError or AttributeError if a file or a setting has another form than expected.
    """
    raw: dict[str, Any] = {}
    for name in PROCESSOR_FILES:
        if (path / name).is_file():
            read = json.loads((path / name).read_bytes())
            raw |= read.get("image_processor") or {} if name == PROCESSOR_FILES[1] else read
    size = raw.get("size") or {}
    found = {name: raw[name] for name in _SAME if raw.get(name) is not None}
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        found[name] = int(raw[name])
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        found[name] = int(raw[name] if raw.get(name) is not None else size[edge])
    return found


def _check(processor: Any, tower: Mapping[str, Any]) -> None:
    """Raise ValueError unless the processor makes patches of the vision tower's size.

    `processor`: mlx-vlm's image processor. `tower`: the model's `vision_config`; sizes that it does
    not state are not checked.
    """
    for mine, its in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "spatial_merge_size"),
    ):
        if its in tower and getattr(processor, mine) != tower[its]:
            raise ValueError(
                f"{mine} is {getattr(processor, mine)} in {PROCESSOR_FILES[0]}, but {tower[its]} "
                "in config.json"
            )
