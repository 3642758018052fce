"""When a disk that fails is tried again, and with what."""

from __future__ import annotations

import pytest

from mlxcache.cache.write_behind import FIRST_RETRY_S, RETRY_S, RetryBackoff


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_pauses_double_up_to_a_bound(clock: Clock) -> None:
    """Whoever asks is woken when each is over; failures during one change nothing."""
    pauses: list[float] = []
    backoff = RetryBackoff(pauses.append, clock)
    for _ in range(8):
        backoff.note_failure()
        backoff.note_failure()
        assert backoff.paused
        clock.now += pauses[-1]
        assert not backoff.paused
    assert pauses[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert pauses[-2:] == [RETRY_S, RETRY_S]
    clock.now += 2 * RETRY_S
    backoff.note_failure()
    assert pauses[-1] == FIRST_RETRY_S


def test_a_disk_that_works_now_and_then_is_not_tried_every_second(clock: Clock) -> None:
    """A small file fits where a large one does not."""
    pauses: list[float] = []
    backoff = RetryBackoff(pauses.append, clock)
    for _ in range(3):
        backoff.note_failure()
        clock.now += pauses[-1]
        backoff.note_success()
        assert not backoff.failing
    assert pauses == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
