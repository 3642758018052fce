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
from mlxcache.model.arrays import ArraySpec
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
"""MLX's dtypes by the names that safetensors gives them."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

SKELETON = "skeleton"
_MOST_SKELETON = 1 << 20  # bytes

Arrays = Sequence[Sequence[mx.array]]
"""The arrays of each linear slot, in the order of `Layout.specs`."""


def run_name(slot: int, array: int) -> str:
    """Return the name of a run's tensor in a file.

    `slot`: index into `Layout.specs`. `array`: index of one of the slot's arrays.
    """
    return f"kv.{slot}.{array}"


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the safetensors name of a dtype. Raises ValueError if it has none."""
    if dtype not in _NAMES:
        raise ValueError(f"safetensors has no name for {dtype}")
    return _NAMES[dtype]


def to_tensors(named: Iterable[tuple[str, mx.array]]) -> list[Tensor]:
    """Wrap arrays, given as pairs of name and array, as tensors without a copy.

    The arrays must not be written to afterwards. Raises ValueError for an array that is not
    row-contiguous or whose dtype has no name in safetensors.
    """
    held = [(name, array, _readable(array)) for name, array in named]
    mx.eval([view for _, _, view in held])
    return [
        Tensor(name, dtype_name(array.dtype), tuple(array.shape), _bytes_of(view))
        for name, array, view in held
    ]


def _readable(array: mx.array) -> mx.array:
    """Return `array` in a dtype that NumPy and the buffer protocol support, as a lazy view.

    bfloat16 becomes uint16. The CPU makes the view, which works even after the GPU has failed.
    """
    return array.view(mx.uint16, stream=mx.cpu) if array.dtype == mx.bfloat16 else array


def _bytes_of(array: mx.array) -> memoryview:
    if not array.size:
        return memoryview(b"")
    view = memoryview(array)  # type: ignore[arg-type] # it has the buffer protocol
    if not view.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not row-contiguous")
    return view.cast("B")


def run_bytes(layout: Layout, tokens: int) -> int:
    """Return the total size in bytes of the tensors of a run of `tokens` tokens."""
    return tokens * layout.bytes_per_token


def copied_run(layout: Layout, spans: Sequence[Span], out: memoryview) -> list[Tensor]:
    """Copy the KV of `spans` into `out`, and return the tensors of a run, whose data is in `out`.

    `spans`: ranges of positions of lineages, each of which begins where the one before ends. `out`:
    at least `run_bytes` bytes, preferably memory that was used before: the first access to a new
    page costs more than the copy. Blocks until the device has computed the KV.
    """
    readable = _all_readable(spans)
    tensors: list[Tensor] = []
    tokens, done = spans[-1][2] - spans[0][1], 0
    for i, spec in enumerate(layout.specs):
        for j, (heads, dim, dtype) in enumerate(spec):
            size = tokens * heads * dim * dtype.size
            data = out[done : done + size]
            rows = [_rows(span, readable[id(span[0])][i][j]) for span in spans]
            _copy(np.frombuffer(data, np.uint8), rows)
            tensors.append(Tensor(run_name(i, j), _NAMES[dtype], (tokens, heads, dim), data))
            done += size
    return tensors


def _all_readable(spans: Sequence[Span]) -> dict[int, list[list[mx.array]]]:
    """Return the arrays of all lineages in `spans`, as views that NumPy can read.

    The keys are Python's `id(lineage)`; each value lists the arrays of each linear slot. Blocks
    until all have been computed. The caller must drop the views before the next write to one of the
    lineages.
    """
    owners = {id(owner): owner for owner, _, _ in spans}
    views = {
        key: [[_readable(array) for array in arrays_of(slot)] for slot in owner.linear]
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


def _rows(span: Span, readable: mx.array) -> npt.NDArray[Any]:
    """Return the part of an array that a lineage's range covers, shape (tokens, heads, dim).

    `readable`: the array, shape (1, heads, capacity, dim), as `_readable` returns it. The result is
    a view; the caller must drop it before the next write to the lineage.
    """
    owner, start, end = span
    seen: npt.NDArray[Any] = np.asarray(readable)[0, :, start - owner.base : end - owner.base]
    return seen.swapaxes(0, 1)


def run_spec(layout: Layout) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return the dtype and (heads, dim) that each tensor of a run must have, by tensor name."""
    return {
        run_name(i, j): (_NAMES[dtype], (heads, dim))
        for i, spec in enumerate(layout.specs)
        for j, (heads, dim, dtype) in enumerate(spec)
    }


def late_names(layout: Layout) -> frozenset[str]:
    """Return the names of a run's tensors that belong to sliding-window layers.

    Of these tensors, a prompt that is restored needs only the rows of its last positions.
    """
    sliding = [i for i, window in enumerate(layout.windows) if window is not None]
    return frozenset(run_name(i, j) for i in sliding for j in range(len(layout.specs[i])))


def layout_key(layout: Layout) -> str:
    """Return a text that identifies the tensors of files for a layout.

    Files that were written for one layout can be read for every layout with the same text.
    """
    return json.dumps(
        {
            "linear": layout.linear,
            "runs": run_spec(layout),
            "windows": layout.windows,
            "states": repr(layout.states),
        },
        sort_keys=True,
    )


def load_run(path: Path, layout: Layout, stream: Any) -> list[list[mx.array]]:
    """Load the file of a run as lazy arrays of shape (tokens, heads, dim), a list for each slot.

    The slots are in the order of `Layout.specs`. The arrays are read on the MLX stream `stream`.
    Raises Corrupt if the file cannot be read, or if its tensors are not exactly those of `layout`,
    all with the same number of tokens.
    """
    found = _load(path, stream)
    out: list[list[mx.array]] = []
    tokens: int | None = None
    for i, spec in enumerate(layout.specs):
        slot = []
        for j, (heads, dim, dtype) in enumerate(spec):
            array = found.pop(run_name(i, j), None)
            if array is None or not ArraySpec((tokens, heads, dim), dtype).fits(array):
                raise Corrupt(f"{path}: {run_name(i, j)} is missing, or not of this model's shape.")
            tokens = array.shape[0]
            slot.append(array)
        out.append(slot)
    if found:
        raise Corrupt(f"{path} holds {min(found)}, which this model does not cache.")
    return out


def row_major(arrays: Arrays, first: int, last: int) -> list[list[mx.array]]:
    """Slice tokens [first, last) of a run's arrays, lazily, to shape (1, heads, n, dim).

    n is last - first. `arrays`: those of each linear slot, shape (tokens, heads, dim); the result
    has the same order.
    """
    return [[array[first:last].swapaxes(0, 1)[None] for array in slot] for slot in arrays]


def state_tensors(state: State) -> list[Tensor]:
    """Convert an evaluated state to tensors: first its skeleton, then its arrays.

    The skeleton is JSON with the state's nested structure and its numbers, as bytes. Raises
    ValueError for a state that holds anything but arrays, numbers and None.
    """
    arrays: list[mx.array] = []
    text = json.dumps(_fold(state, arrays), separators=(",", ":"), allow_nan=False).encode()
    skeleton = Tensor(SKELETON, "U8", (len(text),), memoryview(text))
    return [skeleton, *to_tensors((f"state.{i}", array) for i, array in enumerate(arrays))]


def _fold(value: Any, arrays: list[mx.array]) -> Any:
    """Convert a state, or a part of one, to values of JSON; {"array": N} stands for an array.

    Each array is appended to `arrays`, where N is its index. Raises ValueError if `value` holds
    anything but arrays, lists, tuples, numbers and None.
    """
    if isinstance(value, mx.array):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [_fold(v, arrays) for v in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"a state holds a {type(value).__name__}, which cannot be stored")


def load_state(path: Path, layout: Layout, stream: Any) -> State:
    """Load the file of a checkpoint, as a state of lazy arrays.

    The arrays are read on the MLX stream `stream`. Raises Corrupt if the file cannot be read, or if
    the state does not have the structure and shapes of `layout`.
    """
    found = _load(path, stream)
    tree = _skeleton(path, found.pop(SKELETON, None))
    state = _unfold(tree, layout.states, found, path)
    if found:
        raise Corrupt(f"{path} holds {min(found)}, which its skeleton does not refer to.")
    checked = zip(layout.checkpointed, state, layout.states, strict=True)
    if not all(adapter.agrees(held, like) for adapter, held, like in checked):
        raise Corrupt(f"{path} holds a state whose numbers contradict its arrays.")
    return tuple(state)


def _skeleton(path: Path, array: mx.array | None) -> Any:
    if array is None or array.dtype != mx.uint8 or array.ndim != 1 or array.size > _MOST_SKELETON:
        raise Corrupt(f"{path} has no skeleton of a state.")
    try:
        return json.loads(bytes(memoryview(array)))  # type: ignore[arg-type]
    except (ValueError, RecursionError, RuntimeError) as error:
        raise Corrupt(f"{path}: the skeleton of its state cannot be read: {error}") from error


def _unfold(value: Any, like: Any, found: dict[str, mx.array], path: Path) -> Any:
    """Return the JSON `value` with the array `found["state.N"]` in place of each {"array": N}.

    `like`: the structure that the result must have, with an ArraySpec for each array. The arrays
    in the result are removed from `found`. Raises Corrupt, which names the file `path`, if
    structure, shapes or dtypes differ.
    """
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
