"""Lengths of the common prefix of two token sequences or two texts."""

from __future__ import annotations

from mlxcache.types import Tokens

_BLOCK = 4096

_FEW = 64
"""Tokens that are compared first: those of unrelated prompts differ early."""


def common_length(a: Tokens, b: Tokens) -> int:
    size = min(len(a), len(b))
    for end in (min(size, _FEW), size):
        differ = a[:end] != b[:end]
        first = int(differ.argmax()) if end else 0
        if end and differ[first]:
            return first
    return size


def common_characters(a: str, b: str) -> int:
    """Takes O(n) time and compares whole blocks of characters."""
    low, high = 0, min(len(a), len(b))
    step = _BLOCK
    while low < high and a[low : low + step] == b[low : low + step]:
        low, step = min(low + step, high), step * 2
    high = min(low + step, high)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
