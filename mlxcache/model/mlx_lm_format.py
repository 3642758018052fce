"""Prompt cache files of mlx-lm's own tools: writing, reading, and comparing with a model.

The format, as of mlx-lm 0.32.2 (mlx_lm/models/cache.py, save_prompt_cache), is a safetensors file
whose tensors are the flattened states of the caches. Numbers, texts and None in the states are
small tensors too, which the metadata lists. The metadata also has the names of the cache classes,
the model as given to --model, and the tokenizer's configuration. Files of mlx-lm have no token ids;
files written here add them. A file does not say which weights computed its KV; see `agrees`. MLX
thread only.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxcache.errors import SnapshotRefused, Unsupported
from mlxcache.model import device, kv
from mlxcache.model import serialise as wire
from mlxcache.model.adapters import (
    Checkpointed,
    Sliced,
    adapter_of,
    class_name,
    composed,
    parts_of,
)
from mlxcache.model.arrays import ArraySpec
from mlxcache.model.chat_template import apply_chat_template
from mlxcache.model.kv import Layout, State
from mlxcache.model.lineage import Lineage
from mlxcache.model.quantised import PLACES, QuantisedCache
from mlxcache.safetensors import ITEM_BYTES, Header, Malformed, Place, compose, read_foreign_header
from mlxcache.types import Tokens, ids_of_bytes

IDS = "mlxcache_ids"  # metadata key of the token ids in files written here: int32 in base64
CHUNK_BYTES = 4 << 20


def check_portable(layout: Layout) -> None:
    """Raise Unsupported if mlx-lm cannot load prompt cache files of a model with this layout."""
    if layout.foreign:
        raise Unsupported(
            f"mlx-lm cannot load prompt cache files with a {', '.join(layout.foreign)}, which "
            "this model has: export a snapshot."
        )


class PromptCacheFile:
    """A file for `mlx_lm.generate --prompt-cache-file`, as `nbytes` bytes to iterate once.

    `lineage` must begin at position 0, with states of its newest position, and must not be written
    to until the iteration ends. One array at a time is copied, and a device error is raised before
    the bytes of that array are yielded.
    """

    def __init__(self, lineage: Lineage, model: str, ids: Tokens):
        check_portable(lineage.layout)
        if len(ids) != lineage.length or not lineage.whole:
            raise ValueError(f"{len(ids)} ids for a lineage of {lineage.length} tokens")
        kept = len(lineage.layout.bare.make())
        caches = [_as_mlx_lm(cache) for cache in lineage.caches[:kept]]
        kinds: list[tuple[str, str]] = []
        self._leaves = [
            (key, _as_array(key, value, kinds))
            for key, value in tree_flatten([cache.state for cache in caches])
        ]
        tool = {
            "model": model,
            "tokenizer_config": json.dumps({}),
            IDS: base64.b64encode(ids.tobytes()).decode(),
        }
        names = [class_name(cache) for cache in caches]
        # tree_flatten drops an empty list, so mlx-lm puts an empty text first
        metadata = dict(tree_flatten([tool, names, ["", *kinds]]))
        places = [_place(key, array) for key, array in self._leaves]
        self._head = compose(metadata, places, own=False)
        self.nbytes = len(self._head) + sum(place.nbytes for place in places)

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for key, array in self._leaves:
            made = mx.contiguous(array)
            mx.eval(made)
            (tensor,) = wire.to_tensors([(key, made)])
            device.confirm()
            view = tensor.bytes
            for at in range(0, len(view), CHUNK_BYTES):
                yield bytes(view[at : at + CHUNK_BYTES])
            del made, tensor, view


def _as_mlx_lm(cache: Any) -> Any:
    if type(cache) is QuantisedCache:
        return cache.plain()
    parts = parts_of(cache)
    if parts is not None:
        return composed(cache, [_as_mlx_lm(part) for part in parts])
    adapter = adapter_of(cache)
    return cache if adapter is None else adapter.plain(cache)


def _as_array(key: str, value: Any, kinds: list[tuple[str, str]]) -> mx.array:
    if isinstance(value, mx.array):
        return value
    if isinstance(value, str):
        kinds.append((key, "string"))
        return mx.array([ord(char) for char in value])
    if value is None:
        kinds.append((key, "none"))
        return mx.array([])
    kinds.append((key, "scalar"))
    return mx.array(value)


def _place(key: str, array: mx.array) -> Place:
    dtype = wire.dtype_name(array.dtype)
    return Place(key, dtype, tuple(array.shape), 0, array.size * ITEM_BYTES[dtype])


_MOST_SMALL = 4096  # bytes of a number or a class's name
_OTHERWISE = {
    "QuantizedKVCache": "it was made with --kv-bits",
    "RotatingKVCache": "it was made with --max-kv-size",
}


@dataclass(frozen=True, slots=True, eq=False)
class PromptCache:
    """KV of `length` tokens from a prompt cache file, as lazy arrays.

    `arrays`: those of each linear slot, shape (1, heads, length, dim). `ids`: None if the file has
    no tokens.
    """

    length: int
    arrays: list[list[mx.array]]
    state: State
    ids: Tokens | None
    model: str | None


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids that `mlx_lm.cache_prompt --prompt` makes of its argument."""
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(prompt))
    message = [{"role": "user", "content": prompt}]
    ids = apply_chat_template(
        tokenizer, message, add_generation_prompt=False, continue_final_message=True
    )
    return list(ids)


def read_prompt_cache(path: Path, layout: Layout, stream: Any) -> PromptCache:
    """Read the prompt cache file `path` of a model of `layout`, as lazy, checked arrays."""
    check_portable(layout)
    header = _header(path)
    try:
        arrays = mx.load(str(path), format="safetensors", stream=stream)
    except (RuntimeError, ValueError, OSError) as error:
        raise SnapshotRefused(f"{path} cannot be read: {error}") from error
    assert isinstance(arrays, dict)
    found = _Reader(header, arrays, layout.bare).read()
    if not layout.heads:
        return found
    shapes = [(1, heads, found.length, dim) for heads, dim, _ in layout.specs[-1]]
    blank = [mx.zeros(s, spec[2]) for s, spec in zip(shapes, layout.specs[-1], strict=True)]
    return replace(
        found,
        arrays=[*found.arrays, blank],
        state=(*found.state, wire.filled(layout.states[-1])),
    )


def _header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            return read_foreign_header(file.fileno(), own=False)
    except (OSError, Malformed) as error:
        raise SnapshotRefused(f"{path} is not a prompt cache: {error}.") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Where a file has the arrays of a slot: their `places` in the state at `key`.

    `numbers`: the size of groups and the bits of quantised ones.
    """

    slot: Any
    key: str
    places: Sequence[str]
    numbers: tuple[int, ...] = ()


class _Reader:
    """Reader of one prompt cache file; uses only the keys that a cache of `layout` has."""

    def __init__(self, header: Header, arrays: Mapping[str, mx.array], layout: Layout):
        self._places: Mapping[str, Place] = {place.name: place for place in header.places}
        self._metadata = header.metadata
        self._arrays = arrays
        self._layout = layout

    def read(self) -> PromptCache:
        found: list[_Source] = []
        caches = self._layout.make()
        for index, cache in enumerate(caches):
            self._check_class(self._metadata.get(f"1.{index}"), cache)
            found += self._slots(cache, str(index))
        if f"1.{len(caches)}" in self._metadata:
            raise SnapshotRefused("The prompt cache is of a model with more layers.")
        linear = [found[i] for i in self._layout.linear]
        opaque = [one.key for one in found if isinstance(adapter_of(one.slot), Checkpointed)]
        state = tuple(
            self._state(adapter, key, like)
            for adapter, key, like in zip(
                self._layout.checkpointed, opaque, self._layout.states, strict=True
            )
        )
        ids = self._ids()
        length = self._length(linear, state, ids)
        arrays = [
            self._linear(source, length, spec)
            for source, spec in zip(linear, self._layout.specs, strict=True)
        ]
        return PromptCache(length, arrays, state, ids, self._metadata.get("0.model"))

    def _length(self, linear: Sequence[_Source], state: State, ids: Tokens | None) -> int:
        """Return the number of tokens on which slots, states and ids of the file agree."""
        lengths = {self._number(f"{source.key}.2") for source in linear}
        positions = [a.position(s) for a, s in zip(self._layout.checkpointed, state, strict=True)]
        lengths |= {position for position in positions if position is not None}
        if ids is not None:
            lengths.add(len(ids))
        elif any(source.numbers for source in linear):
            raise SnapshotRefused(
                "The prompt cache was made by mlx-lm with --kv-bits, which quantises after the "
                "first chunk: mlxcache quantises from the first token, so the values differ."
            )
        if len(lengths) > 1:
            raise SnapshotRefused(
                "The prompt cache's layers do not have the same number of positions."
            )
        length = lengths.pop() if lengths else 0
        if length < 0:
            raise SnapshotRefused("The prompt cache has a negative length.")
        return length

    def _check_class(self, name: str | None, cache: Any) -> None:
        expected = class_name(cache)
        if name != expected:
            why = _OTHERWISE.get(name or "", "it is of another model or version of mlx-lm")
            raise SnapshotRefused(
                f"The prompt cache has {name} where this model has {expected}: {why}."
            )

    def _slots(self, cache: Any, key: str) -> list[_Source]:
        if type(cache) is QuantisedCache:
            numbers = cache.form.group, cache.form.keys
            pairs = zip(cache.parts, PLACES, strict=True)
            return [_Source(part, key, places, numbers) for part, places in pairs]
        parts = parts_of(cache)
        if parts is None:
            adapter = adapter_of(cache)
            places = adapter.places if isinstance(adapter, Sliced) else ()
            return [_Source(cache, key, places)]
        found = []
        for index, part in enumerate(parts):
            self._check_class(self._text(f"{key}.{index}.1"), part)
            found += self._slots(part, f"{key}.{index}.0")
        return found

    def _linear(
        self, source: _Source, length: int, spec: Sequence[tuple[int, int, Any]]
    ) -> list[mx.array]:
        """Return a slot's arrays of the first `length` positions."""
        if any(self._number(f"{source.key}.{i}") != n for i, n in enumerate(source.numbers, 3)):
            raise SnapshotRefused("The prompt cache's KV is quantised otherwise.")
        found = []
        for place, (heads, dim, dtype) in zip(source.places, spec, strict=True):
            array = self._array(f"{source.key}.{place}", ArraySpec((1, heads, None, dim), dtype))
            if array.shape[2] < length:
                raise SnapshotRefused("The prompt cache has fewer positions than it states.")
            found.append(array[..., :length, :])
        return found

    def _state(self, adapter: Checkpointed, key: str, like: Any) -> Any:
        try:
            return adapter.adopted(self._tree(key, like), like)
        except ValueError as error:
            raise SnapshotRefused(f"The prompt cache's {error}.") from error

    def _tree(self, key: str, like: Any) -> Any:
        if isinstance(like, tuple):
            return tuple(self._tree(f"{key}.{i}", part) for i, part in enumerate(like))
        if isinstance(like, ArraySpec):
            return self._array(key, like)
        if like is None:
            if key not in self._places or self._places[key].nbytes:
                raise SnapshotRefused(f"The prompt cache has an unexpected value at {key}.")
            return None
        return self._number(key)

    def _array(self, key: str, spec: ArraySpec) -> mx.array:
        array = self._arrays.get(key)
        if array is None or not spec.fits(array):
            raise SnapshotRefused(
                "The prompt cache is not of this model's shapes: it is of another model or "
                "version of mlx-lm."
            )
        return array

    def _small(self, key: str) -> list[int]:
        place = self._places.get(key)
        if place is None or place.nbytes > _MOST_SMALL or place.dtype != "I32":
            raise SnapshotRefused("The prompt cache was made by another version of mlx-lm.")
        return self._arrays[key].flatten().tolist()  # type: ignore[return-value]

    def _number(self, key: str) -> int:
        found = self._small(key)
        if len(found) != 1:
            raise SnapshotRefused("The prompt cache was made by another version of mlx-lm.")
        return found[0]

    def _text(self, key: str) -> str:
        return bytes(code & 0xFF for code in self._small(key)).decode("ascii", "replace")

    def _ids(self) -> Tokens | None:
        text = self._metadata.get(f"0.{IDS}")
        if text is None:
            return None
        try:
            return ids_of_bytes(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise SnapshotRefused("The prompt cache's token ids are damaged.") from error


CHECKED_TOKENS = 64  # whose KV is computed again in every layer for comparison
_CHUNK = 1024
_TOLERANCE = 0.05  # relative to the values; those of other weights or tokens differ by about 1


def agrees(model: Any, layout: Layout, found: PromptCache, ids: Tokens) -> bool:
    """Return whether `found` holds what `model` computes for `ids`. Blocks while it computes.

    A file does not name the weights that made it; one that mlx-lm wrote has no tokens either. So
    the KV of the first 64 tokens is computed again in every layer, and compared. If the file has no
    token ids, the KV of all tokens is compared in the first layer.
    """
    if not layout.linear or not 0 < len(ids) == found.length:
        return False
    count = min(len(ids), CHECKED_TOKENS)
    head = _computed(model, layout, ids[:count])
    theirs = _comparable(layout, found.arrays, slice(0, count))
    slots = zip(head, theirs, strict=True)
    if not all(_rows_alike(*pair) for both in slots for pair in zip(*both, strict=True)):
        return False
    if found.ids is not None:
        return True
    return layout.linear[0] == 0 and _first_layer_agrees(model, layout, found.arrays, ids)


def _first_layer_agrees(
    model: Any, layout: Layout, arrays: Sequence[Sequence[mx.array]], ids: Tokens
) -> bool:
    """Return whether the KV of the first layer in `arrays` belongs to the tokens `ids`.

    It is computed again in parts that are each fed from position 0. An array that depends on the
    tokens alone (the values, or latents) must agree at every token; the other one depends on the
    position too.
    """
    same: list[bool] = []
    for at in range(0, len(ids), _CHUNK):
        end = min(at + _CHUNK, len(ids))
        made = _computed(model, layout, ids[at:end])[0]
        read = _comparable(layout, arrays, slice(at, end))[0]
        alike = [_rows_alike(*pair) for pair in zip(made, read, strict=True)]
        same = [a and b for a, b in zip(same or alike, alike, strict=True)]
    return any(same)


def _computed(model: Any, layout: Layout, ids: Tokens) -> list[list[mx.array]]:
    """Feed `ids` from position 0; return the lazy arrays of each linear slot, as plain KV.

    That of heads is left out: files need not have it.
    """
    caches = layout.make()
    model(mx.array(ids[None]), cache=caches)
    kept = caches[: len(layout.bare.make())]
    return [arrays for cache in kept for arrays in _rows_of(cache)]


def _comparable(
    layout: Layout, arrays: Sequence[Sequence[mx.array]], rows: slice
) -> list[list[mx.array]]:
    """Return a part of `arrays`, those of each linear slot, as `_computed` does."""
    caches = layout.bare.make()
    slots = kv.flatten(caches)
    for i, held in zip(layout.bare.linear, arrays, strict=False):
        kv.set_arrays(slots[i], [array[..., rows, :] for array in held], rows.stop - rows.start)
    return [arrays for cache in caches for arrays in _rows_of(cache)]


def _rows_of(cache: Any) -> Iterator[list[mx.array]]:
    """Yield the arrays of each linear slot, and of quantised ones keys and values."""
    if type(cache) is QuantisedCache:
        yield list(cache.read())
    elif (parts := parts_of(cache)) is not None:
        for part in parts:
            yield from _rows_of(part)
    elif isinstance(adapter := adapter_of(cache), Sliced) and adapter.filled(cache):
        yield [array[..., : cache.offset, :] for array in adapter.arrays(cache)]


def _rows_alike(ours: mx.array, theirs: mx.array) -> bool:
    """Return whether the numbers of all heads differ by at most 5% (RMS) at every position."""
    a, b = ours.astype(mx.float32), theirs.astype(mx.float32)
    error, size = (mx.sum(x * x, axis=(0, 1, 3)) for x in (a - b, a))
    return bool(mx.all(error <= _TOLERANCE**2 * size + 1e-6).item())
