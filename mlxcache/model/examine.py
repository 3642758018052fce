"""Cache layout of a model, determined without reading its weights.

Weights are loaded lazily and the model is fed without computing, because MLX has the shapes and
dtypes of arrays that were never evaluated. So a model larger than memory can be examined too. MLX
thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import _get_classes, load_config

from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.adapters import (
    Checkpointed,
    Chunked,
    Grouped,
    Recent,
    Recurrent,
    Ring,
    Sliced,
    adapter_of,
    class_name,
)
from mlxcache.model.backend import Backend, choose_backend, may_see, takes_images
from mlxcache.model.context import context_length, native_length
from mlxcache.model.hub import here, outline
from mlxcache.model.kv import Layout
from mlxcache.model.load import ModelSpec, load, why_unseen
from mlxcache.model.pair import unfit
from mlxcache.types import ModelInfo

Kind = Literal[
    "sliceable", "latent", "grouped", "window", "recurrent", "chunked", "recent", "ring", "unknown"
]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of a model that cache in the same way.

    `layers`: number of layers. `kinds`: kinds of the slots in one layer, those that are easier
    to reuse first; "sliceable" is the easiest and "unknown" the last. `size`: tokens of a
    window or chunk, None if there is none. `cls`: names of mlx-lm's cache classes, joined by "
    + ". `bytes_per_token` and `checkpoint_bytes` are those of one layer.
    """

    layers: int
    kinds: tuple[Kind, ...]
    size: int | None
    cls: str
    bytes_per_token: int
    checkpoint_bytes: int


@dataclass(frozen=True, slots=True)
class Examined:
    """Description (`info`), cache layout and groups of layers of a model, from its files.

    `unquantised`: the reason why its KV cannot be quantised, or None. `undrafted`: the reason why
    it cannot be used with a draft model, or None. `unseen`: why its images are not fed, although it
    has a vision tower, or None.
    """

    info: ModelInfo
    layout: Layout
    groups: tuple[Group, ...]
    unquantised: str | None = None
    undrafted: str | None = None
    unseen: str | None = None


def examine(spec: ModelSpec, kv_bits: int | None = None) -> Examined:
    """Determine how a model's layers cache and how many bytes they need, without its weights.

    `kv_bits`: bits of stored keys and values, None for the model's dtype. If the model is not on
    this machine, only its config.json is downloaded, and random weights that are never computed
    replace its own. With a draft model, both models are examined as one, and both must be on this
    machine. Blocks for a download. Raises ModelError if the model cannot be found or fed, or if it
    cannot be used with `kv_bits` or the draft model.
    """
    try:
        if spec.draft is not None and None in (here(spec.model, spec.revision), here(spec.draft)):
            raise ModelError(
                f"{spec.model} and {spec.draft} cannot be examined together before both are on "
                "this machine: leave out --draft-model"
            )
        if here(spec.model, spec.revision) is None:
            path, weights = outline(spec.model, spec.revision)
            model, info = _outlined(spec, path, weights)
            unseen = why_unseen(spec, load_config(path)) if info.backend == "mlx-lm" else None
        else:
            loaded = load(spec, lazy=True)
            model, unseen = loaded.model, loaded.unseen
            info = replace(loaded.info, has_images=loaded.vision is not None)
        layout = kv.survey(model, kv_bits=kv_bits, evaluate=False)
        unquantised = _unquantised(model)
        if info.has_images and info.backend == "mlx-vlm":  # mlx-lm may run it without images
            with suppress(ModelError):
                unquantised = examine(replace(spec, images=False)).unquantised
        return Examined(info, layout, groups(model, layout), unquantised, _undrafted(model), unseen)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{spec.model} cannot be fed: {type(error).__name__}: {error}") from error


def _unquantised(model: Any) -> str | None:
    try:
        kv.survey(model, kv_bits=8, evaluate=False)
    except ModelError as error:
        return str(error).partition(": ")[2]
    return None


def _undrafted(model: Any) -> str | None:
    found = unfit(model)
    return f"this model has {', '.join(found)}." if found else None


def _outlined(spec: ModelSpec, path: Path, weights: int) -> tuple[nn.Module, ModelInfo]:
    """Build a model from the config.json in `path`; return it with its description.

    Its weights are random and never computed. `weights`: bytes of the model's own weights, for the
    description.
    """
    config = load_config(path)
    images = spec.images and spec.adapter is None  # its weights are not here to be looked at
    backend = choose_backend(config, spec.model, images=images)
    model = _made(config, backend, images=images and may_see(config))
    model.set_dtype(_dtype(config))
    native = native_length(config)
    length = context_length(native, spec.context)
    info = ModelInfo(
        id=spec.id or spec.model,
        context_length=length,
        max_context_length=native or length,
        weights_bytes=weights,
        architecture=str(config.get("model_type")),
        has_thinking=False,
        has_tools=False,
        is_demo=False,
        has_images=takes_images(config, backend, images=images),
        created=0,
        backend=backend,
    )
    return model, info


def _made(config: Mapping[str, Any], backend: Backend, *, images: bool) -> nn.Module:
    """Make the model of a configuration, with random weights that are not computed.

    `images`: with its vision tower, if mlx-vlm runs it.
    """
    if backend == "mlx-vlm":
        from mlxcache.model.vlm import make_model  # noqa: PLC0415 - may be absent

        return make_model(config, images=images)
    model_class, args_class = _get_classes(dict(config))
    return model_class(args_class.from_dict(config))


def _dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """Return the dtype that a configuration states, or bfloat16 if it states none."""
    sections = (config, config.get("text_config") or {})
    names = (one.get("dtype") or one.get("torch_dtype") for one in sections)
    return _DTYPES.get(next(filter(None, names), ""), mx.bfloat16)


_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def groups(model: Any, layout: Layout) -> tuple[Group, ...]:
    """Group the layers of `model` by the way they cache, in order of first occurrence."""
    caches = layout.make()
    count = max(2, kv.first_write(kv.flatten(caches)))
    model(mx.zeros((1, count), mx.int32), cache=caches)
    counts: dict[tuple[Any, ...], int] = {}
    for cache in caches:
        slots = [slot for slot in kv.flatten([cache]) if _holds(slot)]
        if slots:
            made = _group(slots)
            counts[made] = counts.get(made, 0) + 1
    return tuple(Group(count, *made) for made, count in counts.items())


def _holds(slot: Any) -> bool:
    adapter = adapter_of(slot)
    return not isinstance(adapter, Sliced) or adapter.filled(slot)


def _group(slots: Sequence[Any]) -> tuple[tuple[Kind, ...], int | None, str, int, int]:
    """Return the fields of `Group`, except the number of layers, for a layer with these slots.

    The fields are the kinds, the window's or chunk's tokens, the class names, the bytes per token
    and the bytes of a checkpoint.
    """
    found = dict(map(_kind, slots))
    linear = [slot for slot in slots if isinstance(adapter_of(slot), Sliced)]
    rows = (array for slot in linear for array in kv.arrays_of(slot))
    return (
        tuple(sorted(found, key=_DEMANDS.index)),
        max((size for size in found.values() if size is not None), default=None),
        " + ".join(dict.fromkeys(class_name(slot) for slot in slots)),
        sum(a.shape[1] * a.shape[3] * a.dtype.size for a in rows),
        sum(
            kv.most_bytes(slot, adapter)
            for slot in slots
            if isinstance(adapter := adapter_of(slot), Checkpointed)
        ),
    )


_DEMANDS: tuple[Kind, ...] = (
    "sliceable", "latent", "grouped", "window", "recurrent", "chunked", "recent", "ring", "unknown",
)  # fmt: skip


def _kind(slot: Any) -> tuple[Kind, int | None]:
    adapter = adapter_of(slot)
    if isinstance(adapter, Sliced):
        window = adapter.window(slot)
        if window is not None:
            return "window", window
        if isinstance(adapter, Grouped):
            return "grouped", None
        return ("latent" if _latent(kv.arrays_of(slot)) else "sliceable"), None
    if isinstance(adapter, Recent) and slot.window_size == 1:  # nothing but a group that is open
        return "grouped", None
    for one, kind, size in _CHECKPOINTED:
        if isinstance(adapter, one):
            return kind, None if size is None else int(getattr(slot, size))
    return "unknown", None


_CHECKPOINTED: tuple[tuple[type[Checkpointed], Kind, str | None], ...] = (
    (Recurrent, "recurrent", None),
    (Chunked, "chunked", "chunk_size"),
    (Recent, "recent", "window_size"),
    (Ring, "ring", "max_size"),
)
"""Adapters of opaque slots, their kinds, and the attribute of a slot that is its size."""


def _latent(arrays: Sequence[mx.array]) -> bool:
    """Return whether two arrays are a latent and its rotary part (multi-head latent attention).

    Such arrays have one head each, and different widths.
    """
    return (
        len(arrays) == 2
        and all(array.shape[1] == 1 for array in arrays)
        and arrays[0].shape[3] != arrays[1].shape[3]
    )
