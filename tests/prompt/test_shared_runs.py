"""Runs of tokens that two prompts share: found wherever they stand, and counted once."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.prompt.shared_runs import LEAST_RUN, count_within, shared_runs

parts = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.integers(1, 60)),  # a piece that may occur again
        st.tuples(st.integers(100, 10**6), st.integers(1, 30)),  # one that does not
    ),
    max_size=8,
)


def ids(found: list[tuple[int, int]]) -> np.ndarray:
    """Tokens of pieces: each is a seed and a length."""
    pieces = [np.random.default_rng(seed).integers(0, 50, size) for seed, size in found]
    return np.concatenate([np.zeros(0, np.int64), *pieces]).astype(np.int32)


@given(parts, parts)
def test_runs_are_in_both_and_each_token_counts_once(old, new):
    """In order, apart, long enough; no more tokens than the two have in common."""
    one, other = ids(old), ids(new)
    runs = shared_runs(one, other)
    end = 0
    text = one.tobytes()
    for start, after in runs:
        assert end <= start
        assert after - start >= LEAST_RUN
        assert other[start:after].tobytes() in text
        end = after
    common = Counter(one.tolist()) & Counter(other.tolist())
    assert count_within(runs, 0, len(other)) <= sum(common.values())


def test_what_stands_around_a_change_is_found():
    """Also if it moved, and where a piece was inserted."""
    a, b, c = (np.arange(n, n + 100, dtype=np.int32) for n in (0, 1000, 2000))
    new = np.arange(5000, 5020, dtype=np.int32)
    assert shared_runs(np.concatenate([a, b]), np.concatenate([new, a, new, b])) == (
        (20, 120),
        (140, 240),
    )
    assert shared_runs(np.concatenate([a, b, c]), np.concatenate([c, a])) == ((0, 100), (100, 200))
    assert shared_runs(a, np.concatenate([a, a])) == ((0, 100),)
    assert shared_runs(a, b) == ()
    assert shared_runs(a[:5], a[:5]) == ()


def test_only_tokens_of_the_range_are_counted():
    """The ends of a run may lie outside."""
    assert count_within([(0, 10), (20, 30)], 5, 25) == 10
    assert count_within([(0, 10)], 10, 20) == 0


def test_long_prompts_take_little_time():
    """Of one token repeated, of repeated pieces, and of pieces in another order."""
    rng = np.random.default_rng(1)
    pieces = [rng.integers(0, 9, 200).astype(np.int32) for _ in range(500)]
    mixed = [pieces[i] for i in rng.permutation(500)]
    same = np.zeros(100_000, np.int32)
    for one, other in (
        (same, same),
        (np.concatenate(pieces), np.concatenate(mixed)),
        (np.concatenate(pieces[:2] * 250), np.concatenate(pieces[1:3] * 250)),
    ):
        began = perf_counter()
        assert shared_runs(one, other)
        assert perf_counter() - began < 5
