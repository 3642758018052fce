"""Earlier text like the newest is found, and nothing of what stands apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.guess.history import BREAK, GRAM, LOOK, MOST_MATCHED, NO_GUESS, Guess, TokenLog
from mlxcache.types import token_ids


def log_of(ids: list[int], most: int = 1 << 18) -> TokenLog:
    log = TokenLog(most)
    log.extend(ids)
    return log


def naive(ids: list[int], count: int) -> int:
    """The most tokens before any earlier place that the newest end has in common with it."""
    best = 0
    for place in range(GRAM - 1, len(ids) - 1):
        matched = 0
        while matched < min(MOST_MATCHED, place + 1) and ids[place - matched] == ids[-1 - matched]:
            matched += 1
        best = max(best, matched)
    return best if best >= GRAM else 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
def test_the_longest_match_is_found(ids: list[int], count: int) -> None:
    """Wherever there are no more candidates than are looked at."""
    found = log_of(ids).guess(count)
    expected = naive(ids, count)
    same = sum(ids[i : i + GRAM] == ids[-GRAM:] for i in range(len(ids) - GRAM))
    if same <= LOOK:
        assert found.matched == expected
    assert found.matched <= expected
    assert (found == NO_GUESS) is (found.matched == 0)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=700), max_size=4))
def test_tokens_added_at_once_are_indexed_like_one_after_another(parts: list[list[int]]) -> None:
    """In bulk by NumPy, and one by one; also beyond the first size of the index."""
    many, single = TokenLog(), TokenLog()
    for part in parts:
        many.extend(token_ids(part))
        for token in part:
            single.extend([token])
        assert many.guess(9) == single.guess(9)
    assert len(many) == len(single) == sum(map(len, parts))


def test_of_equal_matches_the_newest_counts() -> None:
    assert log_of([1, 2, 3, 7, 0, 1, 2, 3, 8, 9, 1, 2, 3]).guess(1) == Guess((8,), 3)


def test_a_text_that_repeats_is_continued() -> None:
    assert log_of([5, 6, 5, 6, 5, 6]).guess(5).tokens == (5, 6, 5, 6, 5)


def test_no_match_and_no_guess_spans_a_cut() -> None:
    """What stands on its other side is another text."""
    log = log_of([1, 2, 3, 4])
    log.cut()
    log.extend([9, 1, 2, 3])
    assert log.guess(5) == Guess((4,), 3)
    log.extend([4])
    assert log.guess(5) == NO_GUESS  # nothing followed it
    log.cut()
    assert log.guess(3) == NO_GUESS
    assert BREAK not in log_of([1, 2, 3, 1, 2, 3]).guess(9).tokens


def test_a_log_takes_twelve_bytes_a_token_and_drops_the_oldest() -> None:
    log = TokenLog(5000)
    rng = np.random.default_rng(1)
    for _ in range(40):
        log.extend(token_ids(rng.integers(0, 900, 500, np.int32)))
        assert len(log) <= 5000
    assert log.nbytes <= 12 * 8192
    newest = token_ids(rng.integers(0, 900, 300, np.int32))
    log.extend(newest)
    log.extend(newest[:50])
    assert log.guess(3).tokens == tuple(newest[50:53].tolist())
    log.extend(token_ids(rng.integers(0, 900, 20_000, np.int32)))
    assert len(log) <= 5000
