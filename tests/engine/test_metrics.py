"""What requests came to, as each is over."""

from __future__ import annotations

import pytest

from mlxcache.engine.metrics import OUTCOMES, REASONS, SECONDS, Tally, Times, reuse_of
from mlxcache.types import WARMING, RequestRecord


def record(**more: object) -> RequestRecord:
    made = RequestRecord("r", None, "chat", None, "done", 0.0, 100, 60, 20, 40, 5)
    made.timing = {"queue_s": 0.5, "first_token_s": 2.0, "decode_s": 1.0}
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_times_are_counted_in_the_range_that_they_fall_into():
    """A bound is part of what is below it; what is longer than all has a range of its own."""
    times = Times()
    for seconds in (0.0, SECONDS[0], SECONDS[0] + 1e-9, SECONDS[-1], SECONDS[-1] + 1):
        times.add(seconds)
    assert (times.counts[0], times.counts[1], times.counts[-2], times.counts[-1]) == (2, 1, 1, 1)
    assert times.count == 5


def test_a_request_counts_by_where_its_prefix_came_from():
    """Its wait, and its whole time if it came to its end."""
    tally = Tally()
    tally.add(record())
    tally.add(record(restored_tokens=0))
    tally.add(record(cached_tokens=0, restored_tokens=0, status="cancelled"))
    assert {kind: times.count for kind, times in tally.first_token.items()} == {
        "cold": 1,
        "warm": 1,
        "restored": 1,
    }
    assert tally.whole["restored"].total_s == 3.0
    assert tally.whole["cold"].count == 0
    assert tally.stages["queue_s"] == 1.5


@pytest.mark.parametrize(
    ("prompt", "cached", "restored", "kind"),
    [
        (40_000, 20_000, 0, "warm"),
        (40_000, 19_999, 0, "cold"),
        (40_000, 39_000, 1, "restored"),
        (40_000, 4_100, 4_100, "cold"),
        (40, 20, 0, "warm"),
        (20, 16, 16, "cold"),
        (2, 1, 0, "cold"),
        (0, 0, 0, "cold"),
    ],
)
def test_a_prompt_is_warm_where_most_of_it_was_reused(prompt, cached, restored, kind):
    """A first token that all prompts have makes none warm, nor does a system prompt alone."""
    found = record(prompt_tokens=prompt, cached_tokens=cached, restored_tokens=restored)
    assert reuse_of(found) == kind


def test_who_joined_or_warmed_waits_for_nothing():
    """What a request that joined shows was computed for the other."""
    tally = Tally()
    tally.add(record(joined="other", lost={"reason": "edited", "cause": "x", "lost_tokens": 9}))
    tally.add(record(api=WARMING))
    tally.add(record(status="rejected", timing={}))
    assert tally.joined == 1
    assert tally.losses.total() == tally.lost_tokens.total() == 0
    assert sum(times.count for times in tally.first_token.values()) == 0
    assert tally.outcomes["chat", "done"] == tally.outcomes["chat", "rejected"] == 1


def test_what_never_happened_is_a_zero_and_not_nothing():
    """So that a first time shows as a rise."""
    tally = Tally()
    assert dict(tally.lost_tokens) == dict.fromkeys(REASONS, 0)
    tally.add(record(lost={"reason": "evicted", "cause": "memory", "lost_tokens": 30}))
    assert {outcome for _, outcome in tally.outcomes} == set(OUTCOMES)
    assert tally.lost_tokens["evicted"] == 30
    assert tally.losses == {("evicted", "memory"): 1}
