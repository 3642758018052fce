"""Keys and values in 8 or 4 bits, for every model whose caches have rows of positions.

A position is quantised when it is fed, and what is kept of it depends on that position alone. From
a later token on, replies would depend on where the chunks of a prompt ended. MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlxcache.errors import ModelError
from mlxcache.model import device
from mlxcache.model.adapters import (
    Recurrent,
    WindowCache,
    adapter_of,
    class_name,
    composed,
    parts_of,
    register,
)

FEW = 15
"""Queries up to which a GPU multiplies quantised keys; it would materialise the scores of more."""

PLACES = (("0.0", "1.0"), ("0.1", "0.2"), ("1.1", "1.2"))
"""Keys of the arrays of a cache's parts in the flattened state of mlx-lm's `QuantizedKVCache`."""


@dataclass(frozen=True, slots=True)
class Form:
    """Form in which a layer's keys and values are kept.

    `keys`, `values`: bits of a number; 16 stands for the model's own dtype. `group`: numbers that
    share a scale and a bias. `few`: queries up to which attention multiplies quantised numbers.
    """

    keys: int
    values: int
    group: int
    few: int = 0

    @property
    def sides(self) -> tuple[int, int]:
        return self.keys, self.values


class QuantisedCache:
    """Cache of one layer, for one sequence or a batch, with keys and values in fewer bits.

    `parts` are caches of two arrays each, which grow, slide, join and are cut as if these were keys
    and values: first the numbers of both, then scales and biases of each that is quantised.

    For a chunk, the model gets all rows of the layer in its own dtype, which are dropped after its
    attention. For few queries it may get tuples, and `bits`, by which mlx-lm's attention chooses
    its product with quantised keys.
    """

    def __init__(self, parts: Sequence[Any], form: Form):
        self.parts = list(parts)
        self.form = form
        self.group_size = form.group
        self._multiplied = False

    @classmethod
    def like(cls, cache: Any, form: Form) -> QuantisedCache:
        """Make an empty one instead of the empty `cache`."""
        count = 1 + sum(bits < 16 for bits in form.sides)
        if type(cache) is WindowCache:
            return cls([WindowCache(cache.max_size) for _ in range(count)], form)
        return cls([KVCache() for _ in range(count)], form)

    def of(self, parts: Sequence[Any]) -> QuantisedCache:
        return QuantisedCache(parts, self.form)

    @property
    def bits(self) -> int:
        if not self._multiplied:
            raise AttributeError("the keys and values are not quantised as the model gets them")
        return self.form.keys

    @property
    def offset(self) -> Any:
        return self.parts[0].offset

    @property
    def keys(self) -> Any:
        return self.parts[0].keys

    @keys.setter
    def keys(self, numbers: mx.array) -> None:  # a model on several machines adds a dependency
        vars(self.parts[0]).update(keys=numbers)

    @property
    def state(self) -> list[Any]:
        return [part.state for part in self.parts]

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.parts[0].make_mask(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._multiplied = keys.shape[2] <= self.form.few
        sides = [
            (array,) if bits == 16 else mx.quantize(array, self.form.group, bits)
            for array, bits in zip((keys, values), self.form.sides, strict=True)
        ]
        pairs = [tuple(side[0] for side in sides), *(side[1:] for side in sides if len(side) > 1)]
        held = [part.update_and_fetch(*pair) for part, pair in zip(self.parts, pairs, strict=True)]
        return self._shown(held, read=not self._multiplied)

    def keys_and_values(self) -> tuple[Any, Any]:
        return self._shown(self._held(), read=not self._multiplied)

    def read(self) -> tuple[mx.array, mx.array]:
        """Return keys and values in the model's dtype, lazily."""
        return self._shown(self._held(), read=True)

    def _held(self) -> list[Any]:
        return [part.keys_and_values() for part in self.parts]

    def _shown(self, held: Sequence[Any], *, read: bool) -> tuple[Any, Any]:
        numbers, *scales = held
        shown: list[Any] = []
        for array, bits in zip(numbers, self.form.sides, strict=True):
            if bits == 16:
                shown.append(array)
            else:
                side = (array, *scales.pop(0))
                shown.append(dequantised(*side, bits=bits) if read else side)
        return shown[0], shown[1]

    def extend(self, other: QuantisedCache) -> None:
        for part, its in zip(self.parts, other.parts, strict=True):
            part.extend(its)

    def filter(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.filter(rows)

    @property
    def portable(self) -> bool:
        """True if mlx-lm has a class with the same content."""
        return all(type(p) is KVCache for p in self.parts) and self.form.keys == self.form.values

    @property
    def name(self) -> str:
        kind = class_name(self.parts[0])
        return "QuantizedKVCache" if self.portable else f"quantised {kind}"

    def plain(self) -> QuantizedKVCache:
        empty = self.parts[0].keys is None
        sides = (None, None) if empty else self._shown(self._held(), read=False)
        return QuantizedKVCache.from_state((*sides, self.offset, self.form.group, self.form.keys))


register({}, [QuantisedCache])


def dequantised(packed: mx.array, scales: mx.array, biases: mx.array, *, bits: int) -> mx.array:
    """Convert quantised numbers to the dtype of their scales, lazily.

    MLX has no kernel for it on a CPU, where it takes 1.6 to 6 times as long as this.
    """
    group = packed.shape[-1] * 32 // bits // scales.shape[-1]
    if device.kind() == "gpu" or bits not in {4, 8}:
        return mx.dequantize(packed, scales, biases, group, bits)
    numbers = packed.view(mx.uint8)
    if bits == 4:
        numbers = mx.stack([numbers & 15, numbers >> 4], axis=-1)
    numbers = numbers.reshape(*scales.shape, group).astype(scales.dtype)
    return (numbers * scales[..., None] + biases[..., None]).flatten(-2)


# -- which models can be quantised -----------------------------------------------------------------

_GROUPS = (64, 128, 32)  # values that share a scale: the first that divides the size of a head
_LONG = 1100  # tokens of the KV to check; above 1,024, MLX's GPU sums products in parts
_ALIKE = 0.5  # relative to the logits; wrong attention differs by more than 1
_REASONS = {
    "CacheList": "layers with an indexer or several attentions",
    "ChunkedKVCache": "chunked attention",
    "RotatingKVCache": "windows that keep their first tokens",
}


def quantised(
    model: Any, make: Callable[[], list[Any]], bits: int, *, compare: bool = True
) -> Callable[[], list[Any]]:
    """Make a function that returns empty caches with KV of 4 or 8 bits from the first token on.

    The result is checked: two tokens are fed with plain and with quantised KV. Without `compare`
    nothing is evaluated, and only errors that mlx-lm raises for such caches are found. Raises
    ModelError, which names what cannot be quantised.
    """
    if (reason := getattr(model, "unquantised", None)) is not None:
        raise ModelError(f"--kv-bits {bits}: {reason}")
    fed = make()
    check_classes(fed, bits)
    tokens = mx.array([[0, 1]])
    expected = model(tokens, cache=fed)

    def caches(bits: int, few: Few) -> Callable[[], list[Any]]:
        forms = [_forms(one, bits, few) for one in fed]
        return lambda: [_with_form(*pair) for pair in zip(make(), forms, strict=True)]

    why = ""
    for few in _ways(compare=compare):
        made = caches(bits, few)
        why = _failure(model, tokens, expected if compare else None, caches(8, few)())
        if not why:
            return made
    name = getattr(model, "model_type", type(model).__name__)
    raise ModelError(f"--kv-bits {bits}: the attention of {name} {why}.")


Few = Callable[[int, int, int], int]
"""`Form.few` for heads of a size, in groups of a size, with bits of a number."""


def _ways(*, compare: bool) -> Iterator[Few]:
    """Yield the ways in which attention may read quantised KV on this device, the fastest first.

    A CPU multiplies quantised bfloat16 at a third of the speed at which it reads it and multiplies.
    """
    if device.kind() == "gpu":
        checked = cache(lambda *form: FEW if _multiplies(*form) else 0)
        yield checked if compare else lambda *_: FEW
    yield lambda *_: 0


def check_classes(caches: Sequence[Any], bits: int) -> None:
    """Raise ModelError with the names of the cache classes that cannot be quantised."""
    refused = sorted({name for one in caches for name in _refused(one)})
    if refused:
        named = ", ".join(
            f"{name} ({_REASONS[name]})" if name in _REASONS else name for name in refused
        )
        raise ModelError(f"--kv-bits {bits}: this model has {named}, which cannot be quantised.")
    if not any(_has_rows(part) for one in caches for part in parts_of(one) or [one]):
        raise ModelError(f"--kv-bits {bits}: this model has no KV, so it would change nothing.")


def _has_rows(cache: Any) -> bool:
    return type(cache) in (KVCache, WindowCache)


def _refused(cache: Any) -> set[str]:
    parts = parts_of(cache)
    if parts is None:
        fine = _has_rows(cache) or isinstance(adapter_of(cache), Recurrent)
        return set() if fine else {class_name(cache)}
    if sum(map(_has_rows, parts)) > 1:
        return {class_name(cache)}
    return {name for part in parts for name in _refused(part)}


def _forms(fed: Any, bits: int, few: Few) -> Any:
    """Return the form of a cache that was fed, None if it stays as it is; of several, a list."""
    if (parts := parts_of(fed)) is not None:
        return [_forms(part, bits, few) for part in parts]
    if not _has_rows(fed) or fed.empty():
        return None
    (heads, size), (others, other) = ((a.shape[1], a.shape[3]) for a in (fed.keys, fed.values))
    if heads == others == 1 and size != other:
        if bits < 8:
            raise ModelError(
                f"--kv-bits {bits}: this model keeps latents (MLA), of which 4 bits are too few: "
                "use --kv-bits 8."
            )
        # the rotary part has another range, and is small
        latent, rotary = max(size, other), 16
        sides = (bits, rotary) if size == latent else (rotary, bits)
        return Form(*sides, _group([latent], bits))
    group = _group(sorted({size, other}), bits)
    return Form(bits, bits, group, few(other, group, bits))


def _group(sizes: Sequence[int], bits: int) -> int:
    group = next((g for g in _GROUPS if all(size % g == 0 for size in sizes)), None)
    if group is None:
        named = " and ".join(map(str, sizes))
        raise ModelError(
            f"--kv-bits {bits}: this model's heads are of size {named}, and KV is quantised in "
            "groups of 32, 64 or 128."
        )
    return group


def _with_form(cache: Any, form: Any) -> Any:
    if form is None:
        return cache
    if isinstance(form, list):
        parts = parts_of(cache) or []
        return composed(cache, [_with_form(*pair) for pair in zip(parts, form, strict=True)])
    return QuantisedCache.like(cache, form)


def _failure(model: Any, tokens: mx.array, expected: mx.array | None, caches: list[Any]) -> str:
    """Return why `model` cannot be fed with quantised caches, or an empty text."""
    try:
        made = model(tokens, cache=caches)
        if expected is None or _alike(made, expected):
            return ""
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as failure:
        return f"does not take quantised KV ({str(failure).partition(chr(10))[0]})"
    return "gives other logits on quantised KV"


def _multiplies(size: int, group: int, bits: int) -> bool:
    """Return whether MLX multiplies long quantised KV correctly on this device.

    Beyond 1,024 tokens, a GPU may leave part of each head unwritten if the head's size is no
    multiple of 64. Source: https://github.com/ml-explore/mlx/issues/4250
    """
    kinds: dict[str, Any] = {"group_size": group, "bits": bits}
    packed = mx.quantize(_noise(_LONG, size), **kinds)
    values = mx.dequantize(*packed, **kinds)
    scores = [_noise(rows, _LONG) for rows in (1, FEW)]
    made = [mx.quantized_matmul(one, *packed, transpose=False, **kinds) for one in scores]
    return all(_alike(one, its @ values) for one, its in zip(made, scores, strict=True))


def _noise(rows: int, size: int) -> mx.array:
    return mx.random.normal((1, 1, rows, size), key=mx.random.key(rows))


def _alike(made: mx.array, expected: mx.array) -> bool:
    error, size = (mx.sum(x.astype(mx.float32) ** 2) for x in (made - expected, expected))
    return bool((error <= _ALIKE**2 * size).item())
