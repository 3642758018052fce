"""mlx-lm's Metal kernels in plain MLX, which fail on the shapes that the kernels cannot take.

A kernel's 32 threads share the last axis of a state, `size // 32` values each. What is left over is
neither read nor written: here it is not a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta, rwkv7, ssm

THREADS = 32
"""Threads of a SIMD group on Apple's GPUs."""
MOST_THREADS = 1024
"""Threads of a threadgroup, at most."""

VECTOR_HEADS = {64, 96, 128, 256}
"""Head sizes of fused attention for at most 8 queries.

Source: `sdpa_vector` in
https://github.com/ml-explore/mlx/blob/main/mlx/backend/metal/scaled_dot_product_attention.cpp
"""
FULL_HEADS = {64, 80, 128}
"""Head sizes of fused attention for more queries on every chip. Source: as above."""

Result = tuple[mx.array, mx.array]


class OnGpu:
    """MLX, as it looks to code that asks whether it runs on Metal."""

    class metal:
        """Metal, available."""

        @staticmethod
        def is_available() -> bool:
            return True

    @property
    def gpu(self) -> mx.Device:
        return mx.default_device()

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


class Kernel:
    """One of the kernels: counts its calls, checks them, and computes what they would.

    `compute` takes the inputs, and returns the output and the new state.
    """

    def __init__(self, compute: Callable[..., Result]):
        self._compute = compute
        self.calls = 0

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        assert template
        assert grid[0] == threadgroup[0] == THREADS
        assert prod(threadgroup) <= MOST_THREADS
        self.calls += 1
        out, state = self._compute(*inputs)
        state = _written(state)
        assert [out.shape, state.shape] == [tuple(shape) for shape in output_shapes]
        return [array.astype(kind) for array, kind in zip((out, state), output_dtypes, strict=True)]


def _written(state: mx.array) -> mx.array:
    """Return `state` as far as the threads write it."""
    whole = state.shape[-1] // THREADS * THREADS
    return mx.where(mx.arange(state.shape[-1]) < whole, state, mx.nan)


def _ssm(*inputs: mx.array) -> Result:
    """One step. Shapes: x (rows, 1, heads, head size), b and c (rows, 1, groups, state size)."""
    x, a_log, b, c, d, dt, state = inputs
    each = x.shape[2] // b.shape[2]
    b, c = (mx.repeat(part[:, 0], each, axis=1)[:, :, None] for part in (b, c))
    dt = dt[:, 0, :, None, None]
    decay = mx.exp(-mx.exp(a_log)[None, :, None, None] * dt)
    new = decay * state + x[:, 0, ..., None] * dt * b
    return ((new * c).sum(-1) + x[:, 0] * d[None, :, None])[:, None], new


def _delta(*inputs: Any) -> Result:
    """Steps over a prompt. Inputs: as `gated_delta_ops` has them, the length, perhaps a mask."""
    mask = inputs[7] if len(inputs) == 8 else None
    out, new = gated_delta.gated_delta_ops(*inputs[:6], mask)
    return out, new


def _wkv7(*inputs: Any) -> Result:
    *parts, state, length = inputs
    steps = []
    for at in range(length):
        out, state = rwkv7._wkv7_step_ops(*(part[:, at] for part in parts), state)
        steps.append(out)
    return mx.stack(steps, axis=1).reshape(parts[0].shape), state


@contextmanager
def kernels() -> Iterator[dict[str, Kernel]]:
    """mlx-lm takes its kernels for recurrent layers, by name: `ssm`, `gated_delta`, `wkv7`."""
    made = {"ssm": Kernel(_ssm), "gated_delta": Kernel(_delta), "wkv7": Kernel(_wkv7)}
    with pytest.MonkeyPatch.context() as patch:
        for module in (ssm, gated_delta, rwkv7):
            patch.setattr(module, "mx", OnGpu())
        patch.setattr(ssm, "_ssm_kernel", made["ssm"])
        patch.setattr(rwkv7, "_wkv7_kernel", made["wkv7"])
        for ending in ("", "_masked", "_vec", "_vec_masked", "_packed"):
            patch.setattr(gated_delta, f"_gated_delta_kernel{ending}", made["gated_delta"])
        yield made


@contextmanager
def attention_heads() -> Iterator[list[tuple[int, int, int]]]:
    """Queries, head size and value size of each call of MLX's fused attention."""
    calls: list[tuple[int, int, int]] = []
    real = mx.fast.scaled_dot_product_attention

    def noting(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        calls.append((q.shape[2], q.shape[-1], v.shape[-1]))
        return real(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "scaled_dot_product_attention", noting)
        yield calls
