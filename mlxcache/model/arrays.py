"""Copies of arrays that share no buffer, and checks of shapes, also in nested tuples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


def copied(array: mx.array) -> mx.array:
    """Copy `array` lazily into a buffer of its own, in row-major order.

    `mx.contiguous` and assignment to a full slice may share the buffer instead, and a small view
    would then keep a large buffer alive. A product alone keeps the order of a transposed array,
    such as the keys that a model has just computed.
    """
    return mx.contiguous(array * mx.array(1, array.dtype))


def zeros(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return zeros to be joined to other arrays, which take no memory of their own."""
    return mx.broadcast_to(mx.array(0, dtype), shape)


def joined(parts: Sequence[mx.array]) -> mx.array:
    """Join `parts` along the token axis (-2), lazily and in a buffer of its own."""
    if len(parts) > 1:
        return mx.concatenate(list(parts), axis=-2)
    (part,) = parts
    middle = part.shape[-2] // 2
    if not middle:
        return copied(part)
    return mx.concatenate([part[..., :middle, :], part[..., middle:, :]], axis=-2)


def appended(held: mx.array | None, new: mx.array, offset: int, step: int) -> mx.array:
    """Write `new`, (1, heads, n, dim), at `offset` of the buffer `held`, and return the buffer.

    In place, if it is large enough; else the first `offset` positions are copied into a buffer that
    is larger by a multiple of `step`.
    """
    end = offset + new.shape[2]
    if held is None or end > held.shape[2]:
        steps = -(-new.shape[2] // step) * step
        pad = mx.zeros((*new.shape[:2], steps, new.shape[3]), new.dtype)
        held = pad if held is None else mx.concatenate([held[..., :offset, :], pad], axis=2)
    held[..., offset:end, :] = new
    return held


def readable(array: mx.array) -> mx.array:
    """Return `array` as a lazy view in a dtype that NumPy supports: bfloat16 as uint16.

    Made on the CPU, which works even after the GPU has failed.
    """
    return array.view(mx.uint16, stream=mx.cpu) if array.dtype == mx.bfloat16 else array


def copied_tree(value: Any) -> Any:
    if isinstance(value, mx.array):
        return copied(value)
    if isinstance(value, list | tuple):
        return tuple(copied_tree(v) for v in value)
    return value


def held_tree(value: Any) -> Any:
    return tuple(map(held_tree, value)) if isinstance(value, list | tuple) else value


def tree_arrays(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, list | tuple):
        return [array for v in value for array in tree_arrays(v)]
    return []


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype that an array must have. None in `shape` stands for any size."""

    shape: tuple[int | None, ...]
    dtype: Any

    def fits(self, array: mx.array) -> bool:
        return (
            array.dtype == self.dtype
            and array.ndim == len(self.shape)
            and all(n in (None, m) for n, m in zip(self.shape, array.shape, strict=True))
        )


def spec_tree(value: Any, free: int | None) -> Any:
    """Replace each array in nested tuples and lists by its ArraySpec; axis `free` has any size."""
    if isinstance(value, mx.array):
        shape = tuple(None if axis == free else n for axis, n in enumerate(value.shape))
        return ArraySpec(shape, value.dtype)
    if isinstance(value, list | tuple):
        return tuple(spec_tree(v, free) for v in value)
    return value


def either(early: Any, late: Any) -> Any:
    """Merge the ArraySpecs of a state after few and more tokens; sizes that differ are None."""
    if isinstance(early, ArraySpec) and isinstance(late, ArraySpec):
        sizes = zip(early.shape, late.shape, strict=True)
        return ArraySpec(tuple(a if a == b else None for a, b in sizes), late.dtype)
    if isinstance(early, tuple) and isinstance(late, tuple):
        return tuple(either(*pair) for pair in zip(early, late, strict=True))
    return early


def varies(states: Any) -> bool:
    if isinstance(states, ArraySpec):
        return None in states.shape
    return isinstance(states, tuple) and any(map(varies, states))
