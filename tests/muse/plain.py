"""Muse Spark in float32, where there is no Metal too: its kernels, written in plain MLX.

A toy's folder holds a copy, as the `model_file` that config.json names.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import muse_spark
from mlx_lm.models.muse_spark import Model, ModelArgs

__all__ = ["Model", "ModelArgs"]


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    total = weights.sum(axis=-1, keepdims=True)
    return [chosen.astype(mx.uint32), weights / (total + score_eps) * route_scale]


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[mx.array, mx.array | None]:
    value = branch.astype(mx.float32)
    if post_weight is not None:
        value = value * post_weight
    stream = alpha * stream + beta * mx.fast.rms_norm(value, None, post_eps)
    if next_norm is None:
        return stream, None
    return stream, pre_norm(stream, next_norm, dtype=branch.dtype)


def pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    return mx.fast.rms_norm(stream, norm.weight, norm.eps).astype(dtype)


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    normed = mx.fast.rms_norm(experts * norm_weight, None, eps)
    return (normed * weights[..., None]).sum(axis=-2).astype(experts.dtype)


def qk_norm(
    qkvg: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    query_scale: float,
) -> list[mx.array]:
    heads = qkvg.reshape(*qkvg.shape[:-1], -1, head_dim)
    queries, keys = heads[..., :n_heads, :], heads[..., n_heads : n_heads + n_kv_heads, :]
    normed = mx.fast.rms_norm(queries, None, eps) * query_scale
    return [normed.astype(qkvg.dtype), mx.fast.rms_norm(keys, None, eps)]


def qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: int | mx.array, **sizes: Any
) -> list[mx.array]:
    def rotated(x: mx.array) -> mx.array:
        turned = mx.fast.rope(
            x.transpose(0, 2, 1, 3),
            x.shape[-1],
            traditional=True,
            base=rope_base,
            scale=1.0,
            offset=offset,
        )
        return turned.transpose(0, 2, 1, 3)

    return [rotated(x) for x in qk_norm(qkvg, **sizes)]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    rows, heads, length, dim = x.shape
    normed = mx.fast.rms_norm(x, None, eps).transpose(0, 2, 1, 3)
    return normed.reshape(rows, length, heads * dim) * mx.sigmoid(gate)


class Float32:
    """MLX, in which what the model rounds to bfloat16 stays as it is."""

    bfloat16 = mx.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


muse_spark.mx = Float32()  # greedy tokens must not hang on how a batch's sums are rounded

if not mx.metal.is_available():
    for kernel in (
        expert_routing,
        norm_add_norm,
        pre_norm,
        post_expert_norm_combine,
        qk_norm,
        qk_norm_rope,
        rms_norm_sigmoid_gate,
    ):
        setattr(muse_spark, kernel.__name__, kernel)
