"""Conversion of KV and states between MLX arrays and tensors in files. MLX thread only.

The tensors of a run (KV of consecutive tokens) are token-major, shape (tokens, heads, dim), so that
a block of tokens is one range of bytes in each. The tensors of a checkpoint are the arrays of its
state and a skeleton: JSON with the place of each array in the nested tuples of the state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxcache.errors import Corrupt
from mlxcache.model.arrays import ArraySpec, readable, tree_arrays
from mlxcache.model.kv import Layout, State, arrays_of
from mlxcache.model.lineage import Span
from mlxcache.safetensors import Tensor

DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

SKELETON = "skeleton"
HEADS = "heads"
"""First part of the names of tensors that files need not have."""

_MOST_SKELETON = 1 << 20  # bytes

Arrays = Sequence[Sequence[mx.array]]
"""The arrays of each linear slot, in the order of `Layout.specs`."""


def run_name(slot: int, array: int) -> str:
    return f"kv.{slot}.{array}"


def _run_names(layout: Layout) -> list[list[str]]:
    """Return the names of a run's tensors, by slot and array."""
    names = [[run_name(i, j) for j in range(len(spec))] for i, spec in enumerate(layout.specs)]
    if layout.heads:
        names[-1] = [f"{HEADS}.{layout.heads}.{j}" for j in range(len(layout.specs[-1]))]
    return names


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the safetensors name of a dtype. Raises ValueError if it has none."""
    if dtype not in _NAMES:
        raise ValueError(f"safetensors has no name for {dtype}")
    return _NAMES[dtype]


def to_tensors(named: Iterable[tuple[str, mx.array]]) -> list[Tensor]:
    """Wrap row-contiguous arrays as tensors without a copy; nobody may write to them any more."""
    held = [(name, array, readable(array)) for name, array in named]
    mx.eval([view for _, _, view in held])
    return [
        Tensor(name, dtype_name(array.dtype), tuple(array.shape), _bytes_of(view))
        for name, array, view in held
    ]


def _bytes_of(array: mx.array) -> memoryview:
    if not array.size:
        return memoryview(b"")
    view = memoryview(array)  # type: ignore[arg-type] # it has the buffer protocol
    if not view.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not row-contiguous")
    return view.cast("B")


def run_bytes(layout: Layout, tokens: int) -> int:
    return tokens * layout.bytes_per_token


def copied_run(layout: Layout, spans: Sequence[Span], out: memoryview) -> list[Tensor]:
    """Copy the KV of contiguous `spans` into `out`, and return the tensors of a run with that data.

    `out`: at least `run_bytes` bytes, preferably memory that was used before: the first access to a
    new page costs more than the copy. Blocks until the device has computed the KV.
    """
    views = _all_readable(spans)
    tensors: list[Tensor] = []
    tokens, done = spans[-1][2] - spans[0][1], 0
    names = _run_names(layout)
    for i, spec in enumerate(layout.specs):
        for j, (heads, dim, dtype) in enumerate(spec):
            size = tokens * heads * dim * dtype.size
            data = out[done : done + size]
            rows = [_rows(span, views[id(span[0])][i][j]) for span in spans]
            _copy(np.frombuffer(data, np.uint8), rows)
            tensors.append(Tensor(names[i][j], _NAMES[dtype], (tokens, heads, dim), data))
            done += size
    return tensors


def _all_readable(spans: Sequence[Span]) -> dict[int, list[list[mx.array]]]:
    """Return the arrays of all lineages in `spans` by id; drop them before the next write."""
    owners = {id(owner): owner for owner, _, _ in spans}
    views = {
        key: [[readable(array) for array in arrays_of(slot)] for slot in owner.linear]
        for key, owner in owners.items()
    }
    unconfirmed = [views[key] for key, owner in owners.items() if owner.passes]
    made = [view for slots in views.values() for slot in slots for view in slot]
    mx.eval(unconfirmed, [view for view in made if view.dtype == mx.uint16])
    return views


def _copy(out: npt.NDArray[np.uint8], parts: Sequence[npt.NDArray[Any]]) -> None:
    rows = sum(map(len, parts))  # not -1: an array may have a width of 0
    into = out.view(parts[0].dtype).reshape(rows, *parts[0].shape[1:])
    at = 0
    for part in parts:
        np.copyto(into[at : at + len(part)], part)
        at += len(part)


def _rows(span: Span, view: mx.array) -> npt.NDArray[Any]:
    owner, start, end = span
    seen: npt.NDArray[Any] = np.asarray(view)[0, :, start - owner.base : end - owner.base]
    return seen.swapaxes(0, 1)


def run_spec(layout: Layout) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return the dtype and (heads, dim) of each tensor that a run must have, by name."""
    return {
        run_name(i, j): (_NAMES[dtype], (heads, dim))
        for i, spec in enumerate(layout.bare.specs)
        for j, (heads, dim, dtype) in enumerate(spec)
    }


def layout_key(layout: Layout) -> str:
    """Return a text that identifies the tensors that files for a layout must have."""
    return json.dumps(
        {
            "linear": layout.bare.linear,
            "runs": run_spec(layout),
            "states": repr(layout.bare.states),
        },
        sort_keys=True,
    )


def load_run(path: Path, layout: Layout, stream: Any) -> list[list[mx.array]]:
    """Load a run's file as lazy arrays (tokens, heads, dim). Raises Corrupt if not of `layout`."""
    found, extra = _parted(_load(path, stream))
    out: list[list[mx.array]] = []
    tokens: int | None = None
    for names, spec in zip(_run_names(layout), layout.specs, strict=True):
        slot = []
        for name, (heads, dim, dtype) in zip(names, spec, strict=True):
            array = found.pop(name, None)
            if name.startswith(HEADS):
                array = extra.get(name, mx.zeros((tokens or 0, heads, dim), dtype))
            if array is None or not ArraySpec((tokens, heads, dim), dtype).fits(array):
                raise Corrupt(f"{path}: {name} is missing, or not of this model's shape.")
            tokens = array.shape[0]
            slot.append(array)
        out.append(slot)
    if found:
        raise Corrupt(f"{path} holds {min(found)}, which this model does not cache.")
    return out


def _parted(found: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return the tensors that a file must have, and the others, which may be of other heads."""
    extra = {name: found.pop(name) for name in list(found) if name.startswith(f"{HEADS}.")}
    return found, extra


def row_major(arrays: Arrays, first: int, last: int) -> list[list[mx.array]]:
    """Slice tokens [first, last) of a run's arrays, lazily, to shape (1, heads, n, dim)."""
    return [[array[first:last].swapaxes(0, 1)[None] for array in slot] for slot in arrays]


def state_tensors(state: State, heads: str = "") -> list[Tensor]:
    """Convert an evaluated state to tensors: first its skeleton as JSON, then its arrays.

    `heads`: as in `Layout`.
    """
    arrays: list[mx.array] = []
    needed = state[:-1] if heads else state
    text = json.dumps(_fold(needed, arrays), separators=(",", ":"), allow_nan=False).encode()
    skeleton = Tensor(SKELETON, "U8", (len(text),), memoryview(text))
    named = [(f"state.{i}", array) for i, array in enumerate(arrays)]
    if heads:
        (hidden,) = tree_arrays(state[-1])
        named.append((f"{HEADS}.{heads}", hidden))
    return [skeleton, *to_tensors(named)]


def _fold(value: Any, arrays: list[mx.array]) -> Any:
    """Convert a part of a state to values of JSON; {"array": N} stands for the Nth of `arrays`."""
    if isinstance(value, mx.array):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [_fold(v, arrays) for v in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"a state holds a {type(value).__name__}, which cannot be stored")


def load_state(path: Path, layout: Layout, stream: Any) -> State:
    """Load the file of a checkpoint, as lazy arrays. Raises Corrupt if it is not of `layout`."""
    found, extra = _parted(_load(path, stream))
    tree = _skeleton(path, found.pop(SKELETON, None))
    state = _unfold(tree, layout.bare.states, found, path)
    if found:
        raise Corrupt(f"{path} holds {min(found)}, which its skeleton does not refer to.")
    if layout.heads:
        state = (*state, filled(layout.states[-1], extra.get(f"{HEADS}.{layout.heads}")))
    checked = zip(layout.checkpointed, state, layout.states, strict=True)
    if not all(adapter.agrees(held, like) for adapter, held, like in checked):
        raise Corrupt(f"{path} holds a state whose numbers contradict its arrays.")
    return tuple(state)


def filled(like: Any, array: mx.array | None = None) -> Any:
    """Return `like` with `array` in the place of its ArraySpec, or zeros if that does not fit."""
    if isinstance(like, tuple):
        return tuple(filled(part, array) for part in like)
    if not isinstance(like, ArraySpec):
        return like
    if array is not None and like.fits(array):
        return array
    return mx.zeros([n or 0 for n in like.shape], like.dtype)


def _skeleton(path: Path, array: mx.array | None) -> Any:
    if array is None or array.dtype != mx.uint8 or array.ndim != 1 or array.size > _MOST_SKELETON:
        raise Corrupt(f"{path} has no skeleton of a state.")
    try:
        return json.loads(bytes(memoryview(array)))  # type: ignore[arg-type]
    except (ValueError, RecursionError, RuntimeError) as error:
        raise Corrupt(f"{path}: the skeleton of its state cannot be read: {error}") from error


def _unfold(value: Any, like: Any, found: dict[str, mx.array], path: Path) -> Any:
    """Return `value` in the form of `like`, with arrays that are taken out of `found`."""
    wrong = Corrupt(f"{path} holds a state that is not of this model's shape.")
    if isinstance(like, tuple):
        if not isinstance(value, list) or len(value) != len(like):
            raise wrong
        return tuple(_unfold(v, part, found, path) for v, part in zip(value, like, strict=True))
    if isinstance(like, ArraySpec):
        index = value.get("array") if isinstance(value, dict) else None
        array = found.pop(f"state.{index}", None)
        if array is None or not like.fits(array):
            raise wrong
        return array
    if type(value) is not type(like):  # numbers of one kind, or None
        raise wrong
    return value


def _load(path: Path, stream: Any) -> dict[str, mx.array]:
    try:
        found = mx.load(str(path), format="safetensors", stream=stream)
    except (RuntimeError, ValueError, OSError) as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise Corrupt(f"{path} is not a safetensors file.")
    return found
