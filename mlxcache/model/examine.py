"""Cache layout of a model, determined without reading its weights. MLX thread only.

Weights are loaded lazily and the model is fed without computing, because MLX has the shapes and
dtypes of arrays that were never evaluated. So a model larger than memory can be examined too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_config

from mlxcache.config.models import find_folder
from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.adapters import Checkpointed, Kind, Sliced, adapter_of, class_name
from mlxcache.model.backend import Backend, choose_backend, may_see, takes_images
from mlxcache.model.folder import context_length, native_length
from mlxcache.model.heads import in_files
from mlxcache.model.hub import here, outline
from mlxcache.model.kv import Layout
from mlxcache.model.load import ModelSpec, load, why_unseen
from mlxcache.model.pair import unfit
from mlxcache.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of a model that cache in the same way; the bytes are those of one layer.

    `kinds`: of the slots in one layer, those that are easier to reuse first. `size`: tokens of a
    window or chunk. `cls`: mlx-lm's cache classes.
    """

    layers: int
    kinds: tuple[Kind, ...]
    size: int | None
    cls: str
    bytes_per_token: int
    checkpoint_bytes: int


@dataclass(frozen=True, slots=True)
class Examined:
    """Description, cache layout and groups of layers of a model, from its files.

    `unquantised`, `undrafted`, `unseen`: why its KV cannot be quantised, it cannot be used with a
    draft model, its images are not fed; None if they can, and if it has no vision tower. `heads`:
    its files have heads for multi-token prediction.
    """

    info: ModelInfo
    layout: Layout
    groups: tuple[Group, ...]
    unquantised: str | None = None
    undrafted: str | None = None
    unseen: str | None = None
    heads: bool = False


ChooseBits = Callable[[Any, ModelInfo], int | None]
"""Return the bits of the KV of a model, None if it is not quantised."""


def examine(
    spec: ModelSpec,
    choose_bits: ChooseBits = lambda model, info: None,
    *,
    needs_weights: bool = True,
) -> Examined:
    """Determine how a model's layers cache and how many bytes they need, without its weights.

    If the model is not on this machine, only its config.json is downloaded, and random weights that
    are never computed replace its own; so they do for a folder without weights, unless
    `needs_weights`. With a draft model, both are examined as one. Blocks for a
    download. Raises ModelError if the model cannot be found, fed, or used with its bits of KV or
    the draft model.
    """
    try:
        if spec.draft is not None and None in (here(spec.model), here(spec.draft)):
            raise ModelError(
                f"{spec.model} and {spec.draft} cannot be examined together before both are on "
                "this machine: leave out --draft-model"
            )
        folder = find_folder(spec.model)
        bare = folder is not None and not needs_weights and not any(folder.glob("*.safetensors"))
        if bare or here(spec.model) is None:
            path, weights = outline(spec.model) if folder is None else (folder, None)
            model, info, has_heads = *_outlined(spec, path, weights), False
            unseen = why_unseen(spec, load_config(path)) if info.backend == "mlx-lm" else None
        else:
            loaded = load(spec, lazy=True)
            model, unseen = loaded.model, loaded.unseen
            info = replace(loaded.info, has_images=loaded.vision is not None)
            has_heads = in_files(loaded.path)
        layout = kv.survey(model, kv_bits=choose_bits(model, info), evaluate=False)
        unquantised = _unquantised(model)
        if info.has_images and info.backend == "mlx-vlm":  # mlx-lm may run it without images
            with suppress(ModelError):
                unquantised = examine(replace(spec, images=False)).unquantised
        undrafted = f"this model has {', '.join(names)}." if (names := unfit(model)) else None
        found = groups(model, layout)
        return Examined(info, layout, found, unquantised, undrafted, unseen, has_heads)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{spec.model} cannot be fed: {type(error).__name__}: {error}") from error


def _unquantised(model: Any) -> str | None:
    try:
        kv.survey(model, kv_bits=8, evaluate=False)
    except ModelError as error:
        return str(error).partition(": ")[2]
    return None


def _outlined(spec: ModelSpec, path: Path, weights: int | None) -> tuple[nn.Module, ModelInfo]:
    config = load_config(path)
    images = spec.images and spec.adapter is None  # its weights are not here to be looked at
    backend = choose_backend(config, spec.model, images=images)
    model = _made(config, backend, images=images and may_see(config))
    sections = (config, config.get("text_config") or {})
    names = (one.get("dtype") or one.get("torch_dtype") for one in sections)
    model.set_dtype(_DTYPES.get(next(filter(None, names), ""), mx.bfloat16))
    if weights is None:
        weights = _estimate_weights(model, config)
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


def _estimate_weights(model: nn.Module, config: Mapping[str, Any]) -> int:
    """Return the bytes of weights of that shape; quantised ones have a scale and a bias a group."""
    shapes = [one for _, one in tree_flatten(model.parameters())]
    stored = config.get("quantization") or {}
    if not stored.get("bits"):
        return sum(one.nbytes for one in shapes)
    bits = stored["bits"] + 32 / stored.get("group_size", 64)
    return int(sum(one.size for one in shapes) * bits / 8)


def _made(config: Mapping[str, Any], backend: Backend, *, images: bool) -> nn.Module:
    if backend == "mlx-vlm":
        from mlxcache.model.vlm import make_model  # noqa: PLC0415 - may be absent

        return make_model(config, images=images)
    model_class, args_class = _get_classes(dict(config))
    return model_class(args_class.from_dict(config))


_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def groups(model: Any, layout: Layout) -> tuple[Group, ...]:
    """Group the layers of `model` by the way they cache, in order of first occurrence."""
    caches = layout.make()
    count = max(2, kv.first_write(kv.flatten(caches)))
    model(mx.zeros((1, count), mx.int32), cache=caches)
    counts: Counter[Group] = Counter()
    for cache in caches[: len(layout.bare.make())]:
        pairs = [(slot, adapter_of(slot)) for slot in kv.flatten([cache])]
        if slots := [s for s, a in pairs if not isinstance(a, Sliced) or a.filled(s)]:
            counts[_group(slots)] += 1
    return tuple(replace(group, layers=count) for group, count in counts.items())


def _group(slots: Sequence[Any]) -> Group:
    found = dict(map(_kind, slots))
    adapters = [(slot, adapter_of(slot)) for slot in slots]
    rows = [
        a for slot, adapter in adapters if isinstance(adapter, Sliced) for a in adapter.arrays(slot)
    ]
    return Group(
        layers=1,
        kinds=tuple(sorted(found, key=get_args(Kind).index)),
        size=max((size for size in found.values() if size is not None), default=None),
        cls=" + ".join(dict.fromkeys(class_name(slot) for slot in slots)),
        bytes_per_token=sum(a.shape[1] * a.shape[3] * a.dtype.size for a in rows),
        checkpoint_bytes=sum(
            adapter.most_bytes(slot)
            for slot, adapter in adapters
            if isinstance(adapter, Checkpointed)
        ),
    )


def _kind(slot: Any) -> tuple[Kind, int | None]:
    adapter = adapter_of(slot)
    if adapter is None:
        return "unknown", None
    return adapter.kind(slot), adapter.window(slot) if isinstance(adapter, Checkpointed) else None
