"""Prompt caches that mlx-lm's own tools made (see `mlx_lm_format`). On the MLX thread only.

Every shape is checked before anything is read. Whose KV it is, the file does not say: see
`mlx_lm_check`.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcache.errors import SnapshotRefused
from mlxcache.model import kv
from mlxcache.model.adapters import adapter_of, class_name, parts_of
from mlxcache.model.arrays import ArraySpec
from mlxcache.model.checkpointed import Checkpointed
from mlxcache.model.kv import Layout, State
from mlxcache.model.mlx_lm_format import IDS
from mlxcache.safetensors import Header, Malformed, Place, read_foreign_header
from mlxcache.types import Tokens

_MOST_SMALL = 4096  # bytes of a number or a class's name
_OTHER_WINDOWS = "sliding windows are of another size"
_OTHERWISE = {
    "QuantizedKVCache": "it was made with --kv-bits",
    "RotatingKVCache": "it was made with --max-kv-size",
}


@dataclass(frozen=True, slots=True, eq=False)
class PromptCache:
    """KV of `length` tokens; every array is lazy.

    `arrays`: as a lineage takes them, per linear slot, shape (1, heads, length, dim). None where
    the file has no more of a sliding window than its newest positions: enough to go on, too little
    to be cut at any token, so the tokens have to be computed. `state`: that of the opaque slots.
    `ids`: the tokens, if the file has them. `model`: what the tool calls the model.
    """

    length: int
    arrays: list[list[mx.array]] | None
    state: State
    ids: Tokens | None
    model: str | None


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The token ids that `mlx_lm.cache_prompt --prompt` makes of its argument."""
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(prompt))
    message = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(
        message, add_generation_prompt=False, continue_final_message=True
    )
    return list(ids)


def read_prompt_cache(path: Path, layout: Layout, stream: Any) -> PromptCache:
    """The prompt cache in the file `path`, for a model of `layout`; arrays are read on `stream`.

    Raises SnapshotRefused, a sentence, where it is not one, or not of this model's shapes.
    """
    header = _header(path)
    try:
        arrays = mx.load(str(path), format="safetensors", stream=stream)
    except (RuntimeError, ValueError, OSError) as error:
        raise SnapshotRefused(f"{path} cannot be read: {error}") from error
    assert isinstance(arrays, dict)
    return _Reader(header, arrays, layout).read()


def _header(path: Path) -> Header:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            return read_foreign_header(fd, own=False)
        finally:
            os.close(fd)
    except (OSError, Malformed) as error:
        raise SnapshotRefused(f"{path} is not a prompt cache: {error}.") from error


class _Reader:
    """One file; takes only the keys that a cache of `layout` has."""

    def __init__(self, header: Header, arrays: Mapping[str, mx.array], layout: Layout):
        self._places: Mapping[str, Place] = {place.name: place for place in header.places}
        self._metadata = header.metadata
        self._arrays = arrays
        self._layout = layout

    def read(self) -> PromptCache:
        """Raises SnapshotRefused."""
        found: list[tuple[Any, str]] = []
        caches = self._layout.make()
        for index, cache in enumerate(caches):
            self._check_class(self._metadata.get(f"1.{index}"), cache)
            found += self._slots(cache, str(index))
        if f"1.{len(caches)}" in self._metadata:
            raise SnapshotRefused("The prompt cache is of a model with more layers.")
        linear = [found[i] for i in self._layout.linear]
        opaque = [key for slot, key in found if isinstance(adapter_of(slot), Checkpointed)]
        state = tuple(
            self._state(adapter, key, like)
            for adapter, key, like in zip(
                self._layout.checkpointed, opaque, self._layout.states, strict=True
            )
        )
        ids = self._ids()
        length = self._length(linear, state, ids)
        slots = [
            self._linear(slot, key, length, spec)
            for (slot, key), spec in zip(linear, self._layout.specs, strict=True)
        ]
        whole = [slot for slot in slots if slot is not None]
        arrays = whole if len(whole) == len(slots) else None
        return PromptCache(length, arrays, state, ids, self._metadata.get("0.model"))

    def _length(self, linear: Sequence[tuple[Any, str]], state: State, ids: Tokens | None) -> int:
        """How many tokens it covers, on which all of it must agree."""
        lengths = {self._number(f"{key}.2") for _, key in linear}
        positions = [a.position(s) for a, s in zip(self._layout.checkpointed, state, strict=True)]
        lengths |= {position for position in positions if position is not None}
        if ids is not None:
            lengths.add(len(ids))
        elif any(kv.sliced(slot).quantised for slot, _ in linear):
            raise SnapshotRefused(
                "The prompt cache was made by mlx-lm with --kv-bits, which quantises after the "
                "first chunk: it is not what is computed here."
            )
        if len(lengths) > 1:
            raise SnapshotRefused("The prompt cache's layers are not equally long.")
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

    def _slots(self, cache: Any, key: str) -> list[tuple[Any, str]]:
        """The slots of one layer, each with the key of its state."""
        parts = parts_of(cache)
        if parts is None:
            return [(cache, key)]
        found = []
        for index, part in enumerate(parts):
            self._check_class(self._text(f"{key}.{index}.1"), part)
            found += self._slots(part, f"{key}.{index}.0")
        return found

    def _linear(
        self, slot: Any, key: str, length: int, spec: Sequence[tuple[int, int, Any]]
    ) -> list[mx.array] | None:
        """A linear slot's arrays; None where positions are missing."""
        adapter = kv.sliced(slot)
        window = adapter.window(slot)
        for place, number in adapter.numbers(slot).items():
            if self._number(f"{key}.{place}") != number:
                what = "KV is quantised otherwise" if window is None else _OTHER_WINDOWS
                raise SnapshotRefused(f"The prompt cache's {what}.")
        if window is not None and length > window:
            return None
        found = []
        for place, (heads, dim, dtype) in zip(adapter.places, spec, strict=True):
            array = self._array(f"{key}.{place}", ArraySpec((1, heads, None, dim), dtype))
            if array.shape[2] < length:
                raise SnapshotRefused("The prompt cache is shorter than it claims.")
            found.append(array[..., :length, :])
        return found

    def _state(self, adapter: Checkpointed, key: str, like: Any) -> Any:
        """An opaque slot's state as `kv.capture` has it."""
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
                raise SnapshotRefused(f"The prompt cache holds something at {key}.")
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

    def _small(self, key: str) -> mx.array:
        place = self._places.get(key)
        if place is None or place.nbytes > _MOST_SMALL:
            raise SnapshotRefused("The prompt cache was made by another version of mlx-lm.")
        return self._arrays[key]

    def _number(self, key: str) -> int:
        array = self._small(key)
        if array.size != 1 or array.dtype != mx.int32:
            raise SnapshotRefused("The prompt cache was made by another version of mlx-lm.")
        return int(array.item())  # type: ignore[arg-type]

    def _text(self, key: str) -> str:
        array = self._small(key)
        if array.dtype != mx.int32 or array.ndim != 1:
            raise SnapshotRefused("The prompt cache was made by another version of mlx-lm.")
        return bytes(array.astype(mx.uint8).tolist()).decode("ascii", "replace")  # type: ignore[arg-type]

    def _ids(self) -> Tokens | None:
        text = self._metadata.get(f"0.{IDS}")
        if text is None:
            return None
        try:
            return np.frombuffer(base64.b64decode(text, validate=True), "<i4").astype(np.int32)
        except (binascii.Error, ValueError) as error:
            raise SnapshotRefused("The prompt cache's token ids are damaged.") from error
