"""Models of mlx-vlm, loaded and called as models of mlx-lm are. MLX thread only.

Only this module and `vlm_caches` import mlx_vlm. They are imported when the first such model is
loaded.
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

    mlx-vlm's modules keep positions from one call to the next, which are wrong for another
    sequence. Every call passes the positions of its tokens, so these are not used. `family`: how
    the model takes them. `unquantised`: why its KV cannot be quantised.
    """

    unquantised = "this model is run by mlx-vlm, which is not tested with quantised KV."

    def __init__(self, language_model: nn.Module, family: Family, model_type: str):
        super().__init__()
        self.language_model = language_model
        self.model_type = model_type
        self._family = family

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers, in their order."""
        found: Sequence[nn.Module] = self.language_model.layers
        return found

    def make_cache(self) -> list[Any]:
        """Create empty caches for one sequence."""
        return replace_caches(make_prompt_cache(self.language_model), self.layers)

    def __call__(
        self,
        tokens: mx.array,
        cache: Sequence[Any],
        input_embeddings: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Feed `tokens`, shape (rows, n), and return the logits, shape (rows, n, V).

        `cache`: the caches, which hold what was fed before. `input_embeddings`: vectors in place of
        those of the tokens, shape (rows, n, hidden). `positions`: those of the tokens, in the form
        that `Family.positions` describes; by default they follow those in `cache`.
        """
        inputs: dict[str, mx.array] = {}
        if self._family.positions != "caches":
            if positions is None:
                positions = _next_positions(cache, tokens, self._family)
            inputs["position_ids"] = positions
        if input_embeddings is not None:
            inputs["inputs_embeds"] = input_embeddings
        with nullcontext() if self._family.compiled else _uncompiled():
            logits: mx.array = self.language_model(tokens, cache=cache, **inputs).logits
        return logits


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Context manager in which functions that `mx.compile` has wrapped run as they are.

    The indexer of Hy4 is compiled for any shape, but keeps the number of keys of its first call.
    """
    if os.environ.get("MLX_DISABLE_COMPILE"):
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def _next_positions(cache: Sequence[Any], tokens: mx.array, family: Family) -> mx.array:
    """Return the positions of `tokens`, shape (rows, n), which follow those in `cache`."""
    offset = next(slot.offset for slot in kv.flatten(cache) if hasattr(slot, "offset"))
    rows, count = tokens.shape
    begin = offset[:, None] if isinstance(offset, mx.array) else offset
    made = mx.broadcast_to(begin + mx.arange(count), (rows, count))
    return made if family.positions == "rows" else mx.broadcast_to(made, (3, rows, count))


def load_model(path: Path) -> tuple[VlmModel, dict[str, Any]]:
    """Load the language model in folder `path`; each weight is read when it is first used.

    Returns it with its configuration, as mlx-lm reads it. Raises ModelError for a model that
    mlx-vlm must not load, and what mlx-vlm raises.
    """
    config = load_config(path)
    _check(config, path)
    with _processors_unchanged():
        whole = vlm_utils.load_model(path, lazy=True)
    return _wrapped(whole, config), config


def make_model(config: Mapping[str, Any]) -> VlmModel:
    """Make the language model of a configuration, with weights that are never computed."""
    with _processors_unchanged():
        owner, _ = vlm_utils.get_model_and_args(dict(config))
        copied = {"text_config": {}, "vision_config": {}, "audio_config": {}} | dict(config)
        args = owner.ModelConfig.from_dict(copied)
        parts = ["text", "vision", "perceiver", "projector", "audio"]
        args = vlm_utils.update_module_configs(args, owner, copied, parts)
        return _wrapped(owner.Model(args), config)


def _wrapped(whole: nn.Module, config: Mapping[str, Any]) -> VlmModel:
    kind = str(config["model_type"])
    model = VlmModel(whole.language_model, FAMILIES[kind], kind)
    model.eval()
    return model


def _check(config: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError unless mlx-vlm would load exactly the family that `config` names.

    It would run a `model_file` without asking, take other code by the names of architectures, and
    read files that a configuration names outside the folder.
    """
    kind = config.get("model_type")
    sections = (config, *(config.get(name) or {} for name in ("text_config", "llm_config")))
    if config.get("model_file") is not None:
        raise ModelError(f"{path} brings its own Python code, which mlx-vlm must not run.")
    if vlm_utils.get_model_type(dict(config)) != kind or kind not in FAMILIES:
        raise ModelError(f"{path}: mlx-vlm would not load it as model type {kind}.")
    if any("ple_storage" in one for one in sections) or (path / "offload_index.json").exists():
        raise ModelError(f"{path} keeps weights in files apart, which is not supported.")
