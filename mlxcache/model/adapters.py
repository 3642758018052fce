"""mlx-lm's cache classes, by the way in which their content can be reused. MLX thread only.

A model's cache is a list with one object per layer. A composite cache is replaced by its members.
These objects are called *slots*. A slot is one of

- sliced: arrays with a row for every position, token axis -2; any range can be sliced out;
- a window: sliced too, but continuing at a position needs only the positions shortly before it;
- checkpointed: its state stands for exactly one position.

Only this module, `rows` and `quantise` name the classes. A class that is not named here is unknown,
and is never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


class Sliced:
    """Adapter of a class whose slots hold a row for every position.

    `name` is mlx-lm's name of the class. `places` are the keys of a slot's arrays in its `state`.
    `verb` is the kind of reuse. `batchable`: mlx-lm has a class for several sequences.
    """

    verb = "slice"
    quantised = False

    def __init__(self, name: str, places: Sequence[str] = ("0", "1"), *, batchable: bool = True):
        self.name = name
        self.places = tuple(places)
        self.batchable = batchable

    def filled(self, slot: Any) -> bool:
        """Tell if the slot has ever been written to."""
        return slot.keys is not None

    def arrays(self, slot: Any) -> list[mx.array]:
        """The slot's arrays, shape (1, heads, capacity, dim) each, in the order of `places`."""
        return [slot.keys, slot.values]

    def put(self, slot: Any, index: int, array: mx.array) -> None:
        """Replace the slot's array number `index`."""
        setattr(slot, ("keys", "values")[index], array)

    def end_at(self, slot: Any, offset: int) -> None:
        """Set the slot's length to `offset`; positions beyond it will be overwritten."""
        slot.offset = offset

    def window(self, slot: Any) -> int | None:
        """Positions that a new one sees, itself included; None for all of them."""
        return None

    def numbers(self, slot: Any) -> dict[str, int]:
        """Integers in the slot's state that the model determines, by their keys in the state."""
        return {}

    def plain(self, slot: Any) -> Any:
        """A cache of mlx-lm's own class with the same content and no capacity beyond it. Views."""
        if not self.filled(slot):
            return slot
        twin = self.empty_like(slot)
        for index, array in enumerate(self.arrays(slot)):
            self.put(twin, index, array[..., : slot.offset, :])
        twin.offset = slot.offset
        return twin

    def empty_like(self, slot: Any) -> Any:
        """An empty slot of the same kind."""
        return type(slot)()

    def comparable(self, slot: Any, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Convert arrays of such a slot to a form in which similar KV has similar numbers."""
        return list(arrays)


class Windowed(Sliced):
    """Adapter of `WindowCache`, a sliding window kept as a log."""

    verb = "window"

    def end_at(self, slot: Any, offset: int) -> None:
        slot.offset = slot._idx = offset
        slot._start = max(0, offset - slot.max_size)

    def window(self, slot: Any) -> int | None:
        return int(slot.max_size)

    def numbers(self, slot: Any) -> dict[str, int]:
        return {"3": 0, "4": slot.max_size}

    def plain(self, slot: Any) -> Any:
        return slot.ring()


class Quantised(Sliced):
    """Adapter of KV quantised along each head: packed numbers, scales and biases of both."""

    quantised = True

    def arrays(self, slot: Any) -> list[mx.array]:
        return [*slot.keys, *slot.values]

    def put(self, slot: Any, index: int, array: mx.array) -> None:
        name = ("keys", "values")[index // 3]
        held = list(getattr(slot, name) or (None, None, None))
        held[index % 3] = array
        setattr(slot, name, tuple(held))

    def numbers(self, slot: Any) -> dict[str, int]:
        return {"3": slot.group_size, "4": slot.bits}

    def empty_like(self, slot: Any) -> Any:
        return type(slot)(group_size=slot.group_size, bits=slot.bits)

    def comparable(self, slot: Any, arrays: Sequence[mx.array]) -> list[mx.array]:
        size, bits = slot.group_size, slot.bits
        return [
            mx.dequantize(packed, scales, biases, group_size=size, bits=bits)
            for packed, scales, biases in (arrays[:3], arrays[3:])
        ]


class WindowCache(RotatingKVCache):  # type: ignore[misc]
    """A sliding window kept as a log of every position instead of a ring.

    The model sees exactly what `RotatingKVCache` would show it: the last `max_size - 1` positions
    and the new ones, in temporal order. Nothing is overwritten, so the window before any position
    can be sliced out later, and a step appends in place.
    """

    step = 256
    offset: int

    def __init__(self, max_size: int):
        super().__init__(max_size=max_size, keep=0)
        self._start = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, shape (1, heads, n, dim); return the window that they see."""
        end = self.offset + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2]:
            self._extend(keys, values)
        self.keys[..., self.offset : end, :] = keys
        self.values[..., self.offset : end, :] = values
        self._start = max(0, self.offset - self.max_size + 1)
        self.offset = self._idx = end
        return self.keys_and_values()

    def _extend(self, keys: mx.array, values: mx.array) -> None:
        steps = (self.step + keys.shape[2] - 1) // self.step * self.step
        for name, new in (("keys", keys), ("values", values)):
            old = getattr(self, name)
            pad = mx.zeros((*new.shape[:2], steps, new.shape[3]), new.dtype)
            kept = pad if old is None else mx.concatenate([old[..., : self.offset, :], pad], axis=2)
            setattr(self, name, kept)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The keys and values that the newest positions see, in temporal order."""
        view = (..., slice(self._start, self.offset), slice(None))
        return self.keys[view], self.values[view]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """The mask of `RotatingKVCache.make_mask`, for keys in temporal order."""
        if N > 1:
            return super().make_mask(N, window_size=window_size, return_array=return_array)
        if window_size is None or window_size >= self.max_size or self.offset < window_size:
            return None
        seen = min(self.offset + 1, self.max_size)
        return mx.arange(seen) >= seen - window_size

    def is_trimmable(self) -> bool:
        """True: no position is ever overwritten."""
        return True

    @classmethod
    def merge(cls, caches: Sequence[WindowCache]) -> BatchRotatingKVCache:
        """Build a batch cache that holds the windows alone."""
        return BatchRotatingKVCache.merge([c.ring() for c in caches])

    def ring(self) -> RotatingKVCache:
        """The window before the next position, as mlx-lm's own class. Views."""
        ring = RotatingKVCache(max_size=self.max_size)
        if self.keys is not None:
            start = max(0, self.offset - self.max_size)
            ring.keys = self.keys[..., start : self.offset, :]
            ring.values = self.values[..., start : self.offset, :]
            ring.offset, ring._idx = self.offset, self.offset - start
        return ring


class Checkpointed:
    """Adapter of a class whose slots hold a state that stands for one position.

    `growing` is the axis of its arrays that may have any size, None where all sizes are fixed.
    """

    verb = "checkpoint"
    growing: int | None = None

    def __init__(self, name: str, *, batchable: bool = False):
        self.name = name
        self.batchable = batchable

    def state(self, slot: Any) -> Any:
        """The slot's state, without positions that no later one sees: nested tuples. Lazy views."""
        return slot.state

    def set_state(self, slot: Any, state: Any) -> None:
        """Set the slot's state, which the caller must not write to afterwards."""
        slot.state = state

    def most_bytes(self, slot: Any) -> int | None:
        """Upper bound of the state's bytes for any length; None if they never change."""
        return None

    def running_bytes(self, slot: Any) -> int | None:
        """Upper bound of the bytes held during a step; None if no more than the state."""
        return None

    def position(self, state: Any) -> int | None:
        """Number of positions that a state covers; None where the state does not say."""
        return None

    def agrees(self, state: Any, like: Any) -> bool:
        """Tell if a state's numbers fit its arrays, and those that the model fixes in `like`."""
        return True

    def adopted(self, state: Any, like: Any) -> Any:
        """Convert a state saved by mlx-lm to the form of `state`. Raises ValueError."""
        return state


class Recurrent(Checkpointed):
    """Adapter of `ArraysCache`: arrays whose size does not depend on the length of the text."""

    def set_state(self, slot: Any, state: Any) -> None:
        slot.state = [list(state[0]), *state[1:]]


class Chunked(Checkpointed):
    """Adapter of `ChunkedKVCache`: the newest `chunk_size` positions, and their start."""

    growing = 2

    def state(self, slot: Any) -> Any:
        if slot.keys is None:
            return slot.state
        return self._cut(slot.state)

    def _cut(self, state: Any) -> Any:
        keys, values, offset, chunk, begin = state
        end = offset - begin
        first = max(0, end - chunk)
        return keys[..., first:end, :], values[..., first:end, :], offset, chunk, begin + first

    def most_bytes(self, slot: Any) -> int | None:
        if slot.keys is None:
            return 0
        return _row_bytes(slot) * int(slot.chunk_size)

    def running_bytes(self, slot: Any) -> int | None:
        if slot.keys is None:
            return 0
        return _row_bytes(slot) * int(slot.chunk_size + slot.step)  # it allocates in steps

    def position(self, state: Any) -> int | None:
        return int(state[2])

    def agrees(self, state: Any, like: Any) -> bool:
        keys, values, offset, chunk, begin = state
        held = keys.shape[2]
        return bool(
            held == values.shape[2] == offset - begin and begin >= 0 and held <= chunk == like[3]
        )

    def adopted(self, state: Any, like: Any) -> Any:
        keys, values, offset, chunk, begin = state
        held = min(keys.shape[2], values.shape[2])
        if begin < 0 or chunk != like[3] or not 0 <= offset - begin <= held:
            raise ValueError("chunk positions contradict each other")
        return self._cut(state)


class Ring(Checkpointed):
    """Adapter of a `RotatingKVCache` with `keep`: overwritten positions cannot be restored."""

    growing = 2

    def state(self, slot: Any) -> Any:
        if slot.keys is None:
            return slot.state
        keys, values = (self._in_order(slot, a) for a in (slot.keys, slot.values))
        return keys, values, slot.offset, slot.keep, slot.max_size, keys.shape[2]

    def _in_order(self, slot: Any, array: mx.array) -> mx.array:
        array = slot._temporal_order(array)
        trimmed: mx.array = slot._trim(array.shape[2] - slot.max_size, array)
        return trimmed

    def most_bytes(self, slot: Any) -> int | None:
        if slot.keys is None:
            return 0
        return _row_bytes(slot) * int(slot.max_size)

    def position(self, state: Any) -> int | None:
        return int(state[2])

    def agrees(self, state: Any, like: Any) -> bool:
        keys, values, offset, keep, size, index = state
        held = keys.shape[2]
        return bool(
            held == values.shape[2] == index == min(offset, size) and (keep, size) == like[3:5]
        )

    def adopted(self, state: Any, like: Any) -> Any:
        slot = RotatingKVCache.from_state(state)
        made = self.state(slot)
        if not self.agrees(made, like):
            raise ValueError("window positions contradict each other")
        return made


def _row_bytes(slot: Any) -> int:
    return sum(int(a.nbytes) // int(a.shape[2]) for a in (slot.keys, slot.values))


Adapter = Sliced | Checkpointed

ADAPTERS: Mapping[type, Adapter] = {
    KVCache: Sliced("KVCache"),
    WindowCache: Windowed("RotatingKVCache"),
    QuantizedKVCache: Quantised(
        "QuantizedKVCache", ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2"), batchable=False
    ),
    ArraysCache: Recurrent("ArraysCache", batchable=True),
    ChunkedKVCache: Chunked("ChunkedKVCache"),
    RotatingKVCache: Ring("RotatingKVCache"),
}
"""Adapters by exact class: a subclass may behave differently, and is unknown."""


def adapter_of(slot: Any) -> Adapter | None:
    """The adapter of a slot's class; None for an unknown class."""
    return ADAPTERS.get(type(slot))


def parts_of(cache: Any) -> list[Any] | None:
    """The members of a composite cache; None for any other cache."""
    return list(cache.caches) if type(cache) is CacheList else None


def composed(parts: Sequence[Any]) -> Any:
    """Build a composite cache of `parts`."""
    return CacheList(*parts)


def class_name(cache: Any) -> str:
    """mlx-lm's name of a cache's class, composites included."""
    adapter = adapter_of(cache)
    return type(cache).__name__ if adapter is None else adapter.name


def prepared(cache: Any) -> Any:
    """Replace an empty cache of the model by the class used here: a sliding window by a log.

    A `ConcatenateKVCache` is replaced by a `KVCache`, which is equivalent and writes in place.
    """
    parts = parts_of(cache)
    if parts is not None:
        return composed([prepared(part) for part in parts])
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return WindowCache(cache.max_size)
    if type(cache) is ConcatenateKVCache:
        return KVCache()
    return cache
