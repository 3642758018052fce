"""Whether a file of KV holds numbers: a model that overflows leaves NaN."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mlxcache.safetensors import Malformed, Place, read_header
from mlxcache.store.verify import opened

AT_ONCE = 4 << 20
"""Bytes that are read together."""

_EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
"""A float whose exponent has all bits set is no number: https://en.wikipedia.org/wiki/IEEE_754."""


def is_finite(path: Path, row: int) -> bool:
    """Whether row `row` of each of a run's tensors, and all behind it, are numbers.

    False also where the file cannot be read.
    """
    try:
        with opened(path) as fd:
            return all(_finite(fd, place, row) for place in read_header(fd).places)
    except (Malformed, OSError):
        return False


def _finite(fd: int, place: Place, row: int) -> bool:
    """The same of one tensor, whose first axis is the run's tokens."""
    if place.dtype not in _EXPONENTS or not place.nbytes:
        return True
    kind, bits = _EXPONENTS[place.dtype]
    end = place.offset + place.nbytes
    for at in range(place.offset + row * (place.nbytes // place.shape[0]), end, AT_ONCE):
        raw = os.pread(fd, min(AT_ONCE, end - at), at)
        values = np.frombuffer(raw, kind)
        if np.any((values & values.dtype.type(bits)) == bits):
            return False
    return True
