"""Adapters of mlx-lm's cache classes, which tell how their content can be reused.

The cache of a model is a list with one object per layer. A composite cache is replaced by its
members. These objects are called *slots*. A slot is one of

- sliced (linear): arrays with a row for every position, token axis -2; any range can be sliced out;
- checkpointed (opaque): its state stands for exactly one position.

A class that is not named here is unknown, and its content is never reused. MLX thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

from mlxcache.model.arrays import (
    ArraySpec,
    appended,
    copied,
    copied_tree,
    held_tree,
    joined,
    tree_arrays,
    zeros,
)
from mlxcache.model.grouped import NAME as LAYER_CACHE
from mlxcache.model.grouped import GroupedCache, GroupRows, RecentRows, grouped

REWINDS = 64
"""Positions that a window keeps behind itself, for guesses that passes find wrong."""

Kind = Literal[
    "sliceable", "latent", "grouped", "window", "recurrent", "chunked", "recent", "ring", "unknown"
]
"""How a slot caches, for the user; those that are easier to reuse come first."""


class Sliced:
    """Adapter for slots of a class that hold a row for every position.

    `name`: mlx-lm's name of the class. `places`: the keys of its arrays in mlx-lm's flattened
    `state`, such as "0" and "1". `batchable`: mlx-lm has a batch version of the class. `portable`:
    mlx-lm can read the class from a prompt cache file.
    """

    portable = True

    def __init__(self, name: str, places: Sequence[str] = ("0", "1"), *, batchable: bool = True):
        self.name = name
        self.places = tuple(places)
        self.batchable = batchable

    def kind(self, slot: Any) -> Kind:
        first, *rest = self.arrays(slot)
        latent = len(rest) == 1 and all(a.shape[1] == 1 for a in (first, *rest))
        # multi-head latent attention: a latent and its rotary part
        return "latent" if latent and first.shape[3] != rest[0].shape[3] else "sliceable"

    def filled(self, slot: Any) -> bool:
        return slot.keys is not None

    def first_write(self, slot: Any) -> int:
        """Return how many tokens the model must be fed until it writes the slot's first rows."""
        return 1

    def arrays(self, slot: Any) -> list[mx.array]:
        """Return the slot's arrays, (1, heads, capacity, dim) each, in the order of `places`."""
        return [slot.keys, slot.values]

    def put(self, slot: Any, index: int, array: mx.array) -> None:
        setattr(slot, ("keys", "values")[index], array)

    def end_at(self, slot: Any, offset: int) -> None:
        """Set the slot's length to `offset` positions; later ones will be overwritten."""
        slot.offset = offset

    def plain(self, slot: Any) -> Any:
        """Return a cache of mlx-lm's own class with views of the content alone."""
        twin = copy(slot)
        if self.filled(slot):
            for index, array in enumerate(self.arrays(slot)):
                self.put(twin, index, array[..., : slot.offset, :])
        return twin


class Grouped(Sliced):
    portable = False

    def kind(self, slot: Any) -> Kind:
        return "grouped"

    def filled(self, slot: Any) -> bool:
        return slot.rows is not None

    def first_write(self, slot: Any) -> int:
        return int(slot.ratio)

    def arrays(self, slot: Any) -> list[mx.array]:
        return [slot.rows]

    def put(self, slot: Any, index: int, array: mx.array) -> None:
        slot.put(array)

    def end_at(self, slot: Any, offset: int) -> None:
        slot.end_at(offset)


class WindowCache(RotatingKVCache):  # type: ignore[misc]
    """Cache of a sliding-window layer whose newest `REWINDS` positions can be taken back.

    Its buffers hold the rows of positions [begin, offset) in their order, and slide when they are
    full. The model gets what `RotatingKVCache` would return: the last `max_size - 1` positions and
    the new ones.
    """

    step = 64
    offset: int
    keys: Any
    values: Any

    def __init__(self, max_size: int):
        super().__init__(max_size=max_size, keep=0)
        self.begin = self._seen_from = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if not self.covers(self.offset, self.max_size - 1):
            raise RuntimeError(f"a sliding window lacks positions before {self.offset}")
        held = self.offset - self.begin
        if self.keys is not None and held + keys.shape[2] > self.keys.shape[2]:
            held = self._slide()
        self.keys = appended(self.keys, keys, held, self.step)
        self.values = appended(self.values, values, held, self.step)
        self._seen_from = max(0, self.offset - self.max_size + 1)
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def _slide(self) -> int:
        held: int = self.offset - self.begin
        kept: int = min(held, self.max_size - 1 + REWINDS)
        self.keys, self.values = (
            array[..., held - kept : held, :] for array in (self.keys, self.values)
        )
        self.begin = self.offset - kept
        return kept

    def covers(self, position: int, window: int) -> bool:
        """Return whether the `window` rows before `position` are here, or all before it."""
        return self.begin <= max(0, position - window) and position <= self.offset

    def make_room(self, rows: int) -> None:
        """Replace the buffers by copies with room for `rows` rows, lazily; none is dropped."""
        held = self.offset - self.begin
        for name in ("keys", "values"):
            array = getattr(self, name)
            pad = zeros((*array.shape[:2], rows - held, array.shape[3]), array.dtype)
            setattr(self, name, joined([array[..., :held, :], pad]))

    def slim(self) -> None:
        """Replace the buffers by copies of the rows that may be needed again, lazily."""
        if self.keys is not None:
            self._slide()
            self.keys, self.values = copied(self.keys), copied(self.values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._rows(self._seen_from, self.offset)

    def _rows(self, first: int, last: int) -> tuple[mx.array, mx.array]:
        view = (..., slice(first - self.begin, last - self.begin), slice(None))
        return self.keys[view], self.values[view]

    def state_at(self, position: int) -> Any:
        """Return the state of a ring after `position` tokens, as views."""
        if self.keys is None:
            return None, None, self.offset, 0, self.max_size, 0
        keys, values = self._rows(max(0, position - self.max_size), position)
        return keys, values, position, 0, self.max_size, keys.shape[2]

    def go_on_from(self, state: Any) -> None:
        self.keys, self.values, self.offset, _, _, held = state
        self._seen_from = self.begin = self.offset - held

    def go_on_to(self, state: Any) -> None:
        """Append the rows of `state`, which is that of a later position of the same tokens."""
        keys, values, offset, _, _, held = state
        new = offset - self.offset
        if self.keys is None:
            self.go_on_from(copied_tree(state))
        elif new > held:
            room = self.keys.shape[2]
            self.go_on_from(state)
            self.make_room(max(room, held))
        elif new:
            self.update_and_fetch(keys[..., -new:, :], values[..., -new:, :])

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N > 1:
            return super().make_mask(N, window_size=window_size, return_array=return_array)
        if window_size is None or window_size >= self.max_size or self.offset < window_size:
            return None
        seen = min(self.offset + 1, self.max_size)
        return mx.arange(seen) >= seen - window_size

    def is_trimmable(self) -> bool:
        return False

    @classmethod
    def merge(cls, caches: Sequence[WindowCache]) -> BatchRotatingKVCache:
        return BatchRotatingKVCache.merge([c.ring() for c in caches])

    def ring(self) -> RotatingKVCache:
        ring = RotatingKVCache(max_size=self.max_size)
        ring.state = self.state_at(self.offset)
        return ring


class Checkpointed(ABC):
    """Adapter for slots of a class whose state stands for exactly one position.

    `growing`: the axis of its arrays that may have any size. `rewinds`: what `hold` returns stays
    valid while the model is fed. `cuts`: a smaller `offset` drops the newest positions. The rest
    as in `Sliced`.
    """

    portable = True
    rewinds = False
    cuts = False
    growing: int | None = None

    def __init__(self, name: str, *, batchable: bool = False):
        self.name = name
        self.batchable = batchable

    @abstractmethod
    def kind(self, slot: Any) -> Kind: ...

    def window(self, slot: Any) -> int | None:
        """Return the tokens of its window or chunk, None if it has neither."""
        return None

    def state(self, slot: Any) -> Any:
        """Return the state as nested tuples of lazy views, without what nothing attends to."""
        return slot.state

    def set_state(self, slot: Any, state: Any) -> None:
        """Set the slot's state. The caller must not write to `state` afterwards."""
        slot.state = state

    def go_on_to(self, slot: Any, state: Any) -> None:
        """Set the slot's state to a copy of a later one of the same tokens, lazily."""
        self.set_state(slot, copied_tree(state))

    def settle(self, slot: Any) -> None:
        """Copy the state, lazily, if it may be a view of a larger buffer."""
        self.set_state(slot, copied_tree(self.state(slot)))

    def hold(self, slot: Any) -> Any:
        """Return what `put_back` needs to return to the present position, without a copy."""
        return held_tree(self.state(slot))

    def put_back(self, slot: Any, held: Any) -> None:
        self.set_state(slot, held)

    def plain(self, slot: Any) -> Any:
        """Return a cache of mlx-lm's own class with the same content."""
        return slot

    def most_bytes(self, slot: Any) -> int:
        return sum(array.nbytes for array in tree_arrays(self.state(slot)))

    def running_bytes(self, slot: Any) -> int:
        """Return an upper bound of what a slot holds while it is fed, such as capacity to grow."""
        return self.most_bytes(slot)

    def position(self, state: Any) -> int | None:
        """Return the number of positions that `state` covers, or None if it has no such number."""
        return None

    def blank(self, like: Any, position: int) -> Any:
        """Return zeros in place of the state after `position` tokens, None if it needs none.

        `like`: the structure of a state, with an ArraySpec in place of each array.
        """
        return None

    def agrees(self, state: Any, like: Any) -> bool:
        """Return whether the integers in `state` fit its arrays and those of `like`."""
        return True

    def adopted(self, state: Any, like: Any) -> Any:
        """Convert a state saved by mlx-lm. Raises ValueError if its integers contradict `like`."""
        return state


class Recurrent(Checkpointed):
    rewinds = True

    def kind(self, slot: Any) -> Kind:
        return "recurrent"

    def set_state(self, slot: Any, state: Any) -> None:
        slot.state = [list(state[0]), *state[1:]]


class Chunked(Checkpointed):
    growing = 2

    def kind(self, slot: Any) -> Kind:
        return "chunked"

    def window(self, slot: Any) -> int | None:
        return int(slot.chunk_size)

    def state(self, slot: Any) -> Any:
        return slot.state if slot.keys is None else self._cut(slot.state)

    def _cut(self, state: Any) -> Any:
        keys, values, offset, chunk, begin = state
        end = offset - begin
        first = max(0, end - chunk)
        return keys[..., first:end, :], values[..., first:end, :], offset, chunk, begin + first

    def most_bytes(self, slot: Any) -> int:
        return row_bytes(slot) * int(slot.chunk_size)

    def running_bytes(self, slot: Any) -> int:
        return row_bytes(slot) * int(slot.chunk_size + slot.step)  # it allocates in steps

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
    """Slots of `RotatingKVCache` with `keep`, which overwrite positions in a ring."""

    growing = 2

    def kind(self, slot: Any) -> Kind:
        return "ring"

    def window(self, slot: Any) -> int | None:
        return int(slot.max_size)

    def state(self, slot: Any) -> Any:
        if slot.keys is None:
            return slot.state
        ordered = [slot._temporal_order(array) for array in (slot.keys, slot.values)]
        keys, values = (slot._trim(a.shape[2] - slot.max_size, a) for a in ordered)
        return keys, values, slot.offset, slot.keep, slot.max_size, keys.shape[2]

    def most_bytes(self, slot: Any) -> int:
        return row_bytes(slot) * int(slot.max_size)

    def position(self, state: Any) -> int | None:
        return int(state[2])

    def agrees(self, state: Any, like: Any) -> bool:
        keys, values, offset, keep, size, index = state
        held = keys.shape[2]
        return bool(
            held == values.shape[2] == index == min(offset, size) and (keep, size) == like[3:5]
        )

    def adopted(self, state: Any, like: Any) -> Any:
        made = Ring.state(self, RotatingKVCache.from_state(state))
        if not self.agrees(made, like):
            raise ValueError("window positions contradict each other")
        return made


class Windowed(Ring):
    rewinds = True
    cuts = True

    def kind(self, slot: Any) -> Kind:
        return "window"

    def state(self, slot: Any) -> Any:
        return slot.state_at(slot.offset)

    def set_state(self, slot: Any, state: Any) -> None:
        slot.go_on_from(state)

    def go_on_to(self, slot: Any, state: Any) -> None:
        slot.go_on_to(state)

    def settle(self, slot: Any) -> None:
        slot.slim()

    def hold(self, slot: Any) -> Any:
        return slot.offset  # a view of the buffer would cost a copy at the next write

    def put_back(self, slot: Any, held: Any) -> None:
        slot.offset = held

    def plain(self, slot: Any) -> Any:
        return slot.ring()

    def running_bytes(self, slot: Any) -> int:
        return row_bytes(slot) * int(slot.max_size + REWINDS + slot.step)

    def blank(self, like: Any, position: int) -> Any:
        keys, values, _, keep, size, _ = like
        held = min(position, size)
        rows = [_zero_positions(spec, held) for spec in (keys, values)]
        return (*rows, position, keep, size, held)

    def agrees(self, state: Any, like: Any) -> bool:
        return state[0] is state[1] is like[0] is None or super().agrees(state, like)


class Recent(Checkpointed):
    portable = False
    rewinds = True
    growing = 1

    def kind(self, slot: Any) -> Kind:
        return "recent" if self.window(slot) else "grouped"

    def window(self, slot: Any) -> int | None:
        return int(slot.window_size) if slot.window_size > 1 else None  # 1: only an open group

    def set_state(self, slot: Any, state: Any) -> None:
        slot.restore(state)

    def most_bytes(self, slot: Any) -> int:
        if slot.window is None:
            return 0
        _, kv, gate, newest, *_ = slot.state
        size = _vector_bytes([slot.window]) * int(slot.window_size)
        if slot.ratio > 1:
            size += _vector_bytes([kv, gate]) * int(slot.ratio - 1)
        return size + _vector_bytes(newest)

    def running_bytes(self, slot: Any) -> int:
        if slot.window is None:
            return 0
        most = self.most_bytes(slot)
        # a step leaves views there: of its own row beside the window, of its own token in a group
        pending = (slot.pending_kv, slot.pending_gate)
        return most + _vector_bytes([slot.window]) + _vector_bytes(pending)

    def position(self, state: Any) -> int | None:
        return int(state[4])

    def blank(self, like: Any, position: int) -> Any:
        window, kv, gate, newest, _, size, ratio = like
        pending, closed = (position % ratio, min(1, position // ratio)) if ratio else (0, 0)
        return (
            _zero_rows(window, min(position, size)),
            _zero_rows(kv, pending),
            _zero_rows(gate, pending),
            tuple(_zero_rows(spec, closed) for spec in newest),
            position,
            size,
            ratio,
        )

    def agrees(self, state: Any, like: Any) -> bool:
        window, kv, gate, newest, offset, size, ratio = state
        if (size, ratio) != tuple(like[5:]) or window.shape[1] != min(offset, size):
            return False
        pending = [array for array in (kv, gate) if array is not None]
        vectors = [array for array in newest if array is not None]
        return all(array.shape[1] == offset % ratio for array in pending) and all(
            array.shape[1] == min(1, offset // ratio) for array in vectors
        )


def _zero_positions(spec: ArraySpec | None, rows: int) -> mx.array | None:
    if spec is None:
        return None
    _, heads, _, dim = spec.shape
    return mx.zeros((1, heads or 0, rows, dim or 0), spec.dtype)


def _zero_rows(spec: ArraySpec | None, rows: int) -> mx.array | None:
    return None if spec is None else mx.zeros((1, rows, spec.shape[2] or 0), spec.dtype)


def _vector_bytes(arrays: Sequence[mx.array | None]) -> int:
    return sum(int(a.shape[2]) * a.dtype.size for a in arrays if a is not None)


def row_bytes(slot: Any) -> int:
    if slot.keys is None:
        return 0
    return sum(int(a.nbytes) // int(a.shape[2]) for a in (slot.keys, slot.values))


Adapter = Sliced | Checkpointed

ADAPTERS: dict[type, Adapter] = {
    KVCache: Sliced("KVCache"),
    WindowCache: Windowed("RotatingKVCache", batchable=True),
    ArraysCache: Recurrent("ArraysCache", batchable=True),
    ChunkedKVCache: Chunked("ChunkedKVCache"),
    RotatingKVCache: Ring("RotatingKVCache"),
    GroupRows: Grouped(LAYER_CACHE, ("0",), batchable=False),
    RecentRows: Recent(LAYER_CACHE),
}
"""Adapters by exact class. A subclass counts as unknown, because it may behave differently."""


COMPOSITES: set[type] = {GroupedCache}
"""Classes of ours that consist of the slots in their attribute `parts`."""


def register(adapters: Mapping[type, Adapter], composites: Iterable[type] = ()) -> None:
    """Add adapters and composites that other modules have."""
    ADAPTERS.update(adapters)
    COMPOSITES.update(composites)


def adapter_of(slot: Any) -> Adapter | None:
    return ADAPTERS.get(type(slot))


def parts_of(cache: Any) -> list[Any] | None:
    """Return the members of a composite cache, or None for any other."""
    if type(cache) in COMPOSITES:
        return list(cache.parts)
    return list(cache.caches) if type(cache) is CacheList else None


def composed(cache: Any, parts: Sequence[Any]) -> Any:
    """Return a composite cache as `cache` is, of other parts."""
    return cache.of(parts) if type(cache) in COMPOSITES else CacheList(*parts)


def class_name(cache: Any) -> str:
    named = cache if type(cache) in COMPOSITES else adapter_of(cache)
    return str(getattr(named, "name", type(cache).__name__))


def prepared(cache: Any, layer: Any = None) -> Any:
    """Return an empty cache to use instead of `cache`, which the model made for `layer`.

    A `ConcatenateKVCache` becomes a `KVCache`, which is equivalent and writes in place.
    """
    if type(cache) is CacheList:
        return composed(cache, [prepared(part) for part in cache.caches])
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return WindowCache(cache.max_size)
    if type(cache) is ConcatenateKVCache:
        return KVCache()
    made = grouped(cache, layer) if layer is not None else None
    return cache if made is None else made
