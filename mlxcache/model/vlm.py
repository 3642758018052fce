"""Models of mlx-vlm, called as models of mlx-lm are: their caches, and their images.

The only module that imports mlx_vlm; it is imported when the first such model is loaded. mlx-vlm
has copies of mlx-lm's cache classes. Those that its models only call are replaced by mlx-lm's own,
which are cut, stored and batched as in any other model. Those with methods of mlx-vlm's own keep
their class and have an adapter here. MLX thread only.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from mlx_lm.utils import load_config
from transformers import AutoProcessor

from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.adapters import Recurrent, Sliced, register
from mlxcache.model.arrays import appended
from mlxcache.model.backend import FAMILIES, PROCESSOR_FILES, Family
from mlxcache.model.grouped import GroupRows, RecentRows
from mlxcache.model.vision import Grid, Pixels, Processed, Rows, Vision
from mlxcache.types import Tokens


@contextmanager
def _processors_unchanged() -> Iterator[None]:
    """Undo what mlx-vlm's modules change in transformers.

    Importing a module of a model replaces `AutoProcessor.from_pretrained` by a function that runs
    Python code of a model's folder without asking.
    """
    original = vars(AutoProcessor)["from_pretrained"]
    try:
        yield
    finally:
        AutoProcessor.from_pretrained = original


with _processors_unchanged():
    from mlx_vlm import utils as vlm_utils
    from mlx_vlm.models import cache as vlm
    from mlx_vlm.models.cache import make_prompt_cache
    from mlx_vlm.models.glm5_next.language import Glm5NextAttention
    from mlx_vlm.models.hy_v4.cache import HyV4KVCache
    from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor
    from mlx_vlm.models.qwen4_exp.language import QSAKVCache

log = logging.getLogger("mlxcache.model")

_SAME = ("do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std")


class VlmModel(nn.Module):  # type: ignore[misc]
    """The language model of a model of mlx-vlm, called as a model of mlx-lm is.

    Some of mlx-vlm's modules keep positions from one call to the next, which are wrong for another
    sequence. Every call of such a module passes the positions of its tokens, so the kept ones are
    not used.
    """

    unquantised = "this model is run by mlx-vlm, which is not tested with quantised KV."

    def __init__(
        self,
        language_model: nn.Module,
        family: Family,
        model_type: str,
        vision_tower: nn.Module | None = None,
    ):
        super().__init__()
        self.language_model = language_model
        self.vision_tower = vision_tower
        self.model_type = model_type
        self._family = family

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self.language_model.layers  # type: ignore[no-any-return]

    def make_cache(self) -> list[Any]:
        made = make_prompt_cache(self.language_model)
        return [_reusable(*pair) for pair in zip(made, self.layers, strict=True)]

    def embed(self, ids: mx.array) -> mx.array:
        return self.language_model.model.embed_tokens(ids)  # type: ignore[no-any-return]

    def __call__(
        self,
        tokens: mx.array,
        cache: Sequence[Any],
        *,
        input_embeddings: mx.array | None = None,
        positions: mx.array | None = None,
        shift: mx.array | None = None,
        deepstack: mx.array | None = None,
    ) -> mx.array:
        """Feed `tokens`, shape (rows, n), and return the logits, shape (rows, n, vocabulary).

        `positions`: on three axes, shape (rows, n, 3). By default they continue the count of tokens
        in `cache`, plus `shift`, shape (rows,). `deepstack`: shape (1, n, layers, hidden):
        `deepstack[:, :, i]` is added to the output of layer i.
        """
        inputs: dict[str, mx.array] = {}
        if self._family.positions != "caches":
            places = _next_positions(cache, tokens, shift) if positions is None else positions
            inputs["position_ids"] = _in_form(places, self._family)
        if input_embeddings is not None:
            inputs["inputs_embeds"] = input_embeddings
        if deepstack is not None:
            inputs["visual_pos_masks"] = mx.ones(tokens.shape, mx.bool_)
            inputs["deepstack_visual_embeds"] = deepstack[0].swapaxes(0, 1)
        with nullcontext() if self._family.compiled else _uncompiled():
            logits: mx.array = self.language_model(tokens, cache=cache, **inputs).logits
        return logits


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run functions that `mx.compile` has wrapped as they are.

    The indexer of the family `hy_v4` is compiled for any shape, but keeps the number of keys of its
    first call.
    """
    if os.environ.get("MLX_DISABLE_COMPILE"):
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def _next_positions(cache: Sequence[Any], tokens: mx.array, shift: mx.array | None) -> mx.array:
    offset = next(slot.offset for slot in kv.flatten(cache) if hasattr(slot, "offset"))
    rows, count = tokens.shape
    begin = offset[:, None] if isinstance(offset, mx.array) else offset
    if shift is not None:
        begin = begin + shift[:, None]
    return mx.broadcast_to(begin + mx.arange(count), (rows, count))


def _in_form(positions: mx.array, family: Family) -> mx.array:
    if family.positions == "rows":
        return positions
    if positions.ndim == 2:
        return mx.broadcast_to(positions, (3, *positions.shape))
    return positions.transpose(2, 0, 1)


def load_model(path: Path, *, images: bool = False) -> tuple[VlmModel, dict[str, Any]]:
    """Load the model in folder `path` lazily, and its configuration as mlx-lm reads it."""
    config = load_config(path)
    _check(config, path)
    with _processors_unchanged():
        whole = vlm_utils.load_model(path, lazy=True)
    return _wrapped(whole, config, images=images), config


def make_model(config: Mapping[str, Any], *, images: bool = False) -> VlmModel:
    """Make the model of a configuration, with weights that are never computed."""
    with _processors_unchanged():
        owner, _ = vlm_utils.get_model_and_args(dict(config))
        copied = {"text_config": {}, "vision_config": {}, "audio_config": {}} | dict(config)
        args = owner.ModelConfig.from_dict(copied)
        parts = ["text", "vision", "perceiver", "projector", "audio"]
        args = vlm_utils.update_module_configs(args, owner, copied, parts)
        return _wrapped(owner.Model(args), config, images=images)


def _wrapped(whole: nn.Module, config: Mapping[str, Any], *, images: bool) -> VlmModel:
    kind = str(config["model_type"])
    family = FAMILIES[kind]
    tower = whole.vision_tower if images and family.images else None
    model = VlmModel(whole.language_model, family, kind, tower)
    model.eval()
    return model


def _check(config: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError unless mlx-vlm would load exactly the family that `config` names.

    Else it would run a `model_file` without asking, take other code by the names of architectures,
    and read files outside the model's folder if its configuration names them.
    """
    kind = config.get("model_type")
    sections = (config, *(config.get(name) or {} for name in ("text_config", "llm_config")))
    if config.get("model_file") is not None:
        raise ModelError(f"{path} brings its own Python code, which mlx-vlm must not run.")
    if vlm_utils.get_model_type(dict(config)) != kind or kind not in FAMILIES:
        raise ModelError(f"{path}: mlx-vlm would not load it as model type {kind}.")
    if any("ple_storage" in one for one in sections) or (path / "offload_index.json").exists():
        raise ModelError(f"{path} keeps weights in files apart, which is not supported.")


# -- caches ----------------------------------------------------------------------------------------


class ArraysSlots(Recurrent):
    portable = False

    def state(self, slot: Any) -> Any:
        return (tuple(slot.cache),)

    def set_state(self, slot: Any, state: Any) -> None:
        slot.cache = list(state[0])


class MiniMaxSlots(Sliced):
    portable = False

    def filled(self, slot: Any) -> bool:
        return not slot.kv_cache.empty()

    def arrays(self, slot: Any) -> list[mx.array]:
        return [slot.kv_cache.keys, slot.kv_cache.values, slot.index_keys]

    def put(self, slot: Any, index: int, array: mx.array) -> None:
        if index == 2:
            slot.index_keys = array
        else:
            super().put(slot.kv_cache, index, array)


class QsaCache(QSAKVCache):  # type: ignore[misc]
    """Cache of a layer of Qwen4; keys of its indexer and positions are appended in place.

    mlx-vlm's class copies them at every step. `index_rows`: shape (1, 1, capacity, dim);
    `position_rows`: (1, 3, capacity, 1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.index_rows: mx.array | None = None
        self.position_rows: mx.array | None = None

    def update_indexer(self, keys: mx.array, position_ids: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys, shape (1, n, dim), and positions, shape (3, 1, n); return all so far."""
        end = self.offset + keys.shape[1]
        new = keys[:, None], position_ids.swapaxes(0, 1)[..., None].astype(mx.int32)
        self.index_rows = appended(self.index_rows, new[0], self.offset, self.step)
        self.position_rows = appended(self.position_rows, new[1], self.offset, self.step)
        return self.index_rows[:, 0, :end], self.position_rows[0, :, None, :end, 0]

    @property
    def state(self) -> tuple[mx.array | None, ...]:
        return self.keys, self.values, self.index_rows, self.position_rows, self.index_block_keys


class QsaSlots(Sliced):
    portable = False

    def arrays(self, slot: Any) -> list[mx.array]:
        return [slot.keys, slot.values, slot.index_rows, slot.position_rows]

    def put(self, slot: Any, index: int, array: mx.array) -> None:
        setattr(slot, ("keys", "values", "index_rows", "position_rows")[index], array)

    def end_at(self, slot: Any, offset: int) -> None:
        slot.offset = offset
        slot.clear_index_blocks()  # means of keys, which the next pass computes again


class Pools:
    """Pooled keys of GLM-5-Next's indexer, in place of mlx-vlm's `PoolingCache`."""

    def __init__(self, ratio: int, size: int):
        self._rows = GroupRows(ratio, size)
        self._recent = RecentRows(1, [self._rows])
        self.parts: list[Any] = [self._recent, self._rows]

    @property
    def offset(self) -> int:
        return self._rows.groups

    def accumulate_windows(
        self, keys: mx.array, gates: mx.array, offset: int
    ) -> tuple[mx.array, mx.array, int]:
        """Append the keys and gates of new tokens, shape (1, n, dim) each.

        Returns those of the groups (mlx-vlm's windows) that the new tokens complete, and the
        position of the first of their tokens.
        """
        self._rows.begin(keys.shape[1])
        self._recent.append(keys)
        kept, kept_gates = self._recent.pending_kv, self._recent.pending_gate
        if kept is not None and kept_gates is not None:
            offset -= kept.shape[1]
            keys = mx.concatenate([kept, keys], axis=1)
            gates = mx.concatenate([kept_gates, gates], axis=1)
        closed = keys.shape[1] // self._rows.ratio * self._rows.ratio
        self._recent.set_pending(keys[:, closed:], gates[:, closed:])
        return keys[:, :closed], gates[:, :closed], offset

    def update_and_fetch(self, pooled: mx.array) -> mx.array:
        """Append the keys of newly closed groups, (1, groups, dim); return those of all groups."""
        if pooled.shape[1]:
            self._rows.add(pooled)
        found = self._rows.vectors()
        return pooled[:, :0] if found is None else found


class _AllValid:
    """Reports that no token is padding, as in one sequence, in place of a cache that stores it."""

    def __init__(self, latents: KVCache):
        self._latents = latents

    def update_and_fetch(self, valid: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return mx.ones((1, 1, self._latents.offset, 1), mx.bool_), values


class _NoProjections:
    """Stores nothing in place of keys and values of all heads; the model computes them again."""

    def size(self) -> int:
        return -1  # the length of no prompt, so that the model reads and stores nothing here


class GlmCache:
    """Cache of a layer of GLM-5-Next with sparse attention: latents, and pooled keys.

    The model takes the parts by index; without an indexer (`size` None), the first and the last.
    """

    def __init__(self, ratio: int = 1, size: int | None = None):
        latents = KVCache()
        self.parts: list[Any] = [latents]
        self._read: tuple[Any, ...] = (latents, _NoProjections())
        if size is not None:
            pools = Pools(ratio, size)
            self.parts += pools.parts
            self._read = (latents, _AllValid(latents), pools, _NoProjections())

    def __getitem__(self, index: int) -> Any:
        return self._read[index]

    @property
    def offset(self) -> int:
        return int(self.parts[0].offset)


register(
    {
        vlm.ArraysCache: ArraysSlots("ArraysCache", batchable=True),
        MiniMaxM3KVCache: MiniMaxSlots("MiniMaxM3KVCache", ("0", "1", "2"), batchable=False),
        QsaCache: QsaSlots("QSAKVCache", ("0", "1", "2", "3"), batchable=False),
    },
    [GlmCache],
)


def _reusable(cache: Any, layer: Any) -> Any:
    attention: Any = getattr(layer, "self_attn", None)
    if type(attention) is Glm5NextAttention:
        indexer = attention.indexer
        return GlmCache() if indexer is None else GlmCache(indexer.index_kpool, indexer.head_dim)
    if type(cache) is vlm.CacheList:
        return CacheList(*(_reusable(part, None) for part in cache.caches))
    if type(cache) in (vlm.KVCache, vlm.ConcatenateKVCache, HyV4KVCache):
        return KVCache()
    if type(cache) is QSAKVCache:
        return QsaCache()
    if type(cache) is vlm.RotatingKVCache:
        return RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    return cache


# -- images ----------------------------------------------------------------------------------------


class QwenImages:
    """Image processor and vision tower of Qwen3-VL, Qwen3.5 and Qwen4; see `vision.ImageModel`.

    An image is resized to whole squares of pixels, each of which becomes one token. transformers'
    own way to make the processor would need PyTorch, and might run Python code of the model.
    """

    def __init__(self, model: VlmModel, processor: Any, image_token: str, token_id: int):
        self.image_token = image_token
        self.token_id = token_id
        self._model, self._processor = model, processor
        self._merge = int(processor.merge_size)
        side = processor.patch_size * processor.merge_size
        self.most_tokens = int(processor.max_pixels) // side**2

    def count(self, height: int, width: int) -> int:
        sides = self._processor._resolved_size(height, width)
        side = self._processor.patch_size * self._merge
        return int(sides[0] // side * (sides[1] // side))

    def process(self, rgb: npt.NDArray[np.uint8]) -> Processed:
        made = self._processor([rgb.transpose(2, 0, 1)])
        _, rows, columns = (int(n) for n in made["image_grid_thw"][0])
        grid = rows // self._merge, columns // self._merge
        text = self.image_token * (grid[0] * grid[1])
        return Processed(text, np.asarray(made["pixel_values"], np.float32), grid)

    def rows(self, ids: Tokens, pixels: Pixels, grid: Grid | None) -> Rows:
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
        rows = {"input_embeddings": self._model.embed(mx.array(ids))}
        if self._levels:
            count, hidden = rows["input_embeddings"].shape
            empty = mx.zeros((count, self._levels, hidden), rows["input_embeddings"].dtype)
            rows["deepstack"] = empty
        return rows

    @property
    def _levels(self) -> int:
        tower: Any = self._model.vision_tower
        return len(tower.deepstack_visual_indexes or ())


def load_vision(
    model: VlmModel,
    tokenizer: Any,
    config: Mapping[str, Any],
    path: Path,
    *,
    label: str,
) -> Vision | None:
    """Make the image processor of a model of mlx-vlm; None, with a warning, if that fails."""
    if model.vision_tower is None:
        return None
    try:
        processor = Qwen3VLImageProcessor(**_settings(path))
        _check_sizes(processor, config["vision_config"])
        token_id = int(config["image_token_id"])
        image_token = str(tokenizer.convert_ids_to_tokens(token_id))
        found = QwenImages(model, processor, image_token, token_id)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        log.warning("model %s: images disabled: %s: %s", label, type(error).__name__, error)
        return None
    return Vision(found)


def _settings(path: Path) -> dict[str, Any]:
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


def _check_sizes(processor: Any, tower: Mapping[str, Any]) -> None:
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
