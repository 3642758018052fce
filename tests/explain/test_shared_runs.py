"""Runs of tokens that two prompts share: found wherever they stand, and counted once."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.explain.compare import LEAST_RUN, count_within, shared_runs
from mlxcache.types import NO_TOKENS, Tokens, join_ids, token_ids

parts = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.integers(1, 60)),  # a piece that may occur again
        st.tuples(st.integers(100, 10**6), st.integers(1, 30)),  # one that does not
    ),
    max_size=8,
)


def ids(found: list[tuple[int, int]]) -> Tokens:
    """Tokens of pieces: each is a seed and a length."""
    pieces = [np.random.default_rng(seed).integers(0, 50, size, np.int32) for seed, size in found]
    return join_ids(NO_TOKENS, *map(token_ids, pieces))


@given(parts, parts)
def test_runs_are_in_both_and_each_token_counts_once(old, new):
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
    a, b, c = (token_ids(range(n, n + 100)) for n in (0, 1000, 2000))
    new = token_ids(range(5000, 5020))
    assert shared_runs(join_ids(a, b), join_ids(new, a, new, b)) == (
        (20, 120),
        (140, 240),
    )
    assert shared_runs(join_ids(a, b, c), join_ids(c, a)) == ((0, 100), (100, 200))
    assert shared_runs(a, join_ids(a, a)) == ((0, 100),)
    assert shared_runs(a, b) == ()
    assert shared_runs(a[:5], a[:5]) == ()


def test_long_prompts_take_little_time():
    rng = np.random.default_rng(1)
    pieces = [token_ids(rng.integers(0, 9, 200).astype(np.int32)) for _ in range(500)]
    mixed = [pieces[i] for i in rng.permutation(500)]
    same = token_ids([0] * 100_000)
    for one, other in (
        (same, same),
        (join_ids(*pieces), join_ids(*mixed)),
        (join_ids(*pieces[:2] * 250), join_ids(*pieces[1:3] * 250)),
    ):
        began = perf_counter()
        assert shared_runs(one, other)
        assert perf_counter() - began < 5
