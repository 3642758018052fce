"""When a disk that fails is tried again, and with what."""

from __future__ import annotations

import numpy as np
import pytest

from mlxcache.cache.write_behind import FIRST_S, RETRY_S, Refused
from mlxcache.tree.prefix_tree import PrefixTree


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_pauses_double_up_to_a_bound(clock: Clock) -> None:
    """Whoever asks is woken when each is over; failures during one change nothing."""
    refused = Refused(clock)
    pauses: list[float] = []
    refused.wake_in = pauses.append
    for _ in range(8):
        refused.failed()
        refused.failed()
        assert refused.leaves_alone
        clock.now += pauses[-1]
        assert not refused.leaves_alone
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert pauses[-2:] == [RETRY_S, RETRY_S]
    clock.now += 2 * RETRY_S
    refused.failed()
    assert pauses[-1] == FIRST_S


def test_a_disk_that_works_now_and_then_is_not_tried_every_second(clock: Clock) -> None:
    """A small file fits where a large one does not."""
    refused = Refused(clock)
    pauses: list[float] = []
    refused.wake_in = pauses.append
    for _ in range(3):
        refused.failed()
        clock.now += pauses[-1]
        refused.worked()
        assert not refused.failing
    assert pauses == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]


def test_what_left_ram_is_not_tried_again(clock: Clock) -> None:
    """Of the others all tokens are, whoever holds their KV."""
    tree, refused = PrefixTree(1), Refused(clock)
    ids = np.arange(10, dtype=np.int32)
    gone = tree.insert(ids[::-1].copy(), "a")
    tree.insert(ids[:4], "b")
    kept = tree.insert(ids, "c")
    for node in (gone, kept):
        refused.add(node)
    tree.cut(gone, 0)
    assert refused.due
    found = refused.take()
    assert found is not None
    assert found[0] is kept
    assert found[1].tolist() == ids.tolist()
    assert refused.take() is None
    assert not refused.due
