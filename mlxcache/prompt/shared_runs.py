"""Search for token sequences that two prompts have in common after they differ."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mlxcache.common_prefix import common_length
from mlxcache.types import Tokens

LEAST_RUN = 16
"""Fewest equal tokens in sequence that count; shorter sequences are often equal by chance."""

_BLOCK = 8
"""Tokens per hash: `2 * _BLOCK - 1` equal tokens always contain a whole block of the old prompt."""
_TRIED = 4
"""Places of the old prompt that are compared for each block."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of tokens, in order and without overlap."""


def shared_runs(old: Tokens, new: Tokens) -> Runs:
    """Return half-open ranges of `new` whose tokens `old` has too, in the same sequence.

    `old` has shape (n,), `new` has shape (m,). Each token of `old` is used at most once, and the
    order of the sequences in `old` may be another one. Ranges of fewer than `LEAST_RUN` tokens are
    left out. Takes about O(n + m): only blocks with equal hashes are compared.
    """
    if min(len(old), len(new)) < LEAST_RUN:
        return ()
    held, sought = _hashes(old)[::_BLOCK], _hashes(new)
    places = defaultdict[int, deque[int]](deque)
    for n, one in enumerate(held.tolist()):
        places[one].append(n * _BLOCK)
    used = np.zeros(len(old), bool)
    found: list[tuple[int, int]] = []
    end = 0
    for at in np.flatnonzero(np.isin(sought, held)).tolist():
        if at < end:
            continue
        left = places[int(sought[at])]
        while left and used[left[0]]:
            left.popleft()
        tried = [place for place in islice(left, _TRIED) if not used[place]]
        start, place, size = _longest(old, new, used, (at, end), tried)
        if size >= LEAST_RUN:
            end = start + size
            used[place : place + size] = True
            found.append((start, end))
    return tuple(found)


def count_within(runs: Iterable[tuple[int, int]], start: int, end: int) -> int:
    """Return how many tokens of the ranges `runs` lie in [start, end)."""
    return sum(max(0, min(end, last) - max(start, first)) for first, last in runs)


def _hashes(ids: Tokens) -> NDArray[np.uint64]:
    """Return a hash of the `_BLOCK` tokens that begin at each position.

    `ids` has shape (n,), the result has shape (n - `_BLOCK` + 1,). The arithmetic wraps around
    intentionally.
    """
    values = np.ascontiguousarray(ids).astype(np.int64).view(np.uint64)
    size = len(values) - _BLOCK + 1
    hashed = np.zeros(size, np.uint64)
    for offset in range(_BLOCK):
        hashed = hashed * _FACTOR + values[offset : offset + size]
    return hashed


def _longest(
    old: Tokens, new: Tokens, used: NDArray[np.bool_], at: tuple[int, int], places: Sequence[int]
) -> tuple[int, int, int]:
    """Return the longest sequence around a token of `new` that `old` has too.

    The result is (start in `new`, start in `old`, number of tokens); the number is 0 if there is
    none. `at`: (position of the token in `new`, least position in `new` at which the sequence may
    begin). `used`: True for tokens of `old` in sequences found before, shape (n,).
    `places`: positions in `old` with which the token is compared.
    """
    best = at[0], 0, 0
    for place in places:
        size = common_length(old[place:], new[at[0] :])
        taken = used[place : place + size]
        size = int(taken.argmax()) if taken.any() else size
        back = 0
        most = min(at[0] - at[1], place) if size else 0
        while back < most and not used[place - back - 1]:
            if old[place - back - 1] != new[at[0] - back - 1]:
                break
            back += 1
        if back + size > best[2]:
            best = at[0] - back, place - back, back + size
    return best
