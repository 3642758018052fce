"""How a model caches, found out without reading its weights. MLX thread only.

Weights are loaded lazily and the model is fed without computing: MLX knows the shapes and dtypes of
arrays that were never evaluated. So a model that is larger than the memory can be examined too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.adapters import adapter_of, class_name
from mlxcache.model.checkpointed import Checkpointed, Chunked, Recurrent
from mlxcache.model.kv import Layout
from mlxcache.model.load import ModelSpec, load
from mlxcache.model.sliced import Sliced
from mlxcache.types import ModelInfo

Kind = Literal["sliceable", "latent", "window", "recurrent", "chunked", "ring", "unknown"]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that cache alike: how many, and what each of them holds.

    `size`: the tokens of a window or a chunk. `cls`: mlx-lm's class or classes. Bytes are of one
    layer, per token and per checkpoint.
    """

    layers: int
    kind: Kind
    size: int | None
    cls: str
    bytes_per_token: int
    checkpoint_bytes: int


@dataclass(frozen=True, slots=True)
class Examined:
    """A model as far as its files tell: what it is, its layout, and its layers by group."""

    info: ModelInfo
    layout: Layout
    groups: tuple[Group, ...]


def examine(spec: ModelSpec) -> Examined:
    """What `spec` names, which is downloaded if need be.

    Raises ModelError, also where the model cannot be fed.
    """
    loaded = load(spec, lazy=True)
    try:
        layout = kv.survey(loaded.model, evaluate=False)
        return Examined(loaded.info, layout, groups(loaded.model, layout))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{spec.model} cannot be fed: {type(error).__name__}: {error}") from error


def groups(model: Any, layout: Layout) -> tuple[Group, ...]:
    """The layers of `model` by how they cache, in the order in which each kind comes first."""
    caches = layout.make()
    model(mx.array([[0, 0]]), cache=caches)
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


def _group(slots: Sequence[Any]) -> tuple[Kind, int | None, str, int, int]:
    """What one layer is like: its most demanding slot says what kind it is."""
    kinds = [_kind(slot) for slot in slots]
    kind, size = max(kinds, key=lambda found: _DEMANDS.index(found[0]))
    linear = [slot for slot in slots if isinstance(adapter_of(slot), Sliced)]
    rows = (array for slot in linear for array in kv.arrays_of(slot))
    return (
        kind,
        size,
        " + ".join(dict.fromkeys(class_name(slot) for slot in slots)),
        sum(a.shape[1] * a.shape[3] * a.dtype.size for a in rows),
        sum(
            kv.most_bytes(slot, adapter)
            for slot in slots
            if isinstance(adapter := adapter_of(slot), Checkpointed)
        ),
    )


_DEMANDS: tuple[Kind, ...] = (
    "sliceable", "latent", "window", "recurrent", "chunked", "ring", "unknown",
)  # fmt: skip


def _kind(slot: Any) -> tuple[Kind, int | None]:
    adapter = adapter_of(slot)
    if isinstance(adapter, Sliced):
        window = adapter.window(slot)
        if window is not None:
            return "window", window
        return ("latent" if _latent(kv.arrays_of(slot)) else "sliceable"), None
    if isinstance(adapter, Recurrent):
        return "recurrent", None
    if isinstance(adapter, Chunked):
        return "chunked", int(slot.chunk_size)
    return ("ring", int(slot.max_size)) if isinstance(adapter, Checkpointed) else ("unknown", None)


def _latent(arrays: Sequence[mx.array]) -> bool:
    """Whether these are a latent and its rotary part, shared by all heads, and no keys and values.

    Of two arrays with one head each, such as multi-head latent attention has, of different widths.
    """
    return (
        len(arrays) == 2
        and all(array.shape[1] == 1 for array in arrays)
        and arrays[0].shape[3] != arrays[1].shape[3]
    )
