"""Token ids are int32 arrays wherever they are made, or are not made at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxcache.types import NO_TOKENS, ids_of_bytes, join_ids, token_ids

IDS = token_ids([5, -7, 2**31 - 1])


@pytest.mark.parametrize(
    "ids",
    [np.zeros(3, np.int64), np.zeros((1, 3), np.int32), np.zeros(3), [1.0], ["1"], [[1]], [2**31]],
)
def test_what_is_not_token_ids_is_refused(ids: Any) -> None:
    """A silent cast could match what is not the same."""
    with pytest.raises((TypeError, OverflowError)):
        token_ids(ids)


@pytest.mark.parametrize("other", [[1, 2], [], np.zeros(2, np.int64)])
def test_only_token_ids_are_joined(other: Any) -> None:
    with pytest.raises(TypeError):
        join_ids(IDS, other)


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        token_ids(np.array([5, 0, -7, 0, 2**31 - 1], np.int32)[::2]),
        ids_of_bytes(IDS.tobytes()),
        ids_of_bytes(memoryview(b"x" + IDS.tobytes())[1:]),
        join_ids(NO_TOKENS, IDS[:1], IDS[1:], NO_TOKENS),
    ],
)
def test_made_in_any_way_they_are_the_same(ids: Any) -> None:
    assert ids.dtype == np.int32
    assert ids.tolist() == [5, -7, 2**31 - 1]
    assert ids.flags.c_contiguous
    assert not ids.flags.writeable
