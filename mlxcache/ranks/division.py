"""Division of a whole model's KV among ranks: joining their parts, and cutting the KV into parts.

A snapshot holds the KV of the whole model, so that any number of ranks can read it. The rule for
each tensor follows from the class of its cache, and is checked against the shapes that the whole
model and each rank cache. Works on bytes and shapes; computes nothing with MLX.

- Parts of layers ("tensor"): KV is divided by heads; what has the same shape on all ranks, such as
the latent KV of DeepSeek (MLA), is the same on all of them. Recurrent states are divided by heads
too, and the state of a convolution by the channels of queries, keys and values, each for itself.
- Layers ("pipeline"): each rank has the whole KV of some layers; rank 0 has the last layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mlxcache.errors import StoreError, Unsupported
from mlxcache.model.arrays import ArraySpec
from mlxcache.model.kv import Layout
from mlxcache.model.serialise import SKELETON, dtype_name, run_name, run_spec
from mlxcache.safetensors import ITEM_BYTES, Tensor
from mlxcache.store.parts import Mode
from mlxcache.store.snapshot_format import Spec

CONVOLVED = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_k3")
"""Model types whose convolution state holds the channels of queries, keys and values in this order.

There are as many channels of keys as of queries. Those of values are the heads of the recurrent
state times its dimension of values.
"""

BY_HEADS = ("ChunkedKVCache", "RotatingKVCache")
"""mlx-lm's classes whose state holds keys and values, with the heads on axis 1."""

RECURRENT = "ArraysCache"
"""mlx-lm's class of recurrent and convolution states."""

ArrayShape = tuple[str, tuple[int | None, ...]]
"""Dtype, by its name in safetensors, and shape of an array; None stands for any size."""


class Part(msgspec.Struct, frozen=True):
    """Tensors of KV that a whole model or one rank caches.

    `rows`: for each tensor of a run its name, dtype, number of heads, and values of a head per
    token. `states`: for each slot that needs checkpoints, the arrays of its state. `classes`:
    mlx-lm's names of the classes of these slots. `first_layer`: the first layer that the rank has.
    """

    rows: list[tuple[str, str, int, int]] = []
    states: list[list[ArrayShape]] = []
    classes: list[str] = []
    first_layer: int = 0


def part_of(layout: Layout, first_layer: int = 0) -> Part:
    rows = [(name, dtype, *shape) for name, (dtype, shape) in run_spec(layout).items()]
    states = [_shapes(state) for state in layout.states]
    classes = [adapter.name for adapter in layout.checkpointed]
    return Part(rows, states, classes, first_layer)


def _shapes(state: Any) -> list[ArrayShape]:
    if isinstance(state, ArraySpec):
        return [(dtype_name(state.dtype), tuple(state.shape))]
    if isinstance(state, list | tuple):
        return [shape for each in state for shape in _shapes(each)]
    return []


@dataclass(frozen=True, slots=True)
class Rows:
    """Heads [first, end) of a tensor of the whole model, which `rank` has as its tensor `name`."""

    rank: int
    name: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Division of an array of a state: its `axis` into `segments`, and each evenly among ranks."""

    axis: int
    segments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model's KV among `size` ranks.

    `spec`: tensors of a run of the whole model. `rows`: by the name of each tensor in `spec`, the
    ranks that have it, in the order of heads; a single one if all ranks have the same. `cuts`: for
    each slot with a state the cut of each array, None if all ranks have the same; empty for a
    pipeline.
    """

    mode: Mode
    size: int
    spec: Spec
    parts: tuple[Part, ...]
    rows: dict[str, tuple[Rows, ...]]
    cuts: tuple[tuple[Cut | None, ...], ...]

    @property
    def pipelined(self) -> list[int]:
        return sorted(range(self.size), key=lambda rank: self.parts[rank].first_layer)

    # -- rows of a run -----------------------------------------------------------------------------

    def join_rows(self, name: str, parts: Sequence[bytes]) -> bytes:
        """Join the parts that the members of `rows[name]` have of some rows of that tensor.

        Returns the bytes of these rows with all heads.
        """
        held = self.rows[name]
        if len(held) == 1:
            return bytes(parts[0])
        dtype, shape = self.spec[name]
        width = prod(shape[1:]) * ITEM_BYTES[dtype]
        arrays = [
            np.frombuffer(part, np.uint8).reshape(-1, (one.end - one.first) * width)
            for one, part in zip(held, parts, strict=True)
        ]
        return np.concatenate(arrays, axis=1).tobytes()

    def cut_rows(self, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
        found = {tensor.name: tensor for tensor in tensors}
        made = []
        for name, dtype, heads, dim in self.parts[rank].rows:
            whole, first = self._place(rank, name)
            tensor = found[whole]
            tokens, width = tensor.shape[0], dim * ITEM_BYTES[dtype]
            array = np.frombuffer(tensor.bytes, np.uint8).reshape(tokens, -1)
            own = array[:, first * width : (first + heads) * width].tobytes()
            made.append(Tensor(name, dtype, (tokens, heads, dim), memoryview(own)))
        return made

    def _place(self, rank: int, name: str) -> tuple[str, int]:
        for whole, held in self.rows.items():
            for one in held:
                if (one.rank, one.name) == (rank, name):
                    return whole, one.first
        return name, 0  # all ranks have the same, and that of rank 0 is listed

    # -- states ------------------------------------------------------------------------------------

    def join_states(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        slots = [split_state(tensors) for tensors in parts]
        if self.mode == "pipeline":
            return packed_state([slot for rank in self.pipelined for slot in slots[rank]])
        if any(len(each) != len(self.cuts) for each in slots):
            raise StoreError("The ranks' checkpoints have different numbers of layers.")
        joined = []
        for cuts, *each in zip(self.cuts, *slots, strict=True):
            if any(one.tree != each[0].tree or len(one.arrays) != len(cuts) for one in each):
                raise StoreError("The ranks' checkpoints contradict each other.")
            arrays = zip(cuts, *(one.arrays for one in each), strict=True)
            joined.append(SlotState(each[0].tree, [_joined(cut, same) for cut, *same in arrays]))
        return packed_state(joined)

    def cut_states(self, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
        slots = split_state(tensors)
        whole = sum(len(part.states) for part in self.parts)
        if len(slots) != (whole if self.mode == "pipeline" else len(self.cuts)):
            raise StoreError("A checkpoint has another number of layers than the model.")
        if self.mode == "pipeline":
            before = self.pipelined[: self.pipelined.index(rank)]
            first = sum(len(self.parts[other].states) for other in before)
            return packed_state(slots[first : first + len(self.parts[rank].states)])
        made = []
        for slot, cuts in zip(slots, self.cuts, strict=True):
            if len(slot.arrays) != len(cuts):
                raise StoreError("A checkpoint has other arrays than the model.")
            arrays = zip(cuts, slot.arrays, strict=True)
            own = [_cut_out(cut, array, rank, self.size) for cut, array in arrays]
            made.append(SlotState(slot.tree, own))
        return packed_state(made)


def find_division(whole: Part, parts: Sequence[Part], mode: Mode, model_type: str) -> Division:
    """Return how the KV of a model is divided among ranks.

    Raises Unsupported if the parts do not follow the rule for their class of cache; see the module.
    """
    spec = {name: (dtype, (heads, dim)) for name, dtype, heads, dim in whole.rows}
    held = tuple(parts)
    if mode == "pipeline":
        return Division(mode, len(held), spec, held, _layers(whole, held), ())
    rows = _heads(whole, held)
    if any(part.classes != whole.classes for part in held):
        raise Unsupported("Ranks have other classes of caches than the whole model.")
    each = enumerate(zip(whole.classes, whole.states, strict=True))
    cuts = tuple(
        tuple(_cuts(name, model_type, state, [part.states[k] for part in held]))
        for k, (name, state) in each
    )
    return Division(mode, len(held), spec, held, rows, cuts)


def _layers(whole: Part, parts: Sequence[Part]) -> dict[str, tuple[Rows, ...]]:
    order = sorted(range(len(parts)), key=lambda rank: parts[rank].first_layer)
    rows: dict[str, tuple[Rows, ...]] = {}
    slots = 0
    for rank in order:
        for name, dtype, heads, dim in parts[rank].rows:
            _, slot, array = name.split(".")
            whole_name = run_name(slots + int(slot), int(array))
            if (whole_name, dtype, heads, dim) not in whole.rows:
                raise Unsupported(f"Rank {rank} caches {name}, which the whole model does not.")
            rows[whole_name] = (Rows(rank, name, 0, heads),)
        slots += len({name.split(".")[1] for name, *_ in parts[rank].rows})
    states = [state for rank in order for state in parts[rank].states]
    if set(rows) != {name for name, *_ in whole.rows} or states != whole.states:
        raise Unsupported("The ranks together do not cache what the whole model does.")
    return rows


def _heads(whole: Part, parts: Sequence[Part]) -> dict[str, tuple[Rows, ...]]:
    rows: dict[str, tuple[Rows, ...]] = {}
    for index, (name, dtype, heads, dim) in enumerate(whole.rows):
        own = [part.rows[index] if index < len(part.rows) else None for part in parts]
        if all(one == (name, dtype, heads, dim) for one in own):
            rows[name] = (Rows(0, name, 0, heads),)
            continue
        part = heads // len(parts)
        if heads % len(parts) or any(one != (name, dtype, part, dim) for one in own):
            raise Unsupported(f"The KV {name} is not divided evenly by heads.")
        rows[name] = tuple(
            Rows(rank, name, rank * part, (rank + 1) * part) for rank in range(len(parts))
        )
    if any(len(part.rows) != len(whole.rows) for part in parts):
        raise Unsupported("Ranks cache other KV than the whole model.")
    return rows


def _cuts(
    name: str, model_type: str, whole: Sequence[ArrayShape], parts: Sequence[Sequence[ArrayShape]]
) -> list[Cut | None]:
    refused = Unsupported(f"States of the class {name} of {model_type} cannot be divided.")
    if any(part != parts[0] or len(part) != len(whole) for part in parts):
        raise refused
    found: list[Cut | None] = []
    for (dtype, shape), (own, part) in zip(whole, parts[0], strict=True):
        if (dtype, shape) == (own, part):
            found.append(None)
            continue
        differing = [i for i, (a, b) in enumerate(zip(shape, part, strict=False)) if a != b]
        segments = _segments(name, model_type, shape, whole)
        if dtype != own or len(shape) != len(part) or len(differing) != 1 or segments is None:
            raise refused
        (axis,) = differing
        expected = 1 if name in BY_HEADS or len(shape) == 4 else 2
        if axis != expected or (part[axis] or 0) * len(parts) != sum(segments):
            raise refused
        if sum(segments) != shape[axis] or any(one % len(parts) for one in segments):
            raise refused
        found.append(Cut(axis, segments))
    return found


def _segments(
    name: str, model_type: str, shape: Sequence[int | None], state: Sequence[ArrayShape]
) -> tuple[int, ...] | None:
    if name in BY_HEADS or (name == RECURRENT and len(shape) == 4):
        return (shape[1] or 0,)
    recurrent = [other for _, other in state if len(other) == 4]
    if name != RECURRENT or model_type not in CONVOLVED or len(shape) != 3 or len(recurrent) != 1:
        return None
    channels, values = shape[2] or 0, (recurrent[0][1] or 0) * (recurrent[0][2] or 0)
    keys = (channels - values) // 2
    return (keys, keys, values)


# -- states as tensors -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of one slot.

    `tree`: its nested structure as lists, numbers and None, with {"array": index} in place of each
    of the `arrays`.
    """

    tree: Any
    arrays: list[Tensor]


def split_state(tensors: Sequence[Tensor]) -> list[SlotState]:
    found = {tensor.name: tensor for tensor in tensors}
    try:
        trees = json.loads(bytes(found.pop(SKELETON).bytes))
        slots = []
        for tree in trees:
            arrays: list[Tensor] = []
            slots.append(SlotState(_numbered(tree, found, arrays), arrays))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"A checkpoint's skeleton does not fit its arrays: {error!r}.") from error
    if found:
        raise StoreError(f"A checkpoint holds {min(found)}, which its skeleton does not refer to.")
    return slots


def _numbered(tree: Any, found: dict[str, Tensor], arrays: list[Tensor]) -> Any:
    """Move the arrays that `tree`, a part of a skeleton, refers to from `found` to `arrays`."""
    if isinstance(tree, list):
        return [_numbered(each, found, arrays) for each in tree]
    if isinstance(tree, dict):
        arrays.append(found.pop(f"state.{tree['array']}"))
        return {"array": len(arrays) - 1}
    return tree


def packed_state(slots: Sequence[SlotState]) -> list[Tensor]:
    trees: list[Any] = []
    arrays: list[Tensor] = []
    for slot in slots:
        trees.append(_shifted(slot.tree, len(arrays)))
        arrays += slot.arrays
    text = json.dumps(trees, separators=(",", ":"), allow_nan=False).encode()
    named = [replace(array, name=f"state.{i}") for i, array in enumerate(arrays)]
    return [Tensor(SKELETON, "U8", (len(text),), memoryview(text)), *named]


def _shifted(tree: Any, by: int) -> Any:
    if isinstance(tree, list):
        return [_shifted(each, by) for each in tree]
    return {"array": tree["array"] + by} if isinstance(tree, dict) else tree


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    raw = np.frombuffer(tensor.bytes, np.uint8)
    return raw.reshape(*tensor.shape, ITEM_BYTES[tensor.dtype])


def _tensor(like: Tensor, array: npt.NDArray[np.uint8]) -> Tensor:
    return Tensor(like.name, like.dtype, array.shape[:-1], memoryview(array.tobytes()))


def _joined(cut: Cut | None, parts: Sequence[Tensor]) -> Tensor:
    if cut is None:
        return parts[0]
    arrays = [_bytes_of(part) for part in parts]
    own = [segment // len(parts) for segment in cut.segments]
    ends = np.cumsum(own).tolist()
    if any(array.shape[cut.axis] != ends[-1] for array in arrays):
        raise StoreError("The ranks' checkpoints have other shapes than the model.")
    pieces = [
        array.take(range(end - length, end), axis=cut.axis)
        for end, length in zip(ends, own, strict=True)
        for array in arrays
    ]
    return _tensor(parts[0], np.concatenate(pieces, axis=cut.axis))


def _cut_out(cut: Cut | None, whole: Tensor, rank: int, size: int) -> Tensor:
    if cut is None:
        return whole
    array = _bytes_of(whole)
    if array.ndim <= cut.axis + 1 or array.shape[cut.axis] != sum(cut.segments):
        raise StoreError("A checkpoint has other shapes than the model.")
    pieces, first = [], 0
    for segment in cut.segments:
        own = segment // size
        start = first + rank * own
        pieces.append(array.take(range(start, start + own), axis=cut.axis))
        first += segment
    return _tensor(whole, np.concatenate(pieces, axis=cut.axis))
