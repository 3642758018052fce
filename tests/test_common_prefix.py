"""Common prefixes of token ids and of texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.common_prefix import common_characters, common_length
from mlxcache.types import token_ids


@given(st.text("ab", max_size=50), st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_the_common_prefix_is_what_a_loop_would_count(start: str, one: str, other: str) -> None:
    """Compared in blocks, counted to the character."""
    a, b = start + one, start + other
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_characters(a, b) == expected


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 4097, 12288, 12289, 99_999])
def test_the_common_prefix_of_long_texts(at: int) -> None:
    """Also where the difference is beside a block's end."""
    a = "x" * 100_000
    assert common_characters(a, a[:at] + "y" + a[at + 1 :]) == at
    assert common_characters(a, a[:at]) == at


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_token_ids_share_what_a_loop_would_count(one: list[int], other: list[int]) -> None:
    """Also where one begins with the other, or is empty."""
    pairs = zip(one, other, strict=False)
    expected = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    assert common_length(token_ids(one), token_ids(other)) == expected
