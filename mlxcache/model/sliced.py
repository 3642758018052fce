"""Cache classes that can be cut at any token (see `adapters`). MLX thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


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
