"""An array as bytes on their way to a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of each dtype, by its safetensors name."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One array's bytes on their way to a file, which nobody writes to as long as this lives.

    `dtype` is a key of `ITEM_BYTES`; `data` is C-contiguous and holds exactly the elements of
    `shape`. Raises ValueError where they do not agree.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        view = memoryview(self.data)
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: safetensors knows no dtype {self.dtype!r}")
        if not view.c_contiguous:
            raise ValueError(f"{self.name}: its bytes are not contiguous")
        if view.nbytes != self.nbytes:
            raise ValueError(
                f"{self.name}: {self.dtype} of shape {self.shape} takes {self.nbytes} bytes, "
                f"not {view.nbytes}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> memoryview:
        """The elements as a flat view of bytes; no copy."""
        view = memoryview(self.data)
        return view.cast("B") if view.nbytes else memoryview(b"")
