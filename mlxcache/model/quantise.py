"""Quantised KV: keys and values in 4 or 8 bits, from the first token on. MLX thread only.

mlx-lm can begin to quantise a cache at some length (`quantized_kv_start`), but replies then depend
on where the chunks of the prompt ended. Quantising from the first token on avoids that, because the
key and the value of each position are quantised without regard to other positions, in groups of
numbers along the head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlxcache.errors import ModelError
from mlxcache.model.adapters import Recurrent, adapter_of, class_name, composed, parts_of

GROUPS = (64, 128, 32)
"""Numbers of values that may share a scale; the first that divides the size of a head is used."""

LONG = 1100
"""Length in tokens of the KV to check; above 1,024, MLX's GPU sums products of scores and values in
parts.
"""

ROWS = (1, 32)
"""Numbers of queries of a decode step and of a prefill, for which MLX's GPU has different kernels.
"""

_ALIKE = 0.5  # relative to the logits; wrong attention differs by more than 1
_REASONS = {
    "CacheList": "layers with an indexer or several attentions",
    "ChunkedKVCache": "chunked attention",
    "RotatingKVCache": "sliding windows",
}


def quantised(
    model: Any, make: Callable[[], list[Any]], bits: int, *, compare: bool = True
) -> Callable[[], list[Any]]:
    """Make a function that returns empty caches with quantised KV of `bits` bits.

    `make` returns the model's plain caches, one per layer. Caches of recurrent layers stay as they
    are. To check the result, `model` is fed two tokens with plain and with quantised KV, and the
    logits are compared; then MLX's products with long quantised KV are checked. Without `compare`
    nothing is evaluated, and only errors that mlx-lm raises for such caches are found.

    Raises ModelError if a cache class (which it names) or the size of a head cannot be quantised,
    if mlx-lm cannot run this model on such caches, if MLX multiplies quantised KV wrongly on this
    device, or if `model` has an attribute `unquantised`: a text with the reason why its KV cannot
    be quantised.
    """
    if (reason := getattr(model, "unquantised", None)) is not None:
        raise ModelError(f"--kv-bits {bits}: {reason}")
    plain = make()
    check_classes(plain, bits)
    tokens = mx.array([[0, 1]])
    expected = model(tokens, cache=plain)
    groups = [_group(cache, bits) for cache in plain]

    def caches(bits: int = bits) -> list[Any]:
        return [_replaced(*pair, bits) for pair in zip(make(), groups, strict=True)]

    _try(model, tokens, expected if compare else None, caches(8), bits)
    if compare:
        _check_products(plain, groups, bits)
    return caches


def _replaced(cache: Any, group: int | None, bits: int) -> Any:
    """Return an empty cache for a layer whose KV is quantised to `bits` bits.

    `cache`: the layer's plain cache, which is empty. `group`: how many consecutive numbers share a
    scale, or None to return `cache` itself.
    """
    if group is None:
        return cache
    if (parts := parts_of(cache)) is not None:
        return composed([_replaced(p, group if type(p) is KVCache else None, bits) for p in parts])
    return QuantizedKVCache(group_size=group, bits=bits)


def check_classes(caches: Sequence[Any], bits: int) -> None:
    """Raise ModelError with the names of the cache classes that cannot be quantised, if any.

    Also raises ModelError if none of `caches`, those of a model's layers, is for KV. `bits`: the
    value of --kv-bits, for the error message.
    """
    refused = sorted({name for cache in caches for name in _refused(cache)})
    if refused:
        named = ", ".join(
            f"{name} ({_REASONS[name]})" if name in _REASONS else name for name in refused
        )
        raise ModelError(f"--kv-bits {bits}: this model has {named}, which cannot be quantised.")
    if all(_kv(cache) is None for cache in caches):
        raise ModelError(f"--kv-bits {bits}: this model has no KV, so it would change nothing.")


def _refused(cache: Any) -> set[str]:
    """Return the names of cache classes in a layer's cache that --kv-bits cannot be used with.

    These can neither be quantised nor, as those of recurrent layers, stay as they are.
    """
    parts = parts_of(cache)
    if parts is None:
        fine = type(cache) is KVCache or isinstance(adapter_of(cache), Recurrent)
        return set() if fine else {class_name(cache)}
    if sum(type(part) is KVCache for part in parts) > 1:
        return {class_name(cache)}
    return {name for part in parts for name in _refused(part)}


def _kv(cache: Any) -> KVCache | None:
    """Return the `KVCache` in a layer's cache, or that cache if it is one; else None."""
    return next((part for part in parts_of(cache) or [cache] if type(part) is KVCache), None)


def _group(cache: Any, bits: int) -> int | None:
    """Return how many consecutive numbers of a layer's KV are to share a scale.

    `cache`: the layer's plain cache, after some tokens. Returns None if it has no KV to quantise.
    Raises ModelError if no supported group size divides the size of a head. `bits`: the value of
    --kv-bits, for the error message.
    """
    found = _kv(cache)
    if found is None or found.empty():
        return None
    sizes = sorted({array.shape[-1] for array in (found.keys, found.values)})
    group = next((g for g in GROUPS if all(size % g == 0 for size in sizes)), None)
    if group is None:
        named = " and ".join(map(str, sizes))
        raise ModelError(
            f"--kv-bits {bits}: this model's heads are of size {named}, and KV is quantised in "
            "groups of 32, 64 or 128."
        )
    return group


def _try(
    model: Any, tokens: mx.array, expected: mx.array | None, caches: list[Any], bits: int
) -> None:
    """Raise ModelError unless the model works with quantised KV.

    The model is fed `tokens` with `caches`, which are empty and quantised to 8 bits. Its logits
    must be about `expected`, those with plain KV; with None they are not compared. `bits`: the
    value of --kv-bits, for the error message.
    """
    try:
        made = model(tokens, cache=caches)
        if expected is None or _alike(made, expected):
            return
        why = "gives other logits on quantised KV"
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as failure:
        why = f"does not take quantised KV ({str(failure).partition(chr(10))[0]})"
    latent = sorted(_latent(model))
    if latent:
        why = f"keeps latents (MLA, {', '.join(latent)}), which cannot be quantised"
    raise ModelError(f"--kv-bits {bits}: the attention of {_name(model)} {why}.")


def _check_products(plain: Sequence[Any], groups: Sequence[int | None], bits: int) -> None:
    """Raise ModelError unless MLX multiplies long quantised KV correctly on this device.

    `plain`: the plain cache of each layer; its head sizes are checked. `groups`: how many numbers
    share a scale in each layer, None if the layer's KV is not quantised. `bits`: bits of a
    quantised number. Long KV is needed to show a known error: beyond 1,024 tokens, a GPU may leave
    part of each head unwritten if the head's size is no multiple of 64. Source:
    https://github.com/ml-explore/mlx/issues/4250
    """
    sizes = {
        (found.values.shape[-1], group)
        for cache, group in zip(plain, groups, strict=True)
        if group is not None and (found := _kv(cache)) is not None
    }
    for size, group in sorted(sizes):
        kinds: dict[str, Any] = {"group_size": group, "bits": bits}
        packed = mx.quantize(_noise(LONG, size), **kinds)
        values = mx.dequantize(*packed, **kinds)
        for rows in ROWS:
            scores = _noise(rows, LONG)
            made = mx.quantized_matmul(scores, *packed, transpose=False, **kinds)
            if not _alike(made, scores @ values):
                raise ModelError(
                    f"--kv-bits {bits}: on this device MLX {version('mlx')} multiplies KV wrongly "
                    f"for heads of size {size}: update mlx, or serve without --kv-bits."
                )


def _noise(rows: int, size: int) -> mx.array:
    """Return normally distributed numbers of shape (1, 1, rows, size), from a fixed seed."""
    return mx.random.normal((1, 1, rows, size), key=mx.random.key(rows))


def _alike(made: mx.array, expected: mx.array) -> bool:
    error, size = (mx.sum(x.astype(mx.float32) ** 2) for x in (made - expected, expected))
    return bool((error <= _ALIKE**2 * size).item())


def _latent(model: Any) -> set[str]:
    """Return the class names of a model's layers with multi-head latent attention (MLA)."""
    if not isinstance(model, nn.Module):
        return set()
    return {type(m).__name__ for _, m in model.named_modules() if hasattr(m, "kv_lora_rank")}


def _name(model: Any) -> str:
    return str(getattr(model, "model_type", type(model).__name__))
