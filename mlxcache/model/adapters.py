"""mlx-lm's cache classes, told apart by what can be done with each. MLX thread only.

A model's cache is a list with one object per layer. Composites are opened, and their members are
*slots*. A slot is one of

- sliced: arrays with a row for every position, token axis -2; any token can be cut out;
- a window: sliced too, and only the positions shortly before one are needed to go on from it;
- checkpointed: its state stands for exactly one position.

Only this module and `rows` name the classes. A class that is not named here is unknown, and is
never guessed.
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
    """A class whose slots hold a row for every position.

    `name` is mlx-lm's for the class, `arrays` what the slot's arrays are called, by their places in
    its `state`; `verb` says what can be done with it. `batchable`: mlx-lm has a class for several
    sequences.
    """

    verb = "slice"
    quantised = False

    def __init__(self, name: str, places: Sequence[str] = ("0", "1"), *, batchable: bool = True):
        self.name = name
        self.places = tuple(places)
        self.batchable = batchable

    def filled(self, slot: Any) -> bool:
        """Whether anything was ever put into it."""
        return slot.keys is not None

    def arrays(self, slot: Any) -> list[mx.array]:
        """Its arrays, shape (1, heads, capacity, dim) each, in the order of `places`."""
        return [slot.keys, slot.values]

    def put(self, slot: Any, index: int, array: mx.array) -> None:
        """Make `array` that of its arrays."""
        setattr(slot, ("keys", "values")[index], array)

    def end_at(self, slot: Any, offset: int) -> None:
        """Make it hold positions [0, offset); what lies beyond will be overwritten."""
        slot.offset = offset

    def window(self, slot: Any) -> int | None:
        """How many positions a new one sees, itself included; None for all of them."""
        return None

    def numbers(self, slot: Any) -> dict[str, int]:
        """The numbers of its state that are the model's, by their places in it."""
        return {}

    def plain(self, slot: Any) -> Any:
        """What it holds as mlx-lm itself would have it, without room for more. Views."""
        if not self.filled(slot):
            return slot
        twin = self.empty_like(slot)
        for index, array in enumerate(self.arrays(slot)):
            self.put(twin, index, array[..., : slot.offset, :])
        twin.offset = slot.offset
        return twin

    def empty_like(self, slot: Any) -> Any:
        """A slot that holds nothing."""
        return type(slot)()

    def comparable(self, slot: Any, arrays: Sequence[mx.array]) -> list[mx.array]:
        """`arrays`, such as a slot like this has, as numbers that differ little if KV does."""
        return list(arrays)


class Windowed(Sliced):
    """`WindowCache`: a sliding window as a log."""

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
    """Keys and values quantised along each head: packed numbers, scales and biases of both."""

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
    and the new ones, in temporal order. But nothing is overwritten, so the window before any
    position can be had again by slicing, and a step appends in place.
    """

    step = 256
    offset: int

    def __init__(self, max_size: int):
        super().__init__(max_size=max_size, keep=0)
        self._start = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, shapes (1, heads, n, dim); return the window they see."""
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
        """As `RotatingKVCache.make_mask`, for keys that are in temporal order."""
        if N > 1:
            return super().make_mask(N, window_size=window_size, return_array=return_array)
        if window_size is None or window_size >= self.max_size or self.offset < window_size:
            return None
        seen = min(self.offset + 1, self.max_size)
        return mx.arange(seen) >= seen - window_size

    def is_trimmable(self) -> bool:
        """Always: no position is ever overwritten."""
        return True

    @classmethod
    def merge(cls, caches: Sequence[WindowCache]) -> BatchRotatingKVCache:
        """One batch cache that holds the windows alone."""
        return BatchRotatingKVCache.merge([c.ring() for c in caches])

    def ring(self) -> RotatingKVCache:
        """The window before the next position, as mlx-lm's own class."""
        ring = RotatingKVCache(max_size=self.max_size)
        if self.keys is not None:
            start = max(0, self.offset - self.max_size)
            ring.keys = self.keys[..., start : self.offset, :]
            ring.values = self.values[..., start : self.offset, :]
            ring.offset, ring._idx = self.offset, self.offset - start
        return ring


class Checkpointed:
    """A class whose slots hold a state that stands for one position.

    `growing` is the axis of its arrays that may have any size, None where all sizes are fixed.
    """

    verb = "checkpoint"
    growing: int | None = None

    def __init__(self, name: str, *, batchable: bool = False):
        self.name = name
        self.batchable = batchable

    def state(self, slot: Any) -> Any:
        """Its state without what no later position can see: nested tuples. Views; lazy."""
        return slot.state

    def set_state(self, slot: Any, state: Any) -> None:
        """Make `state` its own, which nobody else may write to."""
        slot.state = state

    def most_bytes(self, slot: Any) -> int | None:
        """What its state can take however long the text, in bytes; None for what it takes now."""
        return None

    def running_bytes(self, slot: Any) -> int | None:
        """What it holds at most while it is stepped, in bytes; None for no more than its state."""
        return None

    def position(self, state: Any) -> int | None:
        """How many positions a state covers, where it says so."""
        return None

    def agrees(self, state: Any, like: Any) -> bool:
        """Whether a state's numbers fit its arrays, and those of `like` that are the model's."""
        return True

    def adopted(self, state: Any, like: Any) -> Any:
        """A state that mlx-lm saved, as `state` would have it. Raises ValueError if it can't be."""
        return state


class Recurrent(Checkpointed):
    """`ArraysCache`: arrays of a fixed size, whatever the length of the text."""

    def set_state(self, slot: Any, state: Any) -> None:
        slot.state = [list(state[0]), *state[1:]]


class Chunked(Checkpointed):
    """`ChunkedKVCache`: the newest `chunk_size` positions, and where they begin."""

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
        return _row_bytes(slot) * int(slot.chunk_size + slot.step)  # it makes room by the step

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
            raise ValueError("chunks contradict themselves")
        return self._cut(state)


class Ring(Checkpointed):
    """`RotatingKVCache` that keeps its first positions: what it wrote over is gone."""

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
            raise ValueError("a window contradicts itself")
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
"""What is known. A subclass is another class: it may do otherwise."""


def adapter_of(slot: Any) -> Adapter | None:
    """The adapter of a slot's class; None for one that is unknown."""
    return ADAPTERS.get(type(slot))


def parts_of(cache: Any) -> list[Any] | None:
    """What a composite is made of; None for a cache that is none."""
    return list(cache.caches) if type(cache) is CacheList else None


def composed(parts: Sequence[Any]) -> Any:
    """A composite of `parts`."""
    return CacheList(*parts)


def class_name(cache: Any) -> str:
    """What mlx-lm calls the class of a cache, composites included."""
    adapter = adapter_of(cache)
    return type(cache).__name__ if adapter is None else adapter.name


def prepared(cache: Any) -> Any:
    """A model's empty cache as it is used here: a sliding window as a log, which can be sliced.

    A `KVCache` does what a `ConcatenateKVCache` does, and writes in place.
    """
    parts = parts_of(cache)
    if parts is not None:
        return composed([prepared(part) for part in parts])
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return WindowCache(cache.max_size)
    if type(cache) is ConcatenateKVCache:
        return KVCache()
    return cache
