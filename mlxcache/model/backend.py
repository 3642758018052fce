"""Choice of the library that runs a model: mlx-lm, or mlx-vlm for families that mlx-lm lacks.

Does not import mlx-vlm, which most models do not need. All functions may be called on any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mlx_lm.processors import PROCESSORS
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from mlxcache.errors import ModelError
from mlxcache.model.folder import tensor_index, tensor_names

Backend = Literal["mlx-lm", "mlx-vlm"]

VLM_VERSION = "0.7.10"
"""The version of mlx-vlm with which the families were tested. Others are refused."""

INSTALL = f"pip install 'mlxcache[vlm]' && pip install --no-deps mlx-vlm=={VLM_VERSION}"


@dataclass(frozen=True, slots=True)
class Family:
    """The way in which models of one family are called if mlx-vlm runs them.

    `positions`: the form of the positions that the language model takes: "caches" if it reads them
    from the caches' offsets and keeps nothing between calls, "rows" for shape (rows, n), "axes" for
    (3, rows, n). `compiled`: the functions that mlx-vlm compiles are right for every n; if not,
    they run uncompiled. `images`: images can be fed to those models that have a vision tower.
    """

    positions: Literal["caches", "rows", "axes"]
    compiled: bool = True
    images: bool = False


FAMILIES: Mapping[str, Family] = {
    "cohere2_moe": Family("caches"),
    "glm5_next": Family("caches"),
    "hy_v4": Family("caches", compiled=False),
    "mimo_v2": Family("caches"),
    "minimax_m3": Family("rows"),
    "qwen3_5": Family("axes", images=True),
    "qwen3_5_moe": Family("axes", images=True),
    "qwen3_5_moe_text": Family("axes"),
    "qwen3_5_text": Family("axes"),
    "qwen3_vl": Family("axes", images=True),
    "qwen3_vl_moe": Family("axes", images=True),
    "qwen4_exp": Family("axes", images=True),
    "step3p7": Family("caches"),
}
"""Families that mlx-vlm may run, by model_type. Each passes the tests of the engine."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of a model's image processor; those in the second one count more."""

_TOWERS = {"visual", "vision_tower"}  # parts of the names of a vision tower's weights

_NAME = re.compile(r"[\w-]+")


def choose_backend(config: Mapping[str, Any], model: str, *, images: bool = False) -> Backend:
    """Return the library that runs the model with the configuration `config`.

    mlx-vlm, if it can feed images and `images` (see `has_images`) is True. Of all other models,
    mlx-lm runs those that it has a module for, and mlx-vlm those of the other `FAMILIES`. Python
    code in the model's folder is left to mlx-lm: mlx-vlm would run it without asking. Raises
    ModelError, which says what can be done.
    """
    kind = str(config.get("model_type"))
    if config.get("model_file") is not None:
        return "mlx-lm"
    if images and may_see(config) and vlm_version() == VLM_VERSION:
        return "mlx-vlm"
    if mlx_lm_has(config):
        return "mlx-lm"
    if kind not in FAMILIES:
        raise ModelError(
            f"{model} is of type {kind}. mlx-lm {version('mlx-lm')} does not support it, and it is "
            "none of the types that are tested with mlx-vlm; a newer version of mlxcache may "
            "support it."
        )
    found = vlm_version()
    if found != VLM_VERSION:
        here = "which is not installed" if found is None else f"and {found} is installed"
        raise ModelError(
            f"{model} is of type {kind}, which needs mlx-vlm {VLM_VERSION}, {here}. Install it "
            f"with: {INSTALL}"
        )
    return "mlx-vlm"


def may_see(config: Mapping[str, Any]) -> bool:
    """Return whether mlx-vlm, once installed, can feed images to a model of this kind."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.images and bool(config.get("vision_config"))


def takes_images(config: Mapping[str, Any], backend: Backend, *, images: bool) -> bool:
    """Return whether a model takes images when `backend` runs it; `images`: see `has_images`."""
    if backend == "mlx-vlm":
        return images and may_see(config)
    kind = config.get("processor_type", config.get("model_type"))
    return bool(config.get("vision_config")) and kind in PROCESSORS


def has_images(path: Path) -> bool:
    """Return whether a folder has weights of a vision tower and settings of its processor.

    Conversions to text only may have the settings, but not the weights.
    """
    if not any((path / name).is_file() for name in PROCESSOR_FILES):
        return False
    try:
        return any(not _TOWERS.isdisjoint(name.split(".")) for name in _tensors(path))
    except (OSError, ValueError):
        return False


def _tensors(path: Path) -> Iterator[str]:
    if listed := tensor_index(path):
        yield from listed
        return
    for file in sorted(path.glob("model*.safetensors")):
        yield from tensor_names(file) or ()


def mlx_lm_has(config: Mapping[str, Any]) -> bool:
    kind = str(config.get("model_type"))
    architectures = config.get("architectures") or ()
    for name in (architectures,) if isinstance(architectures, str) else architectures:
        if (found := MODEL_ARCHITECTURE_REMAPPING.get((kind, name))) is not None:
            kind = found
            break
    else:
        kind = MODEL_REMAPPING.get(kind, kind)
    return bool(_NAME.fullmatch(kind)) and find_spec(f"mlx_lm.models.{kind}") is not None


def vlm_version() -> str | None:
    try:
        return version("mlx-vlm")
    except PackageNotFoundError:
        return None
