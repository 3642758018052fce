"""Models of mlx-vlm, loaded and called as models of mlx-lm are. MLX thread only.

Only this module, `vlm_caches` and `vlm_vision` import mlx_vlm. They are imported when the first
such model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import load_config
from transformers import AutoProcessor

from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.backend import FAMILIES, Family


@contextmanager
def _processors_unchanged() -> Iterator[None]:
    """Context manager that undoes what mlx-vlm's modules change in transformers.

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
    from mlx_vlm.models.cache import make_prompt_cache

    from mlxcache.model.vlm_caches import replace_caches


class VlmModel(nn.Module):  # type: ignore[misc]
    """The language model of a model of mlx-vlm, called as a model of mlx-lm is.

    Some of mlx-vlm's modules keep positions from one call to the next, which are wrong for another
    sequence. Every call of such a module passes the positions of its tokens, so the kept ones are
    not used. `family`: properties of the model's family, such as the form of these positions.
    `vision_tower`: the part that makes embeddings of images, None if no images are fed.
    `unquantised`: the reason, for users, why the model's KV cannot be quantised.
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
        """The layers of the language model, in the order in which they are computed."""
        found: Sequence[nn.Module] = self.language_model.layers
        return found

    def make_cache(self) -> list[Any]:
        """Create empty caches for one sequence: one for each layer, in the order of `layers`."""
        return replace_caches(make_prompt_cache(self.language_model), self.layers)

    def embed(self, ids: mx.array) -> mx.array:
        """Return the embeddings of tokens of text, shape (n, hidden), for `ids` of shape (n,)."""
        found: mx.array = self.language_model.model.embed_tokens(ids)
        return found

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

        `cache`: the caches, which hold what was fed before. `input_embeddings`: vectors in place of
        the embeddings of `tokens`, shape (rows, n, hidden). `positions`: positions of the tokens on
        three axes, shape (rows, n, 3). By default they continue the count of tokens in `cache`,
        plus `shift`, shape (rows,), if given. A family that reads positions from its caches ignores
        both. `deepstack`: vectors of one row, shape (1, n, layers, hidden): `deepstack[:, :, i]` is
        added to the output of layer i. They are 0 at tokens of text.
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
    """Context manager in which functions that `mx.compile` has wrapped run as they are.

    So they are right for every length: the indexer of the family `hy_v4` is compiled for any
    shape, but keeps the number of keys of its first call.
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
    """Return the positions that follow those in `cache`, shape (rows, n), the shape of `tokens`.

    `shift`: number added to all positions of each row, shape (rows,); None adds nothing.
    """
    offset = next(slot.offset for slot in kv.flatten(cache) if hasattr(slot, "offset"))
    rows, count = tokens.shape
    begin = offset[:, None] if isinstance(offset, mx.array) else offset
    if shift is not None:
        begin = begin + shift[:, None]
    return mx.broadcast_to(begin + mx.arange(count), (rows, count))


def _in_form(positions: mx.array, family: Family) -> mx.array:
    """Return positions in the form that the language model takes, `family.positions`.

    `positions`: shape (rows, n), or (rows, n, 3) if they differ by axis. The result has the shape
    (rows, n) for the form "rows", else (3, rows, n).
    """
    if family.positions == "rows":
        return positions
    if positions.ndim == 2:
        return mx.broadcast_to(positions, (3, *positions.shape))
    return positions.transpose(2, 0, 1)


def load_model(path: Path, *, images: bool = False) -> tuple[VlmModel, dict[str, Any]]:
    """Load the model in folder `path`; each weight is read when it is first used.

    `images`: include its vision tower, if the server can feed images to its family; else the model
    takes text only. Returns the model, and its configuration as mlx-lm reads it. Raises ModelError
    for a model that mlx-vlm must not load. Errors of mlx-vlm are raised unchanged.
    """
    config = load_config(path)
    _check(config, path)
    with _processors_unchanged():
        whole = vlm_utils.load_model(path, lazy=True)
    return _wrapped(whole, config, images=images), config


def make_model(config: Mapping[str, Any], *, images: bool = False) -> VlmModel:
    """Make the model of a configuration, with weights that are placeholders, never computed.

    `config`: content of the model's `config.json`. `images`: include its vision tower, if the
    server can feed images to its family; else the model takes text only. Errors of mlx-vlm are
    raised unchanged.
    """
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

    `path`: the model's folder. A model with weights outside its weight files is refused too.

    Without this check, mlx-vlm would run a `model_file` without asking, take other code by the
    names of architectures, and read files outside the model's folder if its configuration names
    them.
    """
    kind = config.get("model_type")
    sections = (config, *(config.get(name) or {} for name in ("text_config", "llm_config")))
    if config.get("model_file") is not None:
        raise ModelError(f"{path} brings its own Python code, which mlx-vlm must not run.")
    if vlm_utils.get_model_type(dict(config)) != kind or kind not in FAMILIES:
        raise ModelError(f"{path}: mlx-vlm would not load it as model type {kind}.")
    if any("ple_storage" in one for one in sections) or (path / "offload_index.json").exists():
        raise ModelError(f"{path} keeps weights in files apart, which is not supported.")
