"""Cache classes whose state stands for one position (see `adapters`). MLX thread only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache


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
