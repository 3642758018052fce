"""Lengths of the common prefix of two token sequences or two texts."""

from __future__ import annotations

from mlxcache.types import Tokens

_BLOCK = 4096


def common_length(a: Tokens, b: Tokens) -> int:
    size = min(len(a), len(b))
    if size == 0:
        return 0
    differ = a[:size] != b[:size]
    first = int(differ.argmax())
    return first if differ[first] else size


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
